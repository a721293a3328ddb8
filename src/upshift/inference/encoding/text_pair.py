"""Define the pair of texts that a cross-encoder reads together."""

from __future__ import annotations

from typing import NamedTuple


class Pair(NamedTuple):
    """Two texts that a model reads together, such as a query and a document."""

    text: str
    text_pair: str


Item = str | Pair  # a model computes one result for each
