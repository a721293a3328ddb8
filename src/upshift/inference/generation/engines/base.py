"""Define the protocol of every generation engine: tokens in, the logits of the next ones out. The engine keeps keys
and values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from upshift.inference.registry import EngineSetup
from upshift.loading.placement.apply import PlacementOptions
from upshift.models.source import ModelSource


class Prefix(NamedTuple):
    """The beginning of prompts: an engine's keys and values, in its own form, of at least ``length`` tokens."""

    length: int
    states: Any


NO_ROWS = np.zeros((0, 0), dtype=np.int64)


class Decoder(Protocol):
    """An engine that generates. Rows are sequences that are being generated, in the order of their admission."""

    weight_bytes: int  # read for every step
    joins: bool  # rows can be admitted beside others, and go on from a prefix
    extends: bool  # several tokens of a row in one pass, and back
    mixes: bool  # prompts, also parts of them, and the next tokens of other rows in one pass

    def compute(self, tokens: Sequence[int]) -> Prefix:
        """Compute a prefix apart from the rows, in an engine that joins."""
        ...

    def of_row(self, row: int) -> Prefix:
        """Return a row's keys and values so far, in an engine that joins. The token that ``step`` would be given is
        not among them."""
        ...

    def admit(self, prompts: Sequence[Sequence[int]], prefix: Prefix | None = None) -> np.ndarray:
        """Add N rows with these token ids behind the present rows. Return their logits [N, V] fp32. All prompts begin
        with the prefix, which is shorter than any of them."""
        ...

    def step(self, tokens: np.ndarray) -> np.ndarray:
        """Return logits [R, V] fp32 from tokens [R], the next of each row."""
        ...

    def join(self, prefix: Prefix | None = None) -> None:
        """Add a row behind the present rows, in an engine that mixes. Only its prefix is computed so far."""
        ...

    def advance(self, tokens: Sequence[Sequence[int]]) -> np.ndarray:
        """Add one or more next tokens to each row, in an engine that mixes. Return the logits behind each row's last
        token [R, V] fp32."""
        ...

    def extend(self, tokens: Sequence[int]) -> np.ndarray:
        """Add the next tokens of the only row, in an engine that extends. Return the logits behind each of them [S,
        V] fp32."""
        ...

    def cut(self, tokens: int) -> None:
        """Remove the last ``tokens`` tokens from the row, in an engine that extends."""
        ...

    def keep(self, rows: list[int]) -> None:
        """Keep only these rows, in this order. No rows: the decoder is as new."""
        ...


class NoMixing:
    """A base class of engines that do not mix."""

    mixes = False

    def join(self, prefix: Prefix | None = None) -> None:
        raise NotImplementedError

    def advance(self, tokens: Sequence[Sequence[int]]) -> np.ndarray:
        raise NotImplementedError


class NoExtension(NoMixing):
    """A base class of engines that neither mix nor extend."""

    extends = False

    def extend(self, tokens: Sequence[int]) -> np.ndarray:
        raise NotImplementedError

    def cut(self, tokens: int) -> None:
        raise NotImplementedError


class DecoderBuild(NamedTuple):
    """The parts that a decoder is built from. ``folder`` is its own and is kept between runs. ``where`` is for a
    decoder that runs partly from the disk."""

    source: ModelSource
    setup: EngineSetup
    folder: Path
    where: PlacementOptions | None = None


class Padding:
    """The mask of every row's places in the cache, [R, T] of 0 and 1, padded on the left."""

    def __init__(self) -> None:
        self.mask = NO_ROWS

    @property
    def rows(self) -> int:
        return len(self.mask)

    def admit(self, mask: np.ndarray) -> tuple[int, int, int]:
        """Return how many places of the present rows fall away, because all are padding. Then return by how many the
        present and the new rows are padded to one length."""
        dropped = int(self.mask.any(0).argmax()) if self.mask.size else 0
        before = self.mask[:, dropped:]
        longest = max(before.shape[1], mask.shape[1])
        self.mask = np.concatenate([_padded(before, longest), _padded(mask, longest)])
        return dropped, longest - before.shape[1], longest - mask.shape[1]

    def step(self) -> np.ndarray:
        """Add a place to each row. Return its position, [R, 1]."""
        self.mask = np.concatenate([self.mask, np.ones((self.rows, 1), dtype=np.int64)], axis=1)
        found: np.ndarray = self.mask.sum(1, keepdims=True) - 1
        return found

    def cut(self, places: int) -> None:
        self.mask = self.mask[:, : self.mask.shape[1] - places]

    def keep(self, rows: list[int]) -> None:
        self.mask = self.mask[rows] if rows else NO_ROWS


def _padded(mask: np.ndarray, longest: int) -> np.ndarray:
    return np.pad(mask, ((0, 0), (longest - mask.shape[1], 0)))
