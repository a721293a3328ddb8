"""Define Record, one row of results. Predicted and measured numbers have the same fields, so each prediction has its error."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from upshift.value import Value

Tier = Literal["measured", "calibrated", "transferred", "formula"]


class Spread(Value):
    """Hold the quantiles of repeated samples."""

    p20: float
    p50: float
    p80: float
    num_samples: int = 1
    num_warmup: int = 0

    @classmethod
    def of(cls, samples: list[float], *, num_warmup: int = 0) -> Spread:
        """Return the quantiles of the samples, interpolated linearly."""
        ordered = sorted(samples)

        def quantile(share: float) -> float:
            position = share * (len(ordered) - 1)
            low = int(position)
            high = min(low + 1, len(ordered) - 1)
            return ordered[low] + (ordered[high] - ordered[low]) * (position - low)

        return cls(p20=quantile(0.2), p50=quantile(0.5), p80=quantile(0.8), num_samples=len(ordered), num_warmup=num_warmup)


class Basis(Value):
    """State how a predicted number is known.

    Tier ``measured``: the same plan of the same model ran on this machine. ``transferred``: other runs on this machine corrected
    the formula. ``formula``: nothing ran."""

    tier: Tier
    interval: tuple[float, float] | None = Field(None, description="factor range of the number that should hold the truth")
    num_records: int = Field(0, description="measurements on this machine that it rests on")


class Numbers(Value):
    """Hold the costs and the speed of a plan, predicted or measured. None means unknown, never zero."""

    peak_gib: float | None = Field(None, description="allocated tensors at the highest moment of a step, one process")
    reserved_gib: float | None = Field(None, description="of a device, what torch's allocator holds: segments and holes")
    resident_gib: float | None = Field(None, description="highest memory of the process (host) or the device in use")
    out_of_memory_probability: float | None = Field(None, description="that the process or device would need more than is free")
    step_ms: Spread | None = Field(None, description="one optimizer step: a whole global batch")
    tokens_per_second: float | None = Field(None, description="real tokens, padding not counted")
    loss: float | None = None
    evaluation_loss: float | None = None
    memory: dict[str, dict[str, float]] = Field(default_factory=dict, description="GiB by phase and part")
    binding_term: str | None = Field(None, description="what a faster machine would have to be faster at")
    model_flops_per_second: float | None = None
    one_time_seconds: float | None = Field(None, description="compilation and first-step costs")
    tier: Tier = Field("measured", description="of step_ms and tokens_per_second")
    interval: tuple[float, float] | None = Field(None, description="factor range of step_ms that should hold the truth")
    num_records: int = Field(0, description="measurements on this machine that corrected step_ms")
    peak_basis: Basis | None = Field(None, description="how a predicted peak_gib is known")
    resident_basis: Basis | None = Field(None, description="how a predicted resident_gib is known")


class Environment(Value):
    """Describe where and when a run took place: enough to repeat it, and nothing that names a person or a path."""

    time: str
    host: str
    host_fingerprint: str
    processor: str | None
    num_cores: int | None
    python: str
    versions: dict[str, str]
    commit: str | None = None


class Record(Value):
    kind: Literal["train", "trial", "benchmark"]
    name: str
    plan: dict[str, Any]
    predicted: Numbers | None
    measured: Numbers | None
    baseline: Numbers | None = Field(None, description="the plain default, or the peer, in the same run")
    baseline_name: str | None = None
    flop_convention: str
    environment: Environment
    checkpoint: str | None = None
    failure: str | None = Field(None, description="why there are no measured numbers")
    details: dict[str, Any] = Field(default_factory=dict)

    def prediction_error(self, field: str) -> float | None:
        """Return predicted / measured - 1 of one number, or None if either is unknown.

        ``field``: ``peak_gib``, ``resident_gib``, ``tokens_per_second`` or ``step_ms`` (its median)."""
        if self.predicted is None or self.measured is None:
            return None
        predicted = _median_or_number(getattr(self.predicted, field))
        measured = _median_or_number(getattr(self.measured, field))
        if predicted is None or not measured:
            return None
        return predicted / measured - 1


def _median_or_number(value: Spread | float | None) -> float | None:
    return value.p50 if isinstance(value, Spread) else value


def compared_numbers(predicted: Numbers, measured: Numbers) -> list[tuple[str, float | None, float | None]]:
    """Return (name, predicted, measured) of each number that a run is compared by."""
    return [
        ("step ms", _median_or_number(predicted.step_ms), _median_or_number(measured.step_ms)),
        ("tokens/s", predicted.tokens_per_second, measured.tokens_per_second),
        ("peak allocated GiB", predicted.peak_gib, measured.peak_gib),
        ("process GiB", predicted.resident_gib, measured.resident_gib),
    ]
