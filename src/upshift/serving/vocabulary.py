"""Check token ids: an engine fails at ids without a vector, or reads memory that is not its own."""

from __future__ import annotations

from collections.abc import Iterable

from upshift.errors import RequestError


def check_ids(ids: Iterable[int], vocabulary: int | None) -> None:
    """Raise RequestError if a token id is not below ``vocabulary``. None: the model does not say."""
    largest = max(ids, default=0)
    if vocabulary is not None and largest >= vocabulary:
        raise RequestError(f"token {largest} is not one of the model's {vocabulary:,}; leave out what it stands for")
