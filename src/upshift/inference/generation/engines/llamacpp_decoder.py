"""Run llama.cpp on the CPU, from a GGUF file that is made of the model's own weights.

Keep sequences of tokens in llama.cpp. Their keys and values share one buffer: a place that other sequences use is
skipped, and a beginning that several share is there once.
"""

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

BATCH = 2048  # tokens of one call; llama.cpp computes them by 512
PLACES = 256  # of the buffer, at least, and a multiple of it: a longer one makes every step slower (docs/log.md)
LONG = 1024  # places from which on flash attention is as quick for one sequence


class LlamaCppContext:
    """A context of llama.cpp. ``cache`` is ggml's type of keys and values, such as F16. ``several``: several
    sequences are to be there at once."""

    def __init__(self, path: Path, cache: str, threads: int, *, several: bool) -> None:
        self._library = load_llamacpp()
        self._api = self._library.api
        settings = self._api.llama_model_default_params()
        settings.n_gpu_layers = 0
        self._model = self._made(self._api.llama_model_load_from_file(str(path).encode(), settings))
        weakref.finalize(self, self._api.llama_model_free, self._model)  # the context's is later, so that it runs before
        self._vocabulary = self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(self._model))
        self._cache, self._threads = cache, threads
        self._flash = several
        self._sequences = self._places = 0
        self._context: Any = None
        self._free: Any = None

    def ask_room(self, sequences: int, places: int) -> None:
        """Make the buffer larger, with all that it holds, if it is too small for so many sequences and places."""
        if sequences <= self._sequences and places <= self._places:
            return
        held = None
        if self._context is None:
            self._flash = self._flash or places > LONG  # for good: what is held has a form of its own with it
        else:
            held = (c_uint8 * self._api.llama_state_get_size(self._context))()
            self._api.llama_state_get_data(self._context, held, len(held))
            self._free()  # before there is another
            self._context = None
        if places > self._places:
            self._places = max(2 * places, PLACES)
        if sequences > self._sequences:
            self._sequences = 1 << (sequences - 1).bit_length()
        self._context = self._made(self._api.llama_init_from_model(self._model, self._settings()))
        self._free = weakref.finalize(self, self._api.llama_free, self._context)
        self._memory = self._api.llama_get_memory(self._context)
        if held is not None and not self._api.llama_state_set_data(self._context, held, len(held)):
            raise JobFailed(f"llama.cpp could not go on in a larger buffer: {self._library.said}")

    def run(self, tokens: np.ndarray, positions: np.ndarray, sequences: np.ndarray, asked: np.ndarray) -> np.ndarray:
        """Compute T tokens, each in a sequence, those of one sequence in their order. ``asked`` [T] says whose logits
        are wanted. Return them as [asked, V] fp32."""
        found = []
        for start in range(0, len(tokens), BATCH):
            part = slice(start, start + BATCH)
            found.append(self._run(*(values[part] for values in (tokens, positions, sequences, asked))))
        return found[0] if len(found) == 1 else np.concatenate(found)

    def copy(self, one: int, other: int) -> None:
        self._api.llama_memory_seq_cp(self._memory, one, other, -1, -1)

    def drop(self, sequence: int, first: int = -1) -> None:
        """Drop the sequence's places, from ``first`` on."""
        self._api.llama_memory_seq_rm(self._memory, sequence, first, -1)

    def state(self, sequence: int) -> Any:
        """Return the sequence's keys and values, as bytes of llama.cpp's own."""
        held = (c_uint8 * self._api.llama_state_seq_get_size(self._context, sequence))()
        self._api.llama_state_seq_get_data(self._context, held, len(held), sequence)
        return held

    def put(self, sequence: int, state: Any) -> None:
        if not self._api.llama_state_seq_set_data(self._context, state, len(state), sequence):
            raise JobFailed(f"llama.cpp could not go on from what it has computed: {self._library.said}")

    def _settings(self) -> Any:
        settings = self._api.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max, settings.n_batch = self._places, self._sequences, BATCH
        settings.n_threads = settings.n_threads_batch = self._threads
        settings.type_k = settings.type_v = getattr(self._api, f"GGML_TYPE_{self._cache}")
        settings.kv_unified = True
        settings.swa_full = True  # windows look back into what other engines keep, too
        flash = "ENABLED" if self._flash and self._cache != "F32" else "DISABLED"  # it rounds keys and values to 16 bits
        settings.flash_attn_type = getattr(self._api, f"LLAMA_FLASH_ATTN_TYPE_{flash}")
        return settings

    def _run(self, tokens: np.ndarray, positions: np.ndarray, sequences: np.ndarray, asked: np.ndarray) -> np.ndarray:
        whole = [np.ascontiguousarray(values, dtype=np.int32) for values in (tokens, positions, sequences)]
        ones, flags = np.ones(len(tokens), dtype=np.int32), np.ascontiguousarray(asked, dtype=np.int8)
        places = whole[2].ctypes.data + whole[2].itemsize * np.arange(len(tokens), dtype=np.uintp)  # of each one's sequence
        batch = self._api.llama_batch(
            n_tokens=len(tokens), token=_pointer(whole[0], c_int32), pos=_pointer(whole[1], c_int32),
            n_seq_id=_pointer(ones, c_int32), seq_id=_pointer(places, POINTER(c_int32)), logits=_pointer(flags, c_int8),
        )  # fmt: skip
        if self._api.llama_decode(self._context, batch):
            raise JobFailed(f"llama.cpp could not compute {len(tokens)} tokens: {self._library.said}")
        count = int(flags.sum())
        if not count:
            return np.zeros((0, self._vocabulary), dtype=np.float32)
        logits = self._api.llama_get_logits(self._context)
        found: np.ndarray = np.ctypeslib.as_array(logits, (count, self._vocabulary)).copy()
        return found

    def _made(self, pointer: Any) -> Any:
        if not pointer:
            raise JobFailed(f"llama.cpp does not load it: {self._library.said}")
        return pointer


def _pointer(values: np.ndarray, kind: Any) -> Any:
    return values.ctypes.data_as(POINTER(kind))


PREFIX = 0  # the sequence of what prompts begin with


class Kind(NamedTuple):
    """A precision in llama.cpp's words. Products of rounded weights round activations, too: to 16 bits, or to 8."""

    weights: str
    cache: str  # keys and values


KINDS: dict[Precision, Kind] = {
    "fp32": Kind("ALL_F32", "F32"),
    "fp16": Kind("MOSTLY_F16", "F16"),
    "int8": Kind("MOSTLY_Q8_0", "F16"),
    "int4": Kind("MOSTLY_Q4_K_M", "F16"),  # as fast as Q4_0 here, and nearer
}


class Row(NamedTuple):
    sequence: int
    shared: int  # tokens at its begin whose places are the prefix's
    length: int


class State(NamedTuple):
    """The state of a sequence: its keys and values as bytes of llama.cpp's own, and its tokens."""

    held: Any
    tokens: int


class LlamaCppDecoder(NoExtension):
    """The decoder of llama.cpp. Rows have different lengths as they are: there is no padding."""

    joins = True

    def __init__(self, build: DecoderBuild) -> None:
        kind = KINDS[build.setup.precision]
        path = make_gguf(build.source, build.folder, kind.weights, build.setup.threads)
        self.weight_bytes = path.stat().st_size
        self._context = LlamaCppContext(path, kind.cache, build.setup.threads, several=build.setup.batch > 1)
        self._rows: list[Row] = []
        self._prefix = Prefix(0, None)  # whose tokens the sequence PREFIX has
        self._shared = 0  # places of it, and of those before it that rows may still use

    def compute(self, tokens: Sequence[int]) -> Prefix:
        self._forget()
        self._run(np.array(tokens), [Row(PREFIX, 0, 0)], [len(tokens)])
        self._shared += len(tokens)
        self._prefix = self._told(Row(PREFIX, 0, len(tokens)))
        return self._prefix

    def of_row(self, row: int) -> Prefix:
        return self._told(self._rows[row])

    def admit(self, prompts: Sequence[Sequence[int]], prefix: Prefix | None = None) -> np.ndarray:
        known, taken = prefix.length if prefix else 0, {row.sequence for row in self._rows}
        free = islice((number for number in count(PREFIX + 1) if number not in taken), len(prompts))
        new = [Row(number, known, known) for number in free]
        if prefix is not None:
            self._context.ask_room(new[-1].sequence + 1, 0)
            self._load(prefix)
            for row in new:
                self._context.copy(PREFIX, row.sequence)
        left = [prompt[known:] for prompt in prompts]
        logits = self._run(np.concatenate(left), new, [len(ids) for ids in left])
        self._rows += [row._replace(length=len(prompt)) for row, prompt in zip(new, prompts, strict=True)]
        return logits

    def step(self, tokens: np.ndarray) -> np.ndarray:
        logits = self._run(tokens, self._rows, [1] * len(self._rows))
        self._rows = [row._replace(length=row.length + 1) for row in self._rows]
        return logits

    def keep(self, rows: list[int]) -> None:
        kept = [self._rows[place] for place in rows]
        for row in set(self._rows) - set(kept):
            self._context.drop(row.sequence)
        self._rows = kept
        if not kept:
            self._shared = self._prefix.length

    def _load(self, prefix: Prefix) -> None:
        if prefix.states is self._prefix.states and prefix.length == self._prefix.length:
            return
        self._forget()
        self._context.ask_room(1, self._used + prefix.states.tokens)
        self._context.put(PREFIX, prefix.states.held)
        self._context.drop(PREFIX, prefix.length)
        self._prefix, self._shared = prefix, self._shared + prefix.length

    def _forget(self) -> None:
        if self._prefix.length:
            self._context.drop(PREFIX)
        self._prefix = Prefix(0, None)
        self._shared = self._shared if self._rows else 0

    def _told(self, row: Row) -> Prefix:
        return Prefix(row.length, State(self._context.state(row.sequence), row.length))

    @property
    def _used(self) -> int:
        return self._shared + sum(row.length - row.shared for row in self._rows)

    def _run(self, tokens: np.ndarray, rows: list[Row], sizes: list[int]) -> np.ndarray:
        """Compute new tokens, ``sizes`` of each of these rows. Return the logits behind the last of each."""
        self._context.ask_room(max(row.sequence for row in rows) + 1, self._used + len(tokens))
        last = np.zeros(len(tokens), dtype=bool)
        last[np.cumsum(sizes) - 1] = True
        positions = np.concatenate([np.arange(row.length, row.length + size) for row, size in zip(rows, sizes, strict=True)])
        return self._context.run(tokens, positions, np.repeat([row.sequence for row in rows], sizes), last)
