"""Tell all ranks that wait for each other within a step, at its end, that one of them ran out of memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from upshift.training.out_of_memory import Agreed, halve
from upshift.training.parallel.place import Place
from upshift.training.parallel.ranks import highest

WENT_WELL, RAN_OUT, INDIVISIBLE = range(3)


class Agreement:
    def __init__(self, place: Place, *, on_failure: Callable[[], None], halve: Callable[[Any], object] = halve) -> None:
        """Prepare the agreement of the ranks.

        ``on_failure`` may look at memory: as it was then on this rank, or as it is now if another rank failed. ``halve``
        divides a part of the step's work, and returns None if the part is indivisible.
        """
        self.place, self._on_failure, self._halve = place, on_failure, halve
        self.words: str | None = None  # the allocator's, when this rank ran out in this step
        self._outcome = WENT_WELL

    def ran_out(self, error: BaseException, part: Any) -> None:
        self.words = str(error)
        self._outcome = RAN_OUT if self._halve(part) is not None else INDIVISIBLE
        self._on_failure()

    def agree(self) -> None:
        """Raise Agreed on all ranks if one of them ran out of memory."""
        worst = highest(self._outcome, self.place.plan)
        words, self.words, self._outcome = self.words, None, WENT_WELL
        if worst != WENT_WELL:
            if words is None:
                self._on_failure()
            raise Agreed(words or "another rank ran out of memory", final=worst == INDIVISIBLE)
