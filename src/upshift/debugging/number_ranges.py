"""Interpret the ranges of a forward pass: where numbers stop being finite, where they underflow, where they near the limit."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from upshift.debugging.finding import Finding, error, warning

# The largest number, the smallest normal number, the smallest number: IEEE 754 binary16 and binary32, and bfloat16.
LIMITS = {
    "float16": (65504.0, 2.0**-14, 2.0**-24),
    "bfloat16": (3.3895e38, 2.0**-126, 2.0**-133),
    "float32": (3.4028e38, 2.0**-126, 2.0**-149),
}
NEAR = 4  # times below the limit; two doublings are reported whatever the trend is
FAR = 64  # times below the limit; trends are followed from here on
TREND_BATCHES = 8  # the fewest batches that show a trend
SOON_BATCHES = 200  # a trend that reaches the limit within this many batches is reported
KEPT_BATCHES = 32


@dataclass(frozen=True)
class Reading:
    """Hold the smallest and the largest magnitude in a tensor of a module's call. They may be NaN or inf."""

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
    """Hold the readings of one call of a module."""

    module: str
    kind: str  # class of the module
    readings: tuple[Reading, ...] = ()

    def readings_of(self, kind: str) -> list[Reading]:
        """Return the readings of a kind: input, output, or weight (all others)."""
        if kind == "weight":
            return [reading for reading in self.readings if not reading.name.startswith(("input", "output"))]
        return [reading for reading in self.readings if reading.name.startswith(kind)]

    def lines(self) -> list[str]:
        return [f"{'':17} {self.module or 'the model'} {self.kind}", *(reading.line() for reading in self.readings)]


def is_bad(frame: Frame) -> bool:
    return any(not reading.is_finite for reading in frame.readings)


def diagnose(frame: Frame, *, batch: int, from_data: bool) -> Finding:
    """Return the diagnosis of the first bad frame. ``from_data``: whether the inputs of the model were already bad."""
    subject = f"batch {batch}"
    module = f"{frame.module or 'the model'} ({frame.kind})"
    evidence = "; ".join(
        f"{reading.name} {reading.low:.2e} to {reading.high:.2e} ({reading.dtype})" for reading in frame.readings
    )
    bad_weights = [reading for reading in frame.readings_of("weight") if not reading.is_finite]
    bad_inputs = [reading for reading in frame.readings_of("input") if not reading.is_finite]
    if bad_weights:
        return error(
            subject,
            what=f"{bad_weights[0].name} of {module} is {_nan_or_inf(bad_weights[0])} before the forward pass",
            evidence=evidence,
            cause="an update before this batch spoiled it, or the checkpoint holds it",
            fix="resume from the checkpoint before it with half the learning_rate and max_grad_norm=1.0",
        )
    if bad_inputs and from_data:
        return error(
            subject,
            what=f"the batch itself holds {_nan_or_inf(bad_inputs[0])}: {bad_inputs[0].name} of {module}",
            evidence=evidence,
            cause="the data, or what prepares it; no weight has made it",
            fix="drop its rows: [i for i, row in enumerate(dataset) if not torch.isfinite(torch.as_tensor(row[NAME])).all()]",
        )
    bad_outputs = [reading for reading in frame.readings_of("output") if not reading.is_finite]
    worst = (bad_inputs or bad_outputs or list(frame.readings))[0]
    diagnosis = f"{module} makes {_nan_or_inf(worst)} of finite numbers"
    if bad_inputs:  # no earlier module returned the bad number
        parent = frame.module.rpartition(".")[0] or "the model"
        diagnosis = f"{parent} makes {_nan_or_inf(worst)} of finite numbers, in its own forward, before it calls {module}"
    cause: str | None = None
    if worst.dtype == "float16":
        cause = f"{worst.dtype} ends at {LIMITS[worst.dtype][0]:,.0f}"
        fix = f"bf16=True instead of fp16=True, or upshift.debugging.keep_in_fp32(model, '{block_of(frame.module)}')"
    else:
        fix = "half the learning_rate, max_grad_norm=1.0; then look at the frames above for what grew"
    return error(subject, what=diagnosis, evidence=evidence, cause=cause, fix=fix)


def _nan_or_inf(reading: Reading) -> str:
    return "NaN" if math.isnan(reading.high) else "inf"


def block_of(module: str) -> str:
    """Return the innermost layer of a list of layers that contains the module, or the module if there is none.

    For encoder.block.2.layer.1.DenseReluDense.wo it is encoder.block.2.layer.1.
    """
    names = module.split(".")
    last = max((index for index, name in enumerate(names) if name.isdigit()), default=None)
    return module if last is None else ".".join(names[: last + 1])


def underflows(frame: Frame) -> Iterator[Finding]:
    """Yield a warning for each output that underflows although inputs and weights do not.

    Its largest number is below the smallest normal number of its type, or all its numbers are zero."""
    sources = [*frame.readings_of("weight"), *frame.readings_of("input")]
    for reading in frame.readings_of("output"):
        if reading.dtype not in LIMITS or not reading.is_finite or not sources or any(source.high == 0 for source in sources):
            continue
        _, normal, least = LIMITS[reading.dtype]
        product = math.prod(source.high for source in sources)
        vanished = reading.high == 0 and bool(frame.readings_of("weight")) and product < least
        if vanished or 0 < reading.high < normal:
            description = "is all zero" if vanished else f"is at most {reading.high:.1e}, below the smallest normal number"
            yield warning(
                frame.module or "the model",
                what=f"underflow: {reading.name} of {frame.kind} {description} of {reading.dtype}",
                evidence="; ".join(f"{source.name} up to {source.high:.1e}" for source in frame.readings),
                cause=f"{reading.dtype} has nothing between 0 and {least:.0e}",
                fix=f"bf16=True instead of fp16=True, or upshift.debugging.keep_in_fp32(model, '{block_of(frame.module)}')",
            )


@dataclass
class Trends:
    """Follow the largest output of every module over the batches. Each block is reported once."""

    history: dict[tuple[str, str], deque[float]] = field(default_factory=dict)
    reported: set[str] = field(default_factory=set)

    def add(self, frames: list[Frame]) -> list[Finding]:
        """Add the frames of a batch, and return findings about blocks whose numbers newly approach the limit."""
        findings = []
        for frame in frames:
            for reading in frame.readings_of("output"):
                past = self.history.setdefault((frame.module, reading.name), deque(maxlen=KEPT_BATCHES))
                past.append(reading.high)
                block = block_of(frame.module)
                if reading.dtype not in LIMITS or block in self.reported:
                    continue
                description = describe_climb(list(past), reading.dtype)
                if description:
                    self.reported.add(block)
                    findings.append(_climb_finding(frame, reading, description, block))
        return findings


def _climb_finding(frame: Frame, reading: Reading, description: str, block: str) -> Finding:
    limit = LIMITS[reading.dtype][0]
    fix = "half the learning_rate, and max_grad_norm=1.0, before it overflows"
    if reading.dtype == "float16":
        fix = f"before it overflows: upshift.debugging.keep_in_fp32(model, '{block}'), or bf16=True instead of fp16=True"
    return warning(
        frame.module or "the model",
        what=f"{reading.name} of {frame.kind} climbs toward the limit of {reading.dtype}: {description}",
        evidence=f"largest now {reading.high:.3g}, limit {limit:.5g}",
        fix=fix,
    )


def describe_climb(past: list[float], dtype: str) -> str | None:
    """Describe how the largest numbers of the last batches approach the limit. Return None if they do not."""
    limit = LIMITS[dtype][0]
    newest = past[-1]
    if not 0 < newest < math.inf:
        return None
    if newest > limit / NEAR:
        return f"{limit / newest:.1f} times below it"
    positive = [value for value in past if 0 < value < math.inf]
    if newest < limit / FAR or len(positive) < TREND_BATCHES:
        return None
    doublings = slope([math.log2(value) for value in positive])
    if doublings <= 0:
        return None
    batches = math.log2(limit / newest) / doublings
    return f"it gets there in some {batches:,.0f} batches" if batches < SOON_BATCHES else None


def slope(values: list[float]) -> float:
    """Return the slope of the least-squares line through values at 0, 1, 2, ..."""
    middle = (len(values) - 1) / 2
    mean = sum(values) / len(values)
    spread = sum((number - middle) ** 2 for number in range(len(values)))
    return sum((number - middle) * (value - mean) for number, value in enumerate(values)) / spread
