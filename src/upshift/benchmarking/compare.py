"""Compare what contenders measured in the same rounds: ratios with an interval, so that noise is not taken for a gain."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

from upshift.errors import RequestError
from upshift.value import Value

RESAMPLES = 4000
CONFIDENCE = 0.95
MIN_ROUNDS = 3  # with fewer the interval would be a point, or hold the median in half of all repetitions


class Ratio(Value):
    """The median over the rounds of ours / theirs, with the interval in which a repetition of the comparison would put it."""

    value: float
    low: float | None  # None: too few rounds to say
    high: float | None
    num_rounds: int
    confidence: float

    @property
    def is_decided(self) -> bool:
        """Return whether the interval leaves out 1, so that the two differ."""
        return self.low is not None and self.high is not None and not self.low <= 1.0 <= self.high

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.3f} (too few rounds for an interval: {self.num_rounds})"
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def ratio(ours: Sequence[float], theirs: Sequence[float], *, confidence: float = CONFIDENCE, seed: int = 0) -> Ratio:
    """Return the ratio, with an interval by bootstrap over rounds.

    Entry i of both is from round i: what slowed a whole round down cancels.
    With n rounds the interval cannot be wider than from the smallest to the largest ratio of a round, which holds the
    median in 1 - 2 ** (1 - n) of all repetitions: six rounds or more are needed for an honest 95 %.
    """
    if len(ours) != len(theirs) or not ours:
        raise RequestError(f"{len(ours)} and {len(theirs)} samples cannot be compared; give one of each for every round")
    if min(*ours, *theirs) <= 0:
        raise RequestError("a ratio needs samples above 0; leave failed rounds out on both sides")
    rounds = [a / b for a, b in zip(ours, theirs, strict=True)]
    generator = random.Random(seed)
    if len(rounds) < MIN_ROUNDS:
        return Ratio(value=statistics.median(rounds), low=None, high=None, num_rounds=len(rounds), confidence=confidence)
    medians = sorted(statistics.median(generator.choices(rounds, k=len(rounds))) for _ in range(RESAMPLES))
    tail = (1 - confidence) / 2
    return Ratio(
        value=statistics.median(rounds),
        low=medians[int(tail * (RESAMPLES - 1))],
        high=medians[round((1 - tail) * (RESAMPLES - 1))],
        num_rounds=len(rounds),
        confidence=confidence,
    )


def relative_error(predicted: float | None, measured: float | None) -> float | None:
    """Return predicted / measured - 1, or None if either is unknown."""
    return None if predicted is None or not measured else predicted / measured - 1
