"""Read the ranges of a forward pass: where numbers stopped being finite, where they vanish, where they climb to the limit."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from upshift.debugging.finding import Finding, error, warning

# Largest number, smallest normal one, smallest of all: IEEE 754 binary16 and binary32, and bfloat16.
LIMITS = {
    "float16": (65504.0, 2.0**-14, 2.0**-24),
    "bfloat16": (3.3895e38, 2.0**-126, 2.0**-133),
    "float32": (3.4028e38, 2.0**-126, 2.0**-149),
}
NEAR = 4  # times below the limit: two doublings away, whatever the trend
FAR = 64  # times below the limit: a trend is followed from here on
TREND_BATCHES = 8  # at least, to speak of a trend
SOON_BATCHES = 200  # a trend that reaches the limit within this many batches is reported
KEPT_BATCHES = 32


@dataclass(frozen=True)
class Reading:
    """The smallest and the largest magnitude in one tensor of a module's call. NaN and inf pass through."""

    name: str  # weight, input[0], output
    dtype: str
    low: float
    high: float

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.high)

    def line(self) -> str:
        return f"{self.low:8.2e} {self.high:8.2e} {self.name}"


@dataclass(frozen=True)
class Frame:
    """One call of one module."""

    module: str
    kind: str  # its class
    readings: tuple[Reading, ...] = ()

    def of(self, what: str) -> list[Reading]:
        """Return the readings of a kind: weight (everything that is not input or output), input or output."""
        if what == "weight":
            return [one for one in self.readings if not one.name.startswith(("input", "output"))]
        return [one for one in self.readings if one.name.startswith(what)]

    def lines(self) -> list[str]:
        return [f"{'':17} {self.module or 'the model'} {self.kind}", *(reading.line() for reading in self.readings)]


def is_bad(frame: Frame) -> bool:
    return any(not reading.is_finite for reading in frame.readings)


def diagnose(frame: Frame, *, batch: int, from_data: bool) -> Finding:
    """Return the diagnosis of the first frame that is bad. ``from_data``: the inputs of the model were bad already."""
    subject = f"batch {batch}"
    where = f"{frame.module or 'the model'} ({frame.kind})"
    evidence = "; ".join(f"{one.name} {one.low:.2e} to {one.high:.2e} ({one.dtype})" for one in frame.readings)
    bad_weights = [one for one in frame.of("weight") if not one.is_finite]
    bad_inputs = [one for one in frame.of("input") if not one.is_finite]
    if bad_weights:
        return error(
            subject,
            what=f"{bad_weights[0].name} of {where} is {_word(bad_weights[0])} before the forward pass",
            evidence=evidence,
            cause="an update before this batch spoiled it, or the checkpoint holds it",
            fix="resume from the checkpoint before it with half the learning_rate and max_grad_norm=1.0",
        )
    if bad_inputs and from_data:
        return error(
            subject,
            what=f"the batch itself holds {_word(bad_inputs[0])}: {bad_inputs[0].name} of {where}",
            evidence=evidence,
            cause="the data, or what prepares it; no weight has made it",
            fix="drop its rows: [i for i, row in enumerate(dataset) if not torch.isfinite(torch.as_tensor(row[NAME])).all()]",
        )
    worst = (bad_inputs or [one for one in frame.of("output") if not one.is_finite] or list(frame.readings))[0]
    in_half = worst.dtype == "float16"
    made = f"{where} makes {_word(worst)} of finite numbers"
    if bad_inputs:  # no module before this one gave out the bad number
        parent = frame.module.rpartition(".")[0] or "the model"
        made = f"{parent} makes {_word(worst)} of finite numbers, in its own forward, before it calls {where}"
    return error(
        subject,
        what=made,
        evidence=evidence,
        cause=f"{worst.dtype} ends at {LIMITS[worst.dtype][0]:,.0f}" if in_half else None,
        fix=f"bf16=True instead of fp16=True, or upshift.debugging.keep_in_fp32(model, '{block_of(frame.module)}')"
        if in_half
        else "half the learning_rate, max_grad_norm=1.0; then look at the frames above for what grew",
    )


def _word(reading: Reading) -> str:
    return "NaN" if math.isnan(reading.high) else "inf"


def block_of(module: str) -> str:
    """Return the innermost numbered member of a list of layers that the module is in.

    For example, encoder.block.2.layer.1 of encoder.block.2.layer.1.DenseReluDense.wo.
    """
    parts = module.split(".")
    last = max((place for place, part in enumerate(parts) if part.isdigit()), default=None)
    return module if last is None else ".".join(parts[: last + 1])


def underflows(frame: Frame) -> Iterator[Finding]:
    """Yield a warning for an output whose largest number is below the smallest normal one, or gone, if inputs and weights are
    not."""
    sources = [*frame.of("weight"), *frame.of("input")]
    for reading in frame.of("output"):
        if reading.dtype not in LIMITS or not reading.is_finite or not sources or any(one.high == 0 for one in sources):
            continue
        _, normal, least = LIMITS[reading.dtype]
        product = math.prod(one.high for one in sources)
        vanished = reading.high == 0 and bool(frame.of("weight")) and product < least
        if vanished or 0 < reading.high < normal:
            words = "is all zero" if vanished else f"is at most {reading.high:.1e}, below the smallest normal number"
            yield warning(
                frame.module or "the model",
                what=f"underflow: {reading.name} of {frame.kind} {words} of {reading.dtype}",
                evidence="; ".join(f"{one.name} up to {one.high:.1e}" for one in frame.readings),
                cause=f"{reading.dtype} has nothing between 0 and {least:.0e}",
                fix=f"bf16=True instead of fp16=True, or upshift.debugging.keep_in_fp32(model, '{block_of(frame.module)}')",
            )


@dataclass
class Trends:
    """The largest output of every module, batch by batch. Each block is reported once."""

    history: dict[tuple[str, str], deque[float]] = field(default_factory=dict)
    said: set[str] = field(default_factory=set)

    def add(self, frames: list[Frame]) -> list[Finding]:
        found = []
        for frame in frames:
            for reading in frame.of("output"):
                past = self.history.setdefault((frame.module, reading.name), deque(maxlen=KEPT_BATCHES))
                past.append(reading.high)
                block = block_of(frame.module)
                if reading.dtype in LIMITS and block not in self.said and (words := climbing(list(past), reading.dtype)):
                    self.said.add(block)
                    found.append(_climbs(frame, reading, words, block))
        return found


def _climbs(frame: Frame, reading: Reading, words: str, block: str) -> Finding:
    limit = LIMITS[reading.dtype][0]
    in_half = reading.dtype == "float16"
    return warning(
        frame.module or "the model",
        what=f"{reading.name} of {frame.kind} climbs toward the limit of {reading.dtype}: {words}",
        evidence=f"largest now {reading.high:.3g}, limit {limit:.5g}",
        fix=f"before it overflows: upshift.debugging.keep_in_fp32(model, '{block}'), or bf16=True instead of fp16=True"
        if in_half
        else "half the learning_rate, and max_grad_norm=1.0, before it overflows",
    )


def climbing(past: list[float], dtype: str) -> str | None:
    """Return in words how the largest numbers of the last batches come near the limit; None: nothing to fear."""
    limit = LIMITS[dtype][0]
    now = past[-1]
    if not 0 < now < math.inf:
        return None
    if now > limit / NEAR:
        return f"{limit / now:.1f} times below it"
    positive = [value for value in past if 0 < value < math.inf]
    if now < limit / FAR or len(positive) < TREND_BATCHES:
        return None
    doublings = slope([math.log2(value) for value in positive])
    if doublings <= 0:
        return None
    batches = math.log2(limit / now) / doublings
    return f"it gets there in some {batches:,.0f} batches" if batches < SOON_BATCHES else None


def slope(values: list[float]) -> float:
    """Return the slope of the least-squares line."""
    middle = (len(values) - 1) / 2
    mean = sum(values) / len(values)
    spread = sum((number - middle) ** 2 for number in range(len(values)))
    return sum((number - middle) * (value - mean) for number, value in enumerate(values)) / spread
