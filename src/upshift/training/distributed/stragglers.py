"""Find from the ranks' heartbeats which rank holds up the others, and which ranks wait for which."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping

from upshift.units import format_bytes, format_seconds
from upshift.value import Value

STRAGGLER_FACTOR = 1.3  # times the median of the other ranks' work: such a rank is reported
MIN_WORK_SHARE = 0.5  # of the step; a rank whose own work takes less does not delay the others
MAX_NAMED = 8  # ranks in one message


class PendingCollective(Value):
    """A collective that a rank has begun and not ended."""

    name: str  # such as all_reduce
    number: int  # the number of this rank's collective in the group
    group: str
    bytes: int
    seconds: float


class Heartbeat(Value):
    """The report of one rank. It counts seconds by its own clock, because clocks of hosts differ."""

    rank: int
    beat: int  # grows while the process runs
    step: int
    seconds: float  # since its last step began or ended
    in_step: bool
    own_seconds: float | None = None  # median of the last steps, without the time spent waiting
    step_seconds: float | None = None  # median of the last steps
    waiting: PendingCollective | None = None
    at: str | None = None  # the line of Upshift's code that its main thread is in


def describe_stall(heartbeats: list[Heartbeat], silent: Mapping[int, float], *, patience: float) -> str | None:
    """Return a description of which ranks wait for which, or None if the ranks are not stalled.

    Ranks are stalled if one waits in a collective, or is silent, for longer than ``patience`` seconds, and no rank makes
    progress. ``silent`` maps ranks without a new heartbeat to the seconds since the last one, which is then ignored.
    """
    current = [heartbeat for heartbeat in heartbeats if heartbeat.rank not in silent]
    waiting = [(heartbeat, heartbeat.waiting) for heartbeat in current if heartbeat.waiting is not None]
    is_late = any(collective.seconds > patience for _, collective in waiting)
    if (not is_late and not silent) or any(heartbeat.seconds <= patience for heartbeat in current):
        return None
    by_collective: dict[tuple[str, int, str, int], list[tuple[Heartbeat, PendingCollective]]] = defaultdict(list)
    for heartbeat, collective in waiting:
        key = (collective.name, collective.number, collective.group, collective.bytes)
        by_collective[key].append((heartbeat, collective))
    messages = []
    for (name, number, group, size), members in by_collective.items():
        ranks = _format_ranks([heartbeat.rank for heartbeat, _ in members])
        since = max(collective.seconds for _, collective in members)
        step = min(heartbeat.step for heartbeat, _ in members)
        messages.append(
            f"{ranks} since {format_seconds(since)} in {name} {number} of group {group} ({format_bytes(size)}), step {step}"
        )
    for heartbeat in [heartbeat for heartbeat in current if heartbeat.waiting is None][:MAX_NAMED]:
        line = f", at {heartbeat.at}" if heartbeat.at else ""
        step_text = f"step {heartbeat.step}" if heartbeat.in_step else f"after step {heartbeat.step}"
        since_text = format_seconds(heartbeat.seconds)
        messages.append(f"rank {heartbeat.rank} is in no collective: {step_text} since {since_text}{line}")
    for rank, seconds in sorted(silent.items())[:MAX_NAMED]:
        messages.append(f"rank {rank} says nothing since {format_seconds(seconds)}: its process is stopped, or its host is gone")
    if len(by_collective) > 1:
        messages.append("they wait in different collectives: ranks in one group must begin the same ones in the same order")
    return "; ".join(messages)


def find_straggler(heartbeats: list[Heartbeat]) -> tuple[int, str] | None:
    """Return the rank whose own work takes longest, and a message about it, or None if the others do not wait for it."""
    work_seconds = {heartbeat.rank: heartbeat.own_seconds for heartbeat in heartbeats if heartbeat.own_seconds is not None}
    if len(work_seconds) < 2:
        return None
    rank = max(work_seconds, key=lambda rank: work_seconds[rank])
    slowest = work_seconds[rank]
    others = statistics.median(seconds for other, seconds in work_seconds.items() if other != rank)
    step = next(heartbeat.step_seconds for heartbeat in heartbeats if heartbeat.rank == rank) or slowest
    if slowest < STRAGGLER_FACTOR * others or slowest < MIN_WORK_SHARE * step:
        return None
    message = (
        f"rank {rank} holds up the others: its own work takes {format_seconds(slowest)} of a step of {format_seconds(step)}, "
        f"theirs {format_seconds(others)} (medians); look at what else runs on its cores, and at their clock"
    )
    return rank, message


def _format_ranks(ranks: list[int]) -> str:
    named = ", ".join(map(str, sorted(ranks)[:MAX_NAMED]))
    more = f" and {len(ranks) - MAX_NAMED} more" if len(ranks) > MAX_NAMED else ""
    return f"rank {named} waits" if len(ranks) == 1 else f"ranks {named}{more} wait"
