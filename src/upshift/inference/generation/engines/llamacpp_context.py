"""Keep sequences of tokens in llama.cpp. Their keys and values share one buffer: a place that other sequences use is
skipped, and a beginning that several share is there once."""

from __future__ import annotations

import weakref
from ctypes import POINTER, c_int8, c_int32, c_uint8
from pathlib import Path
from typing import Any

import numpy as np

from upshift.errors import JobFailed
from upshift.inference.generation.engines.llamacpp_library import llamacpp

BATCH = 2048  # tokens of one call; llama.cpp computes them by 512
PLACES = 256  # of the buffer, at least, and a multiple of it: a longer one makes every step slower (docs/log.md)
LONG = 1024  # places from which on flash attention is as quick for one sequence


class LlamaCppContext:
    """A context of llama.cpp. ``cache`` is ggml's type of keys and values, such as F16. ``several``: several
    sequences are to be there at once."""

    def __init__(self, path: Path, cache: str, threads: int, *, several: bool) -> None:
        self._library = llamacpp()
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
