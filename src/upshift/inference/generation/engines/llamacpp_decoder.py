"""Run llama.cpp on the CPU, from a GGUF file that is made of the model's own weights."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np

from upshift.inference.generation.engines.decoder import DecoderBuild, NoExtension, Prefix
from upshift.inference.generation.engines.gguf_file import make
from upshift.inference.generation.engines.llamacpp_context import LlamaCppContext
from upshift.inference.setup import Precision

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
        path = make(build.source, build.folder, kind.weights, build.setup.threads)
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
