"""Tell which of two commands or functions is faster, or how many more rounds would decide it (``upshift.compare``).

Compare what contenders measured in the same rounds: ratios with an interval, so that noise is not taken for a gain.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Literal

from pydantic import Field

from upshift.benchmarking import significance
from upshift.benchmarking.contender import Contender, Runnable, Sample, contender, run_once
from upshift.benchmarking.environment import environment
from upshift.errors import JobFailed, RequestError
from upshift.hardware.spec import Host
from upshift.record import Numbers, Record, Spread
from upshift.units import FLOP_CONVENTION, gib
from upshift.value import Value

Measure = Literal["seconds", "cpu_seconds", "result"]
MEASURES: tuple[Measure, ...] = ("seconds", "cpu_seconds", "result")
ROUNDS, TIMEOUT_SECONDS = 12, 3600.0


class Measured(Value):
    """The samples of one of the two contenders, over all rounds."""

    label: str
    seconds: Spread
    cpu_seconds: Spread
    resident_gib: float | None = Field(None, description="highest memory of its processes, sampled; None: over too soon")
    result: Spread | None = Field(None, description="of the numbers that it returned or printed last")
    samples: list[float] = Field(description="of what was compared, round by round")


class Comparison(Value):
    a: Measured
    b: Measured
    measure: Measure
    verdict: significance.Verdict = Field(description="what A is, beside B")
    ratio: float = Field(description="what B takes / what A takes: how many times as fast A is")
    low: float | None = Field(description="of the ratio's interval; None: too few rounds for this confidence")
    high: float | None
    confidence: float = Field(description="that the interval holds the ratio, over all looks at it together")
    rounds: int
    rounds_to_settle: int | None = Field(None, description="more rounds that would decide; None: it is decided")

    def __str__(self) -> str:
        said, verdict = f"A is {self.ratio:.3f} times as fast as B", str(self.verdict)
        if self.measure == "result":  # the number may mean anything
            said = f"B's is {self.ratio:.3f} times A's"
            verdict = {"faster": "A's is less", "slower": "A's is more"}.get(verdict, verdict)
        if self.low is None or self.high is None:
            return f"not decided: {said} in {self.rounds} rounds; {self._more()}"
        within = f"{said} ({self.low:.3f} to {self.high:.3f} at {100 * self.confidence:g} %, {self.rounds} rounds)"
        if self.verdict == "alike":
            return f"alike: {within}, which is a difference of less than {100 * significance.LEAST_EFFECT:g} %"
        return f"{verdict}: {within}" + (f"; {self._more()}" if self.rounds_to_settle else "")

    def _more(self) -> str:
        if (self.rounds_to_settle or 0) >= significance.MOST_ROUNDS:
            return f"{significance.MOST_ROUNDS:,} more rounds would not settle it"
        return f"about {self.rounds_to_settle:,} more rounds would settle it"

    def records(self, host: Host, *, name: str = "compare") -> list[Record]:
        """Return a row for each of the two, with every sample."""
        where, rows = environment(host), []
        for letter, one, other in (("A", self.a, self.b), ("B", self.b, self.a)):
            rows.append(
                Record(
                    kind="benchmark", name=f"{name}/{letter}", plan={"command": one.label}, predicted=None,
                    measured=_numbers(one), baseline=_numbers(other), baseline_name=other.label,
                    flop_convention=f"model FLOPs: {FLOP_CONVENTION}", environment=where,
                    details={
                        "quick": False, "measure": self.measure, "samples": one.samples, "verdict": self.verdict,
                        "ratio": self.ratio, "interval": [self.low, self.high], "confidence": self.confidence,
                        "cpu_seconds": one.cpu_seconds.p50, "result": one.result.p50 if one.result else None,
                    },
                )
            )  # fmt: skip
        return rows


def compare(
    a: Runnable, b: Runnable, *, rounds: int = ROUNDS, max_rounds: int | None = None, confidence: float = significance.CLAIM,
    measure: Measure = "seconds", timeout_seconds: float = TIMEOUT_SECONDS,
    on_sample: Callable[[int, str, Sample], None] = lambda *_: None,
) -> Comparison:  # fmt: skip
    """Run ``a`` and ``b`` in turn, each time in a fresh process, and say which is faster.

    - ``a``, ``b``: a command (text that no shell reads, or a list of words), whose whole process counts; or a function at the top
      of a file, or its ``"module:function"``, of which the quickest call of the process counts, without imports and a first call.
    - ``rounds``: of both; the order within a round is drawn, and balanced. ``max_rounds``: where it is not decided, twice as many
      are run, and so on up to these; each look at the outcome takes its part of what may go wrong, so that looking often does
      not find a difference that is none.
    - ``measure``: ``seconds`` of the wall; ``cpu_seconds``, on a machine where others run too; ``result``: a number that it
      returns or prints last, of which less is better.

    "faster" and "slower" are said only where the interval of the ratio leaves out 1, at 99.9 % unless asked otherwise, and the
    ratio is 1 % or more; "alike" where all of the interval is within 1 %.
    """
    looks = _looks(rounds, max_rounds or rounds, confidence, measure)
    contenders = {"A": contender(a), "B": contender(b)}
    for one in contenders.values():  # warm-up: files, caches, and whether it runs
        run_once(one, timeout_seconds=timeout_seconds)
    samples: dict[str, list[Sample]] = {"A": [], "B": []}
    sure = 1 - (1 - confidence) / len(looks)  # Bonferroni: right however the looks depend on each other
    for until in looks:
        for number, order in enumerate(orders(until - len(samples["A"])), start=len(samples["A"])):
            for name in order:
                samples[name].append(run_once(contenders[name], timeout_seconds=timeout_seconds))
                on_sample(number, name, samples[name][-1])
        logs = [math.log(theirs / ours) for ours, theirs in zip(*_values(samples, measure), strict=True)]
        found = significance.interval(logs, confidence=sure)
        decided = significance.verdict(found)
        if decided != "not decided":
            break
    more = significance.rounds_to_settle(logs, confidence=confidence) if decided == "not decided" else None
    ours, theirs = _values(samples, measure)
    return Comparison(
        a=_measured(contenders["A"], samples["A"], ours), b=_measured(contenders["B"], samples["B"], theirs), measure=measure,
        verdict=decided, ratio=math.exp(found.value), low=None if found.low is None else math.exp(found.low),
        high=None if found.high is None else math.exp(found.high), confidence=confidence, rounds=len(logs), rounds_to_settle=more,
    )  # fmt: skip


def orders(rounds: int, seed: int | None = None) -> list[str]:
    """Return AB or BA for each round. The order is drawn for every second round, and the round after it has the other order.

    B comes second as often as A. So the cost of coming second cancels, and so does a machine that grows slower."""
    generator = random.Random(seed)
    firsts = [generator.choice(("AB", "BA")) for _ in range((rounds + 1) // 2)]
    return [order for first in firsts for order in (first, first[::-1])][:rounds]


def _looks(rounds: int, most: int, confidence: float, measure: Measure) -> list[int]:
    """Return after how many rounds the outcome is looked at. Raise RequestError for impossible values."""
    if measure not in MEASURES:
        raise RequestError(f"a measure {measure!r} is none; use one of {', '.join(MEASURES)}")
    if not 0.5 <= confidence < 1:
        raise RequestError(
            f"a confidence of {confidence} is none; give one of 0.5 or more and below 1, such as {significance.CLAIM}"
        )
    if rounds < 1 or most < rounds:
        raise RequestError(f"{rounds} rounds and at most {most} are none; give 1 or more, and as many or more at most")
    looks = [rounds]
    while looks[-1] < most:
        looks.append(min(2 * looks[-1], most))
    return looks


def _values(samples: dict[str, list[Sample]], measure: Measure) -> tuple[list[float], list[float]]:
    found = []
    for name in "AB":
        values = [getattr(sample, measure) for sample in samples[name]]
        if any(value is None or value <= 0 for value in values):
            what = "it must return, or print on its last line, a number above 0" if measure == "result" else "it took no time"
            raise JobFailed(f"{name} gave no {measure} to compare: {what}")
        found.append(values)
    return found[0], found[1]


def _measured(given: Contender, samples: list[Sample], values: list[float]) -> Measured:
    results = [sample.result for sample in samples if sample.result is not None]
    highest = max(sample.resident_bytes for sample in samples)
    return Measured(
        label=given.label, seconds=Spread.of([sample.seconds for sample in samples], num_warmup=1),
        cpu_seconds=Spread.of([sample.cpu_seconds for sample in samples], num_warmup=1),
        resident_gib=gib(highest) if highest else None, result=Spread.of(results) if results else None, samples=values,
    )  # fmt: skip


def _numbers(of: Measured) -> Numbers:
    times = of.seconds.model_dump()
    in_ms = {name: 1000 * value if name.startswith("p") else value for name, value in times.items()}
    return Numbers(step_ms=Spread(**in_ms), resident_gib=of.resident_gib)


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
