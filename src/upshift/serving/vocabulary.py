"""Tokens that a model has vectors for: at others an engine fails, or reads what is not there."""

from __future__ import annotations

from collections.abc import Iterable

from upshift.errors import RequestError


def check_ids(ids: Iterable[int], vocabulary: int | None) -> None:
    """``vocabulary``: ids are below it; None: the model does not say. Raises RequestError."""
    largest = max(ids, default=0)
    if vocabulary is not None and largest >= vocabulary:
        raise RequestError(f"token {largest} is not one of the model's {vocabulary:,}; leave out what it stands for")
