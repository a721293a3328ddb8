"""Compute the allocated bytes of a step, by phase, from the allocator's events in the profiler."""

from __future__ import annotations

from typing import Any

from upshift.training.profiling.account import BACKWARD, UPDATE_RANGE, Collectives, Span

PHASES = FORWARD, BACKWARD_PASS, OPTIMIZER = "forward", "backward", "optimizer"  # the planner's words
MEMORY_EVENT = "[memory]"


def phases_of(events: list[Any]) -> dict[str, int]:
    """Return the most bytes above those at the start, in each phase. ``events`` are the profiler's, of one step."""

    def within(names: str) -> Collectives:
        found = [event for event in events if event.name().startswith(names)]
        return Collectives(Span(names, event.start_ns(), event.start_ns() + event.duration_ns()) for event in found)

    backward, update = within(BACKWARD), within(UPDATE_RANGE)
    live, highest = 0, dict.fromkeys(PHASES, 0)
    for event in sorted((event for event in events if event.name() == MEMORY_EVENT), key=lambda event: event.start_ns()):
        live += event.nbytes()
        now = event.start_ns()
        phase = OPTIMIZER if update.overlap(now, now + 1) else BACKWARD_PASS if backward.overlap(now, now + 1) else FORWARD
        highest[phase] = max(highest[phase], live)
    return highest
