"""Run llama.cpp on the CPU, from a GGUF file that is made of the model's own weights.

The sequences' keys and values share one buffer of llama.cpp. Attention skips the buffer's cells of other sequences, and a
beginning that several sequences share is stored once."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from ctypes import POINTER, c_int8, c_int32, c_uint8
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from upshift.errors import JobFailed
from upshift.inference.generation.engines.base import DecoderBuild, NoExtension, Prefix
from upshift.inference.generation.engines.gguf_export import make_gguf
from upshift.inference.generation.engines.llamacpp_library import load_llamacpp
from upshift.inference.registry import Precision

PREFIX_SEQUENCE = 0  # llama.cpp's number of the sequence that holds the prompts' common beginning


class FileType(NamedTuple):
    """A precision in llama.cpp's terms. Products of rounded weights also round activations, to 16 or to 8 bits."""

    weights: str
    cache: str  # ggml type of keys and values


FILE_TYPES: dict[Precision, FileType] = {
    "fp32": FileType("ALL_F32", "F32"),
    "fp16": FileType("MOSTLY_F16", "F16"),
    "int8": FileType("MOSTLY_Q8_0", "F16"),
    "int4": FileType("MOSTLY_Q4_K_M", "F16"),  # as fast as Q4_0 here, and more accurate
}


class Row(NamedTuple):
    """A sequence of the decoder. ``prefix_length`` is the number of its first tokens that are stored with the prefix."""

    sequence: int
    prefix_length: int
    length: int


class SequenceState(NamedTuple):
    """The keys and values of a sequence, as bytes in llama.cpp's form, and the number of their tokens."""

    data: Any
    tokens: int


class LlamaCppDecoder(NoExtension):
    """The decoder of llama.cpp. Rows of different lengths need no padding."""

    joins = True

    def __init__(self, build: DecoderBuild) -> None:
        file_type = FILE_TYPES[build.setup.precision]
        path = make_gguf(build.source, build.folder, file_type.weights, build.setup.threads)
        self.weight_bytes = path.stat().st_size
        has_several_rows = build.setup.batch > 1
        self._context = LlamaCppContext(path, file_type.cache, build.setup.threads, has_several_rows=has_several_rows)
        self._rows: list[Row] = []
        self._prefix = Prefix(0, None)  # the tokens that PREFIX_SEQUENCE holds
        self._prefix_cells = 0  # cells of this prefix, and of earlier ones that rows may still use

    def compute(self, tokens: Sequence[int]) -> Prefix:
        self._drop_prefix()
        self._run(np.array(tokens), [Row(PREFIX_SEQUENCE, 0, 0)], [len(tokens)])
        self._prefix_cells += len(tokens)
        self._prefix = self._prefix_from(Row(PREFIX_SEQUENCE, 0, len(tokens)))
        return self._prefix

    def prefix_of_row(self, row: int) -> Prefix:
        return self._prefix_from(self._rows[row])

    def admit(self, prompts: Sequence[Sequence[int]], prefix: Prefix | None = None) -> np.ndarray:
        prefix_length = prefix.length if prefix else 0
        used_numbers = {row.sequence for row in self._rows}
        free_numbers = (number for number in count(PREFIX_SEQUENCE + 1) if number not in used_numbers)
        new_rows = [Row(number, prefix_length, prefix_length) for number in islice(free_numbers, len(prompts))]
        if prefix is not None:
            self._context.reserve(new_rows[-1].sequence + 1, 0)
            self._load_prefix(prefix)
            for row in new_rows:
                self._context.copy(PREFIX_SEQUENCE, row.sequence)
        new_ids = [prompt[prefix_length:] for prompt in prompts]
        logits = self._run(np.concatenate(new_ids), new_rows, [len(ids) for ids in new_ids])
        self._rows += [row._replace(length=len(prompt)) for row, prompt in zip(new_rows, prompts, strict=True)]
        return logits

    def step(self, tokens: np.ndarray) -> np.ndarray:
        logits = self._run(tokens, self._rows, [1] * len(self._rows))
        self._rows = [row._replace(length=row.length + 1) for row in self._rows]
        return logits

    def keep(self, rows: list[int]) -> None:
        kept_rows = [self._rows[index] for index in rows]
        for row in sorted(set(self._rows) - set(kept_rows)):
            self._context.drop(row.sequence)
        self._rows = kept_rows
        if not kept_rows:
            self._prefix_cells = self._prefix.length

    def _load_prefix(self, prefix: Prefix) -> None:
        """Put a prefix into PREFIX_SEQUENCE, unless it is there already."""
        if prefix.states is self._prefix.states and prefix.length == self._prefix.length:
            return
        self._drop_prefix()
        self._context.reserve(1, self._used_cells + prefix.states.tokens)
        self._context.set_state(PREFIX_SEQUENCE, prefix.states.data)
        self._context.drop(PREFIX_SEQUENCE, prefix.length)
        self._prefix = prefix
        self._prefix_cells += prefix.length

    def _drop_prefix(self) -> None:
        if self._prefix.length:
            self._context.drop(PREFIX_SEQUENCE)
        self._prefix = Prefix(0, None)
        self._prefix_cells = self._prefix_cells if self._rows else 0

    def _prefix_from(self, row: Row) -> Prefix:
        return Prefix(row.length, SequenceState(self._context.state(row.sequence), row.length))

    @property
    def _used_cells(self) -> int:
        return self._prefix_cells + sum(row.length - row.prefix_length for row in self._rows)

    def _run(self, tokens: np.ndarray, rows: list[Row], sizes: list[int]) -> np.ndarray:
        """Compute new tokens, ``sizes`` of each of these rows. Return the logits after the last token of each row."""
        self._context.reserve(max(row.sequence for row in rows) + 1, self._used_cells + len(tokens))
        is_last = np.zeros(len(tokens), dtype=bool)
        is_last[np.cumsum(sizes) - 1] = True
        positions = np.concatenate([np.arange(row.length, row.length + size) for row, size in zip(rows, sizes, strict=True)])
        return self._context.run(tokens, positions, np.repeat([row.sequence for row in rows], sizes), is_last)


MAX_CALL_TOKENS = 2048  # tokens of one call; llama.cpp splits it into passes of 512
MIN_CELLS = 256  # the buffer's size is a multiple of it. A larger buffer makes every step slower (docs/log.md)
FLASH_CELLS = 1024  # from this size on, flash attention is as fast for one sequence


class LlamaCppContext:
    """A context of llama.cpp. ``cache`` is ggml's type of keys and values, such as F16."""

    def __init__(self, path: Path, cache: str, threads: int, *, has_several_rows: bool) -> None:
        self._library = load_llamacpp()
        self._api = self._library.api
        settings = self._api.llama_model_default_params()
        settings.n_gpu_layers = 0
        self._model = self._check_loaded(self._api.llama_model_load_from_file(str(path).encode(), settings))
        weakref.finalize(self, self._api.llama_model_free, self._model)  # registered first, so it runs after the context's
        self._vocabulary = self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(self._model))
        self._cache = cache
        self._threads = threads
        self._uses_flash = has_several_rows
        self._max_sequences = 0
        self._cells = 0
        self._context: Any = None
        self._free_context: Any = None

    def reserve(self, sequences: int, cells: int) -> None:
        """Make the buffer larger, with its content, if it is too small for ``sequences`` sequences and ``cells`` cells."""
        if sequences <= self._max_sequences and cells <= self._cells:
            return
        saved_state = None
        if self._context is None:
            self._uses_flash = self._uses_flash or cells > FLASH_CELLS  # fixed from then on: the saved state depends on it
        else:
            saved_state = (c_uint8 * self._api.llama_state_get_size(self._context))()
            self._api.llama_state_get_data(self._context, saved_state, len(saved_state))
            self._free_context()  # before the larger one is reserved
            self._context = None
        if cells > self._cells:
            self._cells = max(2 * cells, MIN_CELLS)
        if sequences > self._max_sequences:
            self._max_sequences = 1 << (sequences - 1).bit_length()
        self._context = self._check_loaded(self._api.llama_init_from_model(self._model, self._settings()))
        self._free_context = weakref.finalize(self, self._api.llama_free, self._context)
        self._memory = self._api.llama_get_memory(self._context)
        if saved_state is not None and not self._api.llama_state_set_data(self._context, saved_state, len(saved_state)):
            raise JobFailed(f"llama.cpp could not go on in a larger buffer: {self._library.last_error}")

    def run(self, tokens: np.ndarray, positions: np.ndarray, sequences: np.ndarray, needs_logits: np.ndarray) -> np.ndarray:
        """Compute T tokens, each of a sequence, the tokens of one sequence in their order.

        Return the logits [N, V] fp32 after the N tokens for which ``needs_logits`` [T] is true."""
        logits = []
        for start in range(0, len(tokens), MAX_CALL_TOKENS):
            call = slice(start, start + MAX_CALL_TOKENS)
            logits.append(self._run_call(tokens[call], positions[call], sequences[call], needs_logits[call]))
        return logits[0] if len(logits) == 1 else np.concatenate(logits)

    def copy(self, source: int, target: int) -> None:
        """Let the sequence ``target`` use all cells of the sequence ``source``."""
        self._api.llama_memory_seq_cp(self._memory, source, target, -1, -1)

    def drop(self, sequence: int, first: int = -1) -> None:
        """Drop the tokens of a sequence from position ``first`` on. -1: all of them."""
        self._api.llama_memory_seq_rm(self._memory, sequence, first, -1)

    def state(self, sequence: int) -> Any:
        """Return the keys and values of a sequence, as bytes in llama.cpp's form."""
        state = (c_uint8 * self._api.llama_state_seq_get_size(self._context, sequence))()
        self._api.llama_state_seq_get_data(self._context, state, len(state), sequence)
        return state

    def set_state(self, sequence: int, state: Any) -> None:
        """Set the keys and values of a sequence from bytes that ``state`` returned."""
        if not self._api.llama_state_seq_set_data(self._context, state, len(state), sequence):
            raise JobFailed(f"llama.cpp could not go on from what it has computed: {self._library.last_error}")

    def _settings(self) -> Any:
        settings = self._api.llama_context_default_params()
        settings.n_ctx = self._cells
        settings.n_seq_max = self._max_sequences
        settings.n_batch = MAX_CALL_TOKENS
        settings.n_threads = settings.n_threads_batch = self._threads
        settings.type_k = settings.type_v = getattr(self._api, f"GGML_TYPE_{self._cache}")
        settings.kv_unified = True
        settings.swa_full = True  # keep the tokens outside of sliding windows too, as other engines do
        flash = "ENABLED" if self._uses_flash and self._cache != "F32" else "DISABLED"  # it rounds keys and values to 16 bits
        settings.flash_attn_type = getattr(self._api, f"LLAMA_FLASH_ATTN_TYPE_{flash}")
        return settings

    def _run_call(self, tokens: np.ndarray, positions: np.ndarray, sequences: np.ndarray, needs_logits: np.ndarray) -> np.ndarray:
        ids, token_positions, sequence_ids = (
            np.ascontiguousarray(values, dtype=np.int32) for values in (tokens, positions, sequences)
        )
        sequences_per_token = np.ones(len(tokens), dtype=np.int32)
        logits_flags = np.ascontiguousarray(needs_logits, dtype=np.int8)
        # llama.cpp takes a pointer to the sequence ids of each token.
        sequence_pointers = sequence_ids.ctypes.data + sequence_ids.itemsize * np.arange(len(tokens), dtype=np.uintp)
        batch = self._api.llama_batch(
            n_tokens=len(tokens),
            token=_pointer(ids, c_int32),
            pos=_pointer(token_positions, c_int32),
            n_seq_id=_pointer(sequences_per_token, c_int32),
            seq_id=_pointer(sequence_pointers, POINTER(c_int32)),
            logits=_pointer(logits_flags, c_int8),
        )
        if self._api.llama_decode(self._context, batch):
            raise JobFailed(f"llama.cpp could not compute {len(tokens)} tokens: {self._library.last_error}")
        num_logits = int(logits_flags.sum())
        if not num_logits:
            return np.zeros((0, self._vocabulary), dtype=np.float32)
        pointer = self._api.llama_get_logits(self._context)
        logits: np.ndarray = np.ctypeslib.as_array(pointer, (num_logits, self._vocabulary)).copy()
        return logits

    def _check_loaded(self, pointer: Any) -> Any:
        """Return the pointer. Raise JobFailed if it is null."""
        if not pointer:
            raise JobFailed(f"llama.cpp does not load it: {self._library.last_error}")
        return pointer


def _pointer(values: np.ndarray, pointed_type: Any) -> Any:
    return values.ctypes.data_as(POINTER(pointed_type))
