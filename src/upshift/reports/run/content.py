"""The content of one run's report page as plain data. None is unknown, never zero. Loss is per token.

It computes nothing: the code that writes a page copies the numbers. A reason is the planner's own value."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat

from upshift.planning.analysis.explain import Reason
from upshift.reports.plots import Candidate
from upshift.value import Value

Role = Literal["default", "chosen", "other"]
Point = tuple[NonNegativeFloat, float | None]
"""(tokens trained so far, loss)"""


class Fact(Value):
    label: str
    text: str


class ComparisonRow(Value):
    """One plan as measured. The others are compared with the first row whose role is ``default``."""

    plan: str
    role: Role = "other"
    tokens_per_second: float | None = None
    step_ms: float | None = None
    peak_gib: float | None = None
    resident_gib: float | None = None
    held_out_loss: float | None = None


class PredictionRow(Value):
    """One quantity of the chosen plan, predicted before the run and measured in it."""

    quantity: str
    unit: str = ""
    predicted: float | None = None
    measured: float | None = None

    @property
    def error(self) -> float | None:
        """Return predicted / measured - 1, or None if a number is missing."""
        return None if self.predicted is None or not self.measured else self.predicted / self.measured - 1


class LossCurve(Value):
    """One plan's loss over tokens. The page draws ``training`` lightly as given and boldly as a moving mean."""

    name: str
    training: tuple[Point, ...] = ()
    held_out: tuple[Point, ...] = ()


class MemorySample(Value):
    """Memory at one time. A part that is not listed takes no memory then."""

    seconds: NonNegativeFloat
    phase: str
    parts: dict[str, NonNegativeFloat] = {}
    resident_gib: NonNegativeFloat | None = None


class MemoryHistory(Value):
    """Memory of the process over the whole run, and its predicted peak, process base included."""

    samples: tuple[MemorySample, ...] = ()
    predicted_peak_gib: NonNegativeFloat | None = None


class Sample(Value):
    """Text that the trained model wrote."""

    prompt: str
    text: str


class RunPage(Value):
    title: str
    summary: str
    facts: tuple[Fact, ...] = ()
    comparison: tuple[ComparisonRow, ...] = ()
    predictions: tuple[PredictionRow, ...] = ()
    reasons: tuple[Reason, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    memory_limit_gib: NonNegativeFloat | None = None
    memory: MemoryHistory = MemoryHistory()
    loss_curves: tuple[LossCurve, ...] = ()
    samples: tuple[Sample, ...] = ()
    commands: tuple[str, ...] = ()
    environment: tuple[Fact, ...] = ()
    flop_convention: str | None = None
