"""Define the protocol of every generation engine: tokens in, the logits of the next tokens out. The engine keeps keys
and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from upshift.inference.registry import EngineSetup
from upshift.loading.placement.apply import PlacementOptions
from upshift.models.source import ModelSource


class Prefix(NamedTuple):
    """The beginning of prompts. ``states`` holds keys and values of at least ``length`` tokens, in the engine's own form."""

    length: int
    states: Any


NO_ROWS = np.zeros((0, 0), dtype=np.int64)


class Decoder(Protocol):
    """An engine that generates. Its rows are the sequences that are being generated, in the order of their admission."""

    weight_bytes: int  # read in every step
    joins: bool  # rows can be admitted beside others
    prefixes: bool  # rows can start from a prefix, in an engine that joins
    extends: bool  # a row can take several tokens in one pass, and can drop its last tokens
    mixes: bool  # one pass can compute prompts, or parts of them, and the next tokens of other rows
    chunks: bool  # prompts can be computed in chunks, between which the rows take steps, in an engine that does not mix

    def compute(self, tokens: Sequence[int]) -> Prefix:
        """Compute a prefix apart from the rows, in an engine with prefixes."""
        ...

    def prefix_of_row(self, row: int) -> Prefix:
        """Return a row's keys and values so far, in an engine with prefixes. They do not include the token that the next
        ``step`` takes."""
        ...

    def admit(self, prompts: Sequence[Sequence[int]], prefix: Prefix | None = None) -> np.ndarray:
        """Add N rows with these token ids after the present rows. Return their logits [N, V] fp32.

        All prompts begin with the prefix, and all are longer than it."""
        ...

    def step(self, tokens: np.ndarray) -> np.ndarray:
        """Return logits [R, V] fp32 from tokens [R], the next token of each row."""
        ...

    def compute_chunks(
        self, prompts: Sequence[Sequence[int]], prefix: Prefix | None, next_width: Callable[[], int]
    ) -> Iterator[ComputedRows | None]:
        """Compute prompts apart from the rows in chunks, in an engine with chunks.

        ``next_width`` returns the number of tokens of the next chunk, and is called before each one.

        Yield None after each chunk, and the computed rows after the last one. Meanwhile the rows may take steps, and others may
        be admitted. Close the iterator to give the prompts up."""
        ...

    def join_computed(self, computed: ComputedRows) -> np.ndarray:
        """Add N computed rows after the present rows, in an engine with chunks. Return their logits [N, V] fp32."""
        ...

    def join(self, prefix: Prefix | None = None) -> None:
        """Add a row after the present rows, in an engine that mixes. Only its prefix is computed so far."""
        ...

    def advance(self, tokens: Sequence[Sequence[int]]) -> np.ndarray:
        """Add one or more next tokens to each row, in an engine that mixes.

        Return the logits after each row's last token, [R, V] fp32."""
        ...

    def extend(self, tokens: Sequence[int]) -> np.ndarray:
        """Add the next S tokens to the only row, in an engine that extends.

        Return the logits after each of them, [S, V] fp32."""
        ...

    def cut(self, tokens: int) -> None:
        """Remove the last ``tokens`` tokens from the only row, in an engine that extends."""
        ...

    def keep(self, rows: list[int]) -> None:
        """Keep only these rows, in this order. Without any row, the decoder is as new."""
        ...


class ComputedRows(NamedTuple):
    """Rows that were computed apart from those of an engine, and that can join them.

    ``logits`` [N, V] fp32 follow their last tokens, and ``shift`` is what their next positions differ by from their lengths."""

    mask: np.ndarray  # [N, T] of 0 and 1, padded on the left
    cache: Any
    logits: np.ndarray
    shift: int


@runtime_checkable
class ApartDecoder(Protocol):
    """An engine that computes prompts in another thread while its rows take steps. Meanwhile no row is admitted."""

    def compute_apart(self, prompts: Sequence[Sequence[int]]) -> ComputedRows:
        """Compute prompts apart from the rows."""
        ...

    def join_computed(self, computed: ComputedRows) -> np.ndarray:
        """Add N computed rows after the present rows. Return their logits [N, V] fp32."""
        ...


class NoChunks:
    """A base class of engines without chunks."""

    chunks = False

    def compute_chunks(
        self, prompts: Sequence[Sequence[int]], prefix: Prefix | None, next_width: Callable[[], int]
    ) -> Iterator[ComputedRows | None]:
        raise NotImplementedError

    def join_computed(self, computed: ComputedRows) -> np.ndarray:
        raise NotImplementedError


class NoMixing(NoChunks):
    """A base class of engines that do not mix."""

    prefixes = True
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
    """The parts that a decoder is built from.

    ``folder`` holds the engine's own files between runs. ``where`` places the weights of a decoder that runs partly from
    the disk. ``serves``: an engine of whole requests gives log-probabilities and holds texts to a form, as a server needs.
    ``adapters``: the folders of the LoRA adapters that requests may name. ``model``: the model as another decoder in the same
    precision on the same device has loaded it, for the engine torch."""

    source: ModelSource
    setup: EngineSetup
    folder: Path
    where: PlacementOptions | None = None
    serves: bool = False
    adapters: tuple[str, ...] = ()
    model: Any = None


class Padding:
    """The mask of the rows' positions in the cache, [R, T] of 0 and 1, padded on the left."""

    def __init__(self) -> None:
        self.mask = NO_ROWS

    @property
    def rows(self) -> int:
        return len(self.mask)

    def admit(self, mask: np.ndarray) -> tuple[int, int, int]:
        """Add rows with this mask.

        Return the number of positions that all present rows drop because all are padding, then the number of padded
        positions to add to the present rows, and to the new rows."""
        dropped = int(self.mask.any(0).argmax()) if self.mask.size else 0
        present = self.mask[:, dropped:]
        length = max(present.shape[1], mask.shape[1])
        self.mask = np.concatenate([_pad_left(present, length), _pad_left(mask, length)])
        return dropped, length - present.shape[1], length - mask.shape[1]

    def step(self) -> np.ndarray:
        """Add a position to each row. Return the index of its token in the row, [R, 1]."""
        self.mask = np.concatenate([self.mask, np.ones((self.rows, 1), dtype=np.int64)], axis=1)
        positions: np.ndarray = self.mask.sum(1, keepdims=True) - 1
        return positions

    def cut(self, tokens: int) -> None:
        """Remove the last ``tokens`` positions."""
        self.mask = self.mask[:, : self.mask.shape[1] - tokens]

    def keep(self, rows: list[int]) -> None:
        """Keep only these rows, in this order."""
        self.mask = self.mask[rows] if rows else NO_ROWS


def _pad_left(mask: np.ndarray, length: int) -> np.ndarray:
    return np.pad(mask, ((0, 0), (length - mask.shape[1], 0)))
