"""Compute once what many plans of one host, model and workload have in common."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class Memo:
    """A cache for one host, model and workload. A key names the fields of a plan that determine the value."""

    def __init__(self) -> None:
        self._values: dict[Hashable, Any] = {}

    def get_or_compute(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return the value of ``key``. Compute it the first time."""
        value: T
        try:
            value = self._values[key]  # one look-up: keys are long, and each look-up hashes them anew
        except KeyError:
            value = self._values[key] = compute()
        return value
