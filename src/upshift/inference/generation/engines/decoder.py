"""What every engine that generates is to the rest: tokens in, the logits of the next ones out. It keeps keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from upshift.inference.setup import EngineSetup
from upshift.loading.placed import Where
from upshift.models.source import ModelSource


class Prefix(NamedTuple):
    """What prompts begin with: an engine's keys and values, in its own form, of at least so many tokens."""

    length: int
    states: Any


NO_ROWS = np.zeros((0, 0), dtype=np.int64)


class Decoder(Protocol):
    """Rows are sequences that are being generated, in the order of their admission."""

    weight_bytes: int  # read for every step
    joins: bool  # rows can be admitted beside others, and go on from a prefix
    extends: bool  # several tokens of a row in one pass, and back
    mixes: bool  # prompts, also parts of them, and the next tokens of other rows in one pass

    def compute(self, tokens: Sequence[int]) -> Prefix:
        """Of an engine that joins: apart from the rows."""
        ...

    def of_row(self, row: int) -> Prefix:
        """Of an engine that joins: what a row has so far, but for the token that ``step`` would be given."""
        ...

    def admit(self, prompts: Sequence[Sequence[int]], prefix: Prefix | None = None) -> np.ndarray:
        """Token ids of N rows more, behind those that are there -> their logits [N, V] fp32. All begin with the prefix, which
        is shorter than any of them."""
        ...

    def step(self, tokens: np.ndarray) -> np.ndarray:
        """tokens [R]: the next of each row -> logits [R, V] fp32."""
        ...

    def join(self, prefix: Prefix | None = None) -> None:
        """Of an engine that mixes: a row more, behind those that are there, of which nothing but the prefix is computed."""
        ...

    def advance(self, tokens: Sequence[Sequence[int]]) -> np.ndarray:
        """Of an engine that mixes: one or more tokens that come next in each row -> logits behind each row's last [R, V] fp32."""
        ...

    def extend(self, tokens: Sequence[int]) -> np.ndarray:
        """Of an engine that extends, while one row is there: its next tokens -> the logits behind each [S, V] fp32."""
        ...

    def cut(self, tokens: int) -> None:
        """Of an engine that extends: so many of the last ones are none of the row's."""
        ...

    def keep(self, rows: list[int]) -> None:
        """Only these, in this order; none: as new."""
        ...


class NoMixing:
    """Of an engine that does not."""

    mixes = False

    def join(self, prefix: Prefix | None = None) -> None:
        raise NotImplementedError

    def advance(self, tokens: Sequence[Sequence[int]]) -> np.ndarray:
        raise NotImplementedError


class NoExtension(NoMixing):
    """Of an engine that does not extend, either."""

    extends = False

    def extend(self, tokens: Sequence[int]) -> np.ndarray:
        raise NotImplementedError

    def cut(self, tokens: int) -> None:
        raise NotImplementedError


class DecoderBuild(NamedTuple):
    """What a decoder is built from. ``folder``: its own, kept between runs. ``where``: of one that runs partly from the disk."""

    source: ModelSource
    setup: EngineSetup
    folder: Path
    where: Where | None = None


class Padding:
    """Which places of the cache are padding, of every row: [R, T] of 0 and 1, padded on the left."""

    def __init__(self) -> None:
        self.mask = NO_ROWS

    @property
    def rows(self) -> int:
        return len(self.mask)

    def admit(self, mask: np.ndarray) -> tuple[int, int, int]:
        """How many places of the rows that are there fall away, because all are padding; then by how many they, and the new
        rows, are padded to one length."""
        dropped = int(self.mask.any(0).argmax()) if self.mask.size else 0
        before = self.mask[:, dropped:]
        longest = max(before.shape[1], mask.shape[1])
        self.mask = np.concatenate([_padded(before, longest), _padded(mask, longest)])
        return dropped, longest - before.shape[1], longest - mask.shape[1]

    def step(self) -> np.ndarray:
        """A place more of each row -> its position, [R, 1]."""
        self.mask = np.concatenate([self.mask, np.ones((self.rows, 1), dtype=np.int64)], axis=1)
        found: np.ndarray = self.mask.sum(1, keepdims=True) - 1
        return found

    def cut(self, places: int) -> None:
        self.mask = self.mask[:, : self.mask.shape[1] - places]

    def keep(self, rows: list[int]) -> None:
        self.mask = self.mask[rows] if rows else NO_ROWS


def _padded(mask: np.ndarray, longest: int) -> np.ndarray:
    return np.pad(mask, ((0, 0), (longest - mask.shape[1], 0)))
