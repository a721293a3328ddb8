"""Read together what all ranks report, and say in words which ranks wait for which since when, and which rank is slower."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping

from upshift.units import format_bytes, format_seconds
from upshift.value import Value

SLOWER = 1.3  # than the median of the ranks: named
WORTH = 0.5  # of the step: a rank's own work below it holds up nobody
MAX_NAMED = 8


class Waiting(Value):
    """A collective that a rank has begun and not ended."""

    name: str  # all_reduce
    number: int  # of this rank's collectives in the group
    group: str
    bytes: int
    seconds: float


class Pulse(Value):
    """The report of one rank. It counts seconds by its own clock, as clocks of hosts differ."""

    rank: int
    beat: int  # grows while the process runs
    step: int
    seconds: float  # since its last step began or ended
    in_step: bool
    own_seconds: float | None = None  # of a step, less what it waited; the median of the last
    step_seconds: float | None = None
    waiting: Waiting | None = None
    at: str | None = None  # the line of Upshift's that its main thread has come to


def stalled(pulses: list[Pulse], silent: Mapping[int, float], *, patience: float) -> str | None:
    """Return in words that ranks are stalled, or None.

    Return None unless a rank waits in one collective, or is silent, for longer than ``patience`` seconds. Return None also
    while one rank still moves. ``silent`` holds the seconds of ranks that report nothing; their earlier reports do not count.
    """
    speaking = [pulse for pulse in pulses if pulse.rank not in silent]
    waiting = [pulse for pulse in speaking if pulse.waiting is not None]
    late = [pulse for pulse in waiting if pulse.waiting is not None and pulse.waiting.seconds > patience]
    if (not late and not silent) or any(pulse.seconds <= patience for pulse in speaking):
        return None
    alike: dict[tuple[str, int, str, int], list[Pulse]] = defaultdict(list)
    for pulse in waiting:
        assert pulse.waiting is not None
        alike[pulse.waiting.name, pulse.waiting.number, pulse.waiting.group, pulse.waiting.bytes].append(pulse)
    words = []
    for (name, number, group, size), ranks in alike.items():
        since = max(pulse.waiting.seconds for pulse in ranks if pulse.waiting is not None)
        words.append(
            f"{_ranks([pulse.rank for pulse in ranks])} since {format_seconds(since)} in {name} {number} of group {group} "
            f"({format_bytes(size)}), step {min(pulse.step for pulse in ranks)}"
        )
    for pulse in [pulse for pulse in speaking if pulse.waiting is None][:MAX_NAMED]:
        where = f", at {pulse.at}" if pulse.at else ""
        doing = f"step {pulse.step}" if pulse.in_step else f"after step {pulse.step}"
        words.append(f"rank {pulse.rank} is in no collective: {doing} since {format_seconds(pulse.seconds)}{where}")
    for rank, seconds in sorted(silent.items())[:MAX_NAMED]:
        words.append(f"rank {rank} says nothing since {format_seconds(seconds)}: its process is stopped, or its host is gone")
    if len(alike) > 1:
        words.append("they wait in different collectives: ranks in one group must begin the same ones in the same order")
    return "; ".join(words)


def straggler(pulses: list[Pulse]) -> tuple[int, str] | None:
    """Return the rank whose own work takes longest, with words, if the others wait for it."""
    own = {pulse.rank: pulse.own_seconds for pulse in pulses if pulse.own_seconds is not None}
    if len(own) < 2:
        return None
    rank = max(own, key=lambda rank: own[rank])
    rest = statistics.median(seconds for other, seconds in own.items() if other != rank)
    step = next(pulse.step_seconds for pulse in pulses if pulse.rank == rank) or own[rank]
    if own[rank] < SLOWER * rest or own[rank] < WORTH * step:
        return None
    words = (
        f"rank {rank} holds up the others: its own work takes {format_seconds(own[rank])} of a step of {format_seconds(step)}, "
        f"theirs {format_seconds(rest)} (medians); look at what else runs on its cores, and at their clock"
    )
    return rank, words


def _ranks(ranks: list[int]) -> str:
    named = ", ".join(map(str, sorted(ranks)[:MAX_NAMED]))
    more = f" and {len(ranks) - MAX_NAMED} more" if len(ranks) > MAX_NAMED else ""
    return f"rank {named} waits" if len(ranks) == 1 else f"ranks {named}{more} wait"
