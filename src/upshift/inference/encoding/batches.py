"""Batch texts of similar lengths, because padding costs as much as tokens do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from upshift.inference.padding import padded_rows


class Batch(NamedTuple):
    """A batch of texts, padded on the right. ``places`` holds the positions of its texts in the input."""

    ids: np.ndarray  # [B, S] int64
    mask: np.ndarray  # [B, S] int64
    places: list[int]


def by_length(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Return the places of the texts of each batch, longest first. A padded batch has at most ``token_budget``
    tokens, or is one text."""
    batches: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: (-lengths[place], place)):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= token_budget:
            batches[-1].append(place)
        else:
            batches.append([place])
    return batches


def padded(tokens: Sequence[Sequence[int]], batches: list[list[int]], *, pad: int) -> Iterator[Batch]:
    for places in batches:
        yield Batch(*padded_rows([tokens[place] for place in places], pad=pad), places)
