"""Decide which of two commands or functions is faster, or how many more rounds would decide it (``upshift.compare``).

``ratio`` compares samples that contenders measured in the same rounds. Its interval keeps noise from being taken for a gain.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Literal

from pydantic import Field

from upshift.benchmarking import significance
from upshift.benchmarking.contender import Contender, Runnable, Sample, make_contender, run_once
from upshift.benchmarking.environment import environment
from upshift.errors import JobFailed, RequestError
from upshift.hardware.spec import Host
from upshift.record import Numbers, Record, Spread
from upshift.units import FLOP_CONVENTION, gib
from upshift.value import Value

Measure = Literal["seconds", "cpu_seconds", "result"]
MEASURES: tuple[Measure, ...] = ("seconds", "cpu_seconds", "result")
ROUNDS = 12
TIMEOUT_SECONDS = 3600.0


class Measured(Value):
    """The samples of one of the two contenders in all rounds."""

    label: str
    seconds: Spread
    cpu_seconds: Spread
    resident_gib: float | None = Field(None, description="highest memory of its processes, sampled; None: over too soon")
    result: Spread | None = Field(None, description="of the numbers that it returned or printed last")
    samples: list[float] = Field(description="of what was compared, round by round")


class Comparison(Value):
    """The outcome of a comparison of A with B. Its text is a sentence for the user."""

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
        statement = f"A is {self.ratio:.3f} times as fast as B"
        verdict = str(self.verdict)
        if self.measure == "result":  # the number may mean anything
            statement = f"B's is {self.ratio:.3f} times A's"
            verdict = {"faster": "A's is less", "slower": "A's is more"}.get(verdict, verdict)
        if self.low is None or self.high is None:
            return f"not decided: {statement} in {self.rounds} rounds; {self._rounds_needed()}"
        statement += f" ({self.low:.3f} to {self.high:.3f} at {100 * self.confidence:g} %, {self.rounds} rounds)"
        if self.verdict == "alike":
            return f"alike: {statement}, which is a difference of less than {100 * significance.LEAST_EFFECT:g} %"
        return f"{verdict}: {statement}" + (f"; {self._rounds_needed()}" if self.rounds_to_settle else "")

    def _rounds_needed(self) -> str:
        if (self.rounds_to_settle or 0) >= significance.MOST_ROUNDS:
            return f"{significance.MOST_ROUNDS:,} more rounds would not settle it"
        return f"about {self.rounds_to_settle:,} more rounds would settle it"

    def records(self, host: Host, *, name: str = "compare") -> list[Record]:
        """Return a row for each contender, with all its samples."""
        host_environment = environment(host)
        rows = []
        for letter, contender, opponent in (("A", self.a, self.b), ("B", self.b, self.a)):
            rows.append(
                Record(
                    kind="benchmark",
                    name=f"{name}/{letter}",
                    plan={"command": contender.label},
                    predicted=None,
                    measured=_record_numbers(contender),
                    baseline=_record_numbers(opponent),
                    baseline_name=opponent.label,
                    flop_convention=f"model FLOPs: {FLOP_CONVENTION}",
                    environment=host_environment,
                    details={
                        "quick": False,
                        "measure": self.measure,
                        "samples": contender.samples,
                        "verdict": self.verdict,
                        "ratio": self.ratio,
                        "interval": [self.low, self.high],
                        "confidence": self.confidence,
                        "cpu_seconds": contender.cpu_seconds.p50,
                        "result": contender.result.p50 if contender.result else None,
                    },
                )
            )
        return rows


def compare(
    a: Runnable,
    b: Runnable,
    *,
    rounds: int = ROUNDS,
    max_rounds: int | None = None,
    confidence: float = significance.CLAIM,
    measure: Measure = "seconds",
    timeout_seconds: float = TIMEOUT_SECONDS,
    on_sample: Callable[[int, str, Sample], None] = lambda *_: None,
) -> Comparison:
    """Run ``a`` and ``b`` in turn, each time in a fresh process, and decide which is faster.

    - ``a``, ``b``: a command as text (no shell reads it) or as a list of words: its whole process is timed. Or a function at the
      top of a file, or its ``"module:function"``: its quickest call is timed, without imports and the first call.
    - ``rounds``: the number of rounds of both. The order within a round is drawn at random, and balanced over the rounds.
    - ``max_rounds``: if the outcome is not decided, run twice as many rounds, and so on up to this number. The looks at the
      outcome share the probability of error, so that many looks do not find a difference that does not exist.
    - ``confidence``: that the interval holds the ratio.
    - ``measure``: ``seconds`` of wall time; ``cpu_seconds``, for a machine with other programs; ``result``: a number that the
      contender returns or prints last, where less is better.

    The verdict is "faster" or "slower" only if the interval of the ratio leaves out 1 and the ratio is 1 % or more; "alike" if
    the whole interval is within 1 %.
    """
    looks = _looks(rounds, max_rounds or rounds, confidence, measure)
    contenders = {"A": make_contender(a), "B": make_contender(b)}
    for contender in contenders.values():  # a warm-up: it fills caches and shows that the contender runs
        run_once(contender, timeout_seconds=timeout_seconds)
    samples: dict[str, list[Sample]] = {"A": [], "B": []}
    look_confidence = 1 - (1 - confidence) / len(looks)  # Bonferroni: valid whatever the dependence between the looks
    for num_rounds in looks:
        for number, order in enumerate(orders(num_rounds - len(samples["A"])), start=len(samples["A"])):
            for name in order:
                samples[name].append(run_once(contenders[name], timeout_seconds=timeout_seconds))
                on_sample(number, name, samples[name][-1])
        logs = [math.log(theirs / ours) for ours, theirs in zip(*_values(samples, measure), strict=True)]
        interval = significance.interval(logs, confidence=look_confidence)
        verdict = significance.verdict(interval)
        if verdict != "not decided":
            break
    rounds_to_settle = significance.rounds_to_settle(logs, confidence=confidence) if verdict == "not decided" else None
    ours, theirs = _values(samples, measure)
    return Comparison(
        a=_measured(contenders["A"], samples["A"], ours),
        b=_measured(contenders["B"], samples["B"], theirs),
        measure=measure,
        verdict=verdict,
        ratio=math.exp(interval.value),
        low=None if interval.low is None else math.exp(interval.low),
        high=None if interval.high is None else math.exp(interval.high),
        confidence=confidence,
        rounds=len(logs),
        rounds_to_settle=rounds_to_settle,
    )


def orders(rounds: int, seed: int | None = None) -> list[str]:
    """Return AB or BA for each round: drawn for every second round, and reversed for the round after it.

    A and B come second equally often, which cancels the cost of coming second, and the drift of a machine that slows down."""
    generator = random.Random(seed)
    firsts = [generator.choice(("AB", "BA")) for _ in range((rounds + 1) // 2)]
    return [order for first in firsts for order in (first, first[::-1])][:rounds]


def _looks(rounds: int, max_rounds: int, confidence: float, measure: Measure) -> list[int]:
    """Return the numbers of rounds after which the outcome is looked at. Raise RequestError for impossible arguments."""
    if measure not in MEASURES:
        raise RequestError(f"the measure {measure!r} is unknown; use one of {', '.join(MEASURES)}")
    if not 0.5 <= confidence < 1:
        raise RequestError(
            f"a confidence of {confidence} is not possible; give 0.5 or more and below 1, such as {significance.CLAIM}"
        )
    if rounds < 1:
        raise RequestError(f"--rounds {rounds} is not possible; give 1 or more")
    if max_rounds < rounds:
        raise RequestError(f"--max-rounds {max_rounds} is below --rounds {rounds}; give at least {rounds}, or fewer --rounds")
    looks = [rounds]
    while looks[-1] < max_rounds:
        looks.append(min(2 * looks[-1], max_rounds))
    return looks


def _values(samples: dict[str, list[Sample]], measure: Measure) -> tuple[list[float], list[float]]:
    values_by_contender = []
    for name in "AB":
        values = [getattr(sample, measure) for sample in samples[name]]
        if any(value is None or value <= 0 for value in values):
            reason = "it must return, or print on its last line, a number above 0" if measure == "result" else "it took no time"
            raise JobFailed(f"{name} gave no {measure} to compare: {reason}")
        values_by_contender.append(values)
    return values_by_contender[0], values_by_contender[1]


def _measured(contender: Contender, samples: list[Sample], values: list[float]) -> Measured:
    results = [sample.result for sample in samples if sample.result is not None]
    peak_bytes = max(sample.resident_bytes for sample in samples)
    return Measured(
        label=contender.label,
        seconds=Spread.of([sample.seconds for sample in samples], num_warmup=1),
        cpu_seconds=Spread.of([sample.cpu_seconds for sample in samples], num_warmup=1),
        resident_gib=gib(peak_bytes) if peak_bytes else None,
        result=Spread.of(results) if results else None,
        samples=values,
    )


def _record_numbers(measured: Measured) -> Numbers:
    times = measured.seconds.model_dump()
    in_ms = {name: 1000 * value if name.startswith("p") else value for name, value in times.items()}
    return Numbers(step_ms=Spread(**in_ms), resident_gib=measured.resident_gib)


RESAMPLES = 4000
CONFIDENCE = 0.95
MIN_ROUNDS = 3  # with fewer the interval would be a point, or hold the median in half of all repetitions


class Ratio(Value):
    """The median over the rounds of ours / theirs, and the interval in which a repetition of the comparison would find it."""

    value: float
    low: float | None  # None: too few rounds for an interval
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

    Entry i of both sequences is from round i, so that an influence on a whole round cancels.
    With n rounds the interval is at most from the smallest to the largest ratio of a round, which holds the median in
    1 - 2 ** (1 - n) of all repetitions. An honest 95 % therefore needs six rounds or more.
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
