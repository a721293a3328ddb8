"""What many plans of one host, model and workload have in common, computed once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class Known:
    """Belongs to one host, model and workload: keys name the fields of a plan that a value follows from."""

    def __init__(self) -> None:
        self._values: dict[Hashable, Any] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        found: T
        try:
            found = self._values[key]  # one look: keys are long, and hashed anew each time
        except KeyError:
            found = self._values[key] = make()
        return found
