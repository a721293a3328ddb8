"""Decide whether two contenders that ran in the same rounds differ, or how many rounds would decide it.

The interval is Hodges and Lehmann's (1963): the median of all means of two rounds' log ratios, between the order statistics
of Wilcoxon's signed-rank distribution (Hollander, Wolfe and Chicken, Nonparametric Statistical Methods, 3.3). It assumes only
that a round's log ratio is positive or negative with equal probability if there is no difference. A random order in each round
makes this true for any noise: a slow hour slows both, and one run that took three times as long counts as one of many. A
t-interval would need normal noise, and a bootstrap of few rounds covers less than it states.

The confidence must make false claims rare. At 95 %, one in twenty comparisons of a program with itself would find a difference.
CLAIM is 99.9 %, which takes at least 11 rounds that all agree.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import cache
from typing import Literal, NamedTuple

from upshift.errors import RequestError

CLAIM = 0.999
LEAST_EFFECT = 0.01  # memory layout or the environment's length can change times this much (Mytkowicz et al., ASPLOS 2009)
EXACT_ROUNDS = 40  # with more rounds the rank sums are normal to four digits
MOST_ROUNDS = 10_000  # the largest answer of ``rounds_to_settle``

Verdict = Literal["faster", "slower", "alike", "not decided"]


class Interval(NamedTuple):
    """The estimate of a log ratio, and its interval."""

    value: float
    low: float | None  # None: too few rounds for this confidence
    high: float | None


def least_rounds(confidence: float) -> int:
    """Return the smallest number of rounds that can decide. n rounds all agree by chance with probability 2 ** (1 - n)."""
    return math.ceil(1 - math.log2(1 - confidence) - 1e-9)


def interval(logs: Sequence[float], *, confidence: float) -> Interval:
    """Return the estimate and the interval of the log ratio. ``logs``: the log ratio of each round."""
    if not 0.5 <= confidence < 1:
        raise RequestError(f"a confidence of {confidence} is not possible; give 0.5 or more and below 1, such as {CLAIM}")
    means = sorted((first + second) / 2 for index, first in enumerate(logs) for second in logs[index:])
    value = statistics.median(means)
    cut = _cut(len(logs), confidence)
    return Interval(value, None, None) if cut is None else Interval(value, means[cut], means[-1 - cut])


def verdict(log_ratio: Interval) -> Verdict:
    """Return the verdict on the first contender. A difference below LEAST_EFFECT counts as none, however certain it is."""
    if log_ratio.low is None or log_ratio.high is None:
        return "not decided"
    least_effect = math.log(1 + LEAST_EFFECT)
    if log_ratio.low > 0 and log_ratio.value >= least_effect:
        return "faster"
    if log_ratio.high < 0 and log_ratio.value <= -least_effect:
        return "slower"
    return "alike" if -least_effect < log_ratio.low and log_ratio.high < least_effect else "not decided"


def rounds_to_settle(logs: Sequence[float], *, confidence: float) -> int:
    """Return how many more rounds like these would decide. The interval's width falls with the root of the number of rounds.

    MOST_ROUNDS, the largest answer, means that more rounds would not decide."""
    log_ratio = interval(logs, confidence=confidence)
    count = len(logs)
    least_effect = math.log(1 + LEAST_EFFECT)
    distance = abs(log_ratio.value) if abs(log_ratio.value) >= least_effect else least_effect - abs(log_ratio.value)
    needed = least_rounds(confidence)
    if distance <= 0:
        return MOST_ROUNDS
    needed = max(needed, math.ceil((_normal(confidence) * _deviation(logs) / distance) ** 2))
    if log_ratio.low is not None and log_ratio.high is not None:
        half_width = max(log_ratio.high - log_ratio.value, log_ratio.value - log_ratio.low)
        needed = max(needed, math.ceil(count * (half_width / distance) ** 2))
    return min(max(needed - count, 1), MOST_ROUNDS)


def _deviation(logs: Sequence[float]) -> float:
    """Return the standard deviation of the normal distribution with the same median absolute deviation."""
    middle = statistics.median(logs)
    return 1.4826 * statistics.median([abs(value - middle) for value in logs])


def _normal(confidence: float) -> float:
    return statistics.NormalDist().inv_cdf((1 + confidence) / 2)


@cache
def _cut(count: int, confidence: float) -> int | None:
    """Return the largest rank sum of one side that is as rare as the confidence asks, or None if not even 0 is."""
    tail = (1 - confidence) / 2 * (1 + 1e-9)
    if count > EXACT_ROUNDS:
        mean = count * (count + 1) / 4
        variance = count * (count + 1) * (2 * count + 1) / 24
        return math.floor(mean - 0.5 - _normal(confidence) * math.sqrt(variance))
    num_subsets = [1] + [0] * (count * (count + 1) // 2)  # of ranks, by their sum
    for rank in range(1, count + 1):
        for total in range(len(num_subsets) - 1, rank - 1, -1):
            num_subsets[total] += num_subsets[total - rank]
    num_at_most = 0
    cut = None
    for total, subsets in enumerate(num_subsets):
        num_at_most += subsets
        if num_at_most > tail * 2**count:
            break
        cut = total
    return cut
