"""Decide whether two things that ran in the same rounds differ, or how many rounds would settle it.

The interval is Hodges and Lehmann's (1963): the median of all means of two rounds' log ratios, between the order statistics
that Wilcoxon's signed-rank distribution names (Hollander, Wolfe and Chicken, Nonparametric Statistical Methods, 3.3). It asks
only that a round's log ratio be as likely to fall on either side where there is no difference. Drawing the order of each round
brings this about, whatever the noise: a slow hour falls on both, and one run that took three times as long is one of many. The
t-interval asks for normal noise, and a bootstrap of few rounds promises more than it keeps.

A claim is worth as much as the rarest wrong one. At 95 % one comparison in twenty of the same thing with itself would be
called a difference; CLAIM is 99.9 %, which takes 11 rounds that all agree, or more.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import cache
from typing import Literal, NamedTuple

from upshift.errors import RequestError

CLAIM = 0.999
LEAST_EFFECT = 0.01  # what the layout of memory or the length of the environment can bring (Mytkowicz and others, ASPLOS 2009)
EXACT_ROUNDS = 40  # beyond, the rank sums are normal to four digits
MOST_ROUNDS = 10_000  # the most that a message names

Verdict = Literal["faster", "slower", "alike", "not decided"]


class Interval(NamedTuple):
    """The estimate and the interval of a log ratio."""

    value: float
    low: float | None  # None: too few rounds for this confidence
    high: float | None


def least_rounds(confidence: float) -> int:
    """Return the fewest rounds that can decide: n rounds all agree by chance with probability 2 ** (1 - n)."""
    return math.ceil(1 - math.log2(1 - confidence) - 1e-9)


def interval(logs: Sequence[float], *, confidence: float) -> Interval:
    """Return the interval of the log ratio. ``logs``: the log ratio of each round."""
    if not 0.5 <= confidence < 1:
        raise RequestError(f"a confidence of {confidence} is none; give one of 0.5 or more and below 1, such as {CLAIM}")
    means = sorted((one + other) / 2 for number, one in enumerate(logs) for other in logs[number:])
    value, cut = statistics.median(means), _cut(len(logs), confidence)
    return Interval(value, None, None) if cut is None else Interval(value, means[cut], means[-1 - cut])


def verdict(found: Interval) -> Verdict:
    """Return the verdict. ``faster``: the first is. A difference below LEAST_EFFECT counts as none, however sure it is."""
    if found.low is None or found.high is None:
        return "not decided"
    least = math.log(1 + LEAST_EFFECT)
    if found.low > 0 and found.value >= least:
        return "faster"
    if found.high < 0 and found.value <= -least:
        return "slower"
    return "alike" if -least < found.low and found.high < least else "not decided"


def rounds_to_settle(logs: Sequence[float], *, confidence: float) -> int:
    """Return how many more rounds like these would decide, one way or the other: an interval narrows by the root of their number.

    MOST_ROUNDS, the largest answer, means that it cannot be settled."""
    found, count = interval(logs, confidence=confidence), len(logs)
    least = math.log(1 + LEAST_EFFECT)
    room = abs(found.value) if abs(found.value) >= least else least - abs(found.value)
    needed = least_rounds(confidence)
    if room <= 0:
        return MOST_ROUNDS
    needed = max(needed, math.ceil((_normal(confidence) * _deviation(logs) / room) ** 2))
    if found.low is not None and found.high is not None:
        half = max(found.high - found.value, found.value - found.low)
        needed = max(needed, math.ceil(count * (half / room) ** 2))
    return min(max(needed - count, 1), MOST_ROUNDS)


def _deviation(logs: Sequence[float]) -> float:
    """Return the deviation of normal noise that has the same median distance from the median."""
    middle = statistics.median(logs)
    return 1.4826 * statistics.median([abs(one - middle) for one in logs])


def _normal(confidence: float) -> float:
    return statistics.NormalDist().inv_cdf((1 + confidence) / 2)


@cache
def _cut(count: int, confidence: float) -> int | None:
    """Return the largest rank sum that so few rounds fall to by chance, on one side; None: not even 0 is so rare."""
    tail = (1 - confidence) / 2 * (1 + 1e-9)
    if count > EXACT_ROUNDS:
        middle, variance = count * (count + 1) / 4, count * (count + 1) * (2 * count + 1) / 24
        return math.floor(middle - 0.5 - _normal(confidence) * math.sqrt(variance))
    ways = [1] + [0] * (count * (count + 1) // 2)  # in which ranks sum to the index
    for rank in range(1, count + 1):
        for total in range(len(ways) - 1, rank - 1, -1):
            ways[total] += ways[total - rank]
    sum_of_ways, cut = 0, None
    for total, number in enumerate(ways):
        sum_of_ways += number
        if sum_of_ways > tail * 2**count:
            break
        cut = total
    return cut
