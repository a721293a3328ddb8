"""Compute once what many plans of one host, model and workload have in common."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class Known:
    """A cache for one host, model and workload. A key names the fields of a plan that determine the value."""

    def __init__(self) -> None:
        self._values: dict[Hashable, Any] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        found: T
        try:
            found = self._values[key]  # one look-up: keys are long, and each look-up hashes them anew
        except KeyError:
            found = self._values[key] = make()
        return found
