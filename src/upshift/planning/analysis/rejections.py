"""Choose the rejected plans that teach something: for each reason, the plan that would have been the fastest."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

NUMBER = re.compile(r"\d[\d,.]*( [KMGT]?i?B\b)?")


class RejectedPlan(Protocol):
    """A plan that was left out, and why."""

    @property
    def plan(self) -> Any: ...

    @property
    def reason(self) -> str: ...


class Lesson(NamedTuple):
    """A rejected plan, and its predicted tokens per second over those of the best plan; None: its time is unknown."""

    plan: Any
    reason: str
    speed: float | None


def kind_of_reason(reason: str) -> str:
    """Return a reason without its numbers, which differ from plan to plan."""
    return NUMBER.sub("#", reason)


def lessons_of(
    rejected: Sequence[RejectedPlan], best: Any | None, speed_of: Callable[[RejectedPlan], float | None]
) -> list[Lesson]:
    """Return one rejected plan for each kind of reason, the fastest first.

    That is the plan with the highest predicted speed. If no speed is known, it is the plan that is most like the best plan.

    Args:
        rejected: the plans, and why they were left out.
        best: the best plan, or None if there is none.
        speed_of: returns tokens per second over those of the best plan, or None if the time of a plan is unknown.
    """
    by_kind: dict[str, tuple[tuple[float, int], Lesson]] = {}
    for entry in rejected:
        speed = speed_of(entry)
        merit = (speed if speed is not None else 0.0, _num_shared(entry.plan, best))
        kind = kind_of_reason(entry.reason)
        if kind not in by_kind or merit > by_kind[kind][0]:
            by_kind[kind] = (merit, Lesson(entry.plan, entry.reason, speed))
    return [lesson for _, lesson in sorted(by_kind.values(), key=lambda pair: pair[0], reverse=True)]


def _num_shared(plan: Any, best: Any | None) -> int:
    """Return how many fields have the value that they have in the best plan."""
    return 0 if best is None else sum(value == getattr(best, name) for name, value in plan)
