"""llama.cpp on the CPU, from a GGUF file that is made of the model's own weights."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, islice
from typing import NamedTuple

import numpy as np

from upshift.inference.generation.engines.decoder import DecoderBuild, NoExtension
from upshift.inference.generation.engines.gguf_file import make
from upshift.inference.generation.engines.llamacpp_context import LlamaCppContext
from upshift.inference.setup import Precision

PREFIX = 0  # the sequence of what all prompts begin with


class Kind(NamedTuple):
    """In llama.cpp's words. Products of rounded weights round activations, too: to 16 bits, or to 8."""

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


class LlamaCppDecoder(NoExtension):
    """Rows are of different lengths as they are: there is no padding."""

    joins = True

    def __init__(self, build: DecoderBuild) -> None:
        kind = KINDS[build.setup.precision]
        path = make(build.source, build.folder, kind.weights, build.setup.threads)
        self.weight_bytes = path.stat().st_size
        self._context = LlamaCppContext(path, kind.cache, build.setup.threads, several=build.setup.batch > 1)
        self._rows: list[Row] = []
        self._prefix_length = self._shared = 0  # tokens of the prefix; places of it and of those that rows may still use

    def remember(self, prefix: Sequence[int]) -> None:
        if self._prefix_length:
            self._context.drop(PREFIX)
        self._prefix_length = len(prefix)
        self._shared = self._shared if self._rows else 0
        if prefix:
            self._run(np.array(prefix), [Row(PREFIX, 0, 0)], [len(prefix)])
        self._shared += len(prefix)

    def admit(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        known, taken = self._prefix_length, {row.sequence for row in self._rows}
        free = islice((number for number in count(PREFIX + 1) if number not in taken), len(prompts))
        new = [Row(number, known, known) for number in free]
        if known:
            self._context.ask_room(new[-1].sequence + 1, 0)
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
            self._shared = self._prefix_length

    def _run(self, tokens: np.ndarray, rows: list[Row], sizes: list[int]) -> np.ndarray:
        """New tokens, so many of each of these rows -> the logits behind the last of each."""
        used = self._shared + sum(row.length - row.shared for row in self._rows)
        self._context.ask_room(max(row.sequence for row in rows) + 1, used + len(tokens))
        last = np.zeros(len(tokens), dtype=bool)
        last[np.cumsum(sizes) - 1] = True
        positions = np.concatenate([np.arange(row.length, row.length + size) for row, size in zip(rows, sizes, strict=True)])
        return self._context.run(tokens, positions, np.repeat([row.sequence for row in rows], sizes), last)
