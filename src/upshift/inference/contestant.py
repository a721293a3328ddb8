"""Define the messages to and from the process of an engine that takes part in a race."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from pydantic import Field

from upshift.inference.bounds import Limits, Quality
from upshift.inference.engines import ENGINES
from upshift.inference.setup import EngineSetup, Hint, Task
from upshift.models.source import ModelSource
from upshift.record import Spread
from upshift.value import Value

EXACT_DIFFERENCE = 1e-4
Stopped = Literal["quality", "behind", "time"]
Reason = Literal["compiling", "quality", "time"]
UNBOUNDED = 1e9  # seconds


class Contest(Value):
    """The model, the task and the batches of a race."""

    task: Task
    source: ModelSource
    asked: str  # the task's own value, as JSON
    pad: int
    batches: tuple[int, ...]  # every contestant tries each
    hint: Hint


class Run(Value):
    """The results of one contestant with one batch. Differences to the reference are absolute for embeddings and
    scores. Those of logits are divided by the largest logit."""

    setup: EngineSetup
    failure: str | None = None
    stopped: Stopped | None = Field(None, description="why nothing more of it was timed, larger batches included")
    load_seconds: float | None = None
    seconds: Spread | None = None  # of the whole sample
    per_second: float | None = None  # texts, or generated tokens
    forecast_per_second: float | None = None  # by the planner's formulas, before it ran
    first_seconds: float | None = None  # until the first tokens of a batch of prompts, or the slowest batch of texts
    step_seconds: float | None = None  # of generation: one token more of each sequence
    weight_bytes: int | None = None  # of generation: read in every step
    same_tokens: float | None = None  # of generation: share of the likeliest tokens that are the reference's
    largest_difference: float | None = None
    worst_cosine: float | None = None
    median_cosine: float | None = None

    def agreement(self) -> str:
        return f"differs by {self.largest_difference:.1e}, cosine {self.worst_cosine:.5f}"

    def within(self, quality: Quality) -> bool:
        if self.seconds is None or self.largest_difference is None or self.worst_cosine is None:
            return False
        return self.largest_difference <= EXACT_DIFFERENCE if quality == "exact" else self.worst_cosine >= quality

    def beyond(self, limits: Limits) -> float:
        """Return the largest ratio of a measured time to its limit. Up to 1.0 the run keeps all limits."""
        first, step = self.first_seconds or 0.0, self.step_seconds or 0.0
        return 1e3 * max(first / (limits.ttft_ms or math.inf), step / (limits.tpot_ms or math.inf))

    def seconds_for(self, amount: float) -> float:
        """Return the seconds for ``amount`` texts or tokens. An engine that compiles at each load does so before the
        first."""
        compiling = (self.load_seconds or 0.0) if ENGINES[self.setup.engine].uncompiled else 0.0
        return compiling + amount / (self.per_second or math.inf)

    def times(self) -> str:
        step = "" if self.step_seconds is None else f", then {1e3 * self.step_seconds:.1f} ms a token"
        return f"{1e3 * (self.first_seconds or 0.0):.1f} ms{step}"


class LeftOut(Value):
    """A contestant that did not race, and why. ``rate`` is the texts or tokens a second that are expected of an
    engine that compiles. ``cosine`` is the highest that rounding can still reach, as the run of ``by`` showed."""

    setup: EngineSetup
    reason: Reason
    rate: float | None = None
    cosine: float | None = None
    by: EngineSetup | None = None


class Entrants(Value):
    """The message to the process of one engine: its setups, to run one after the other."""

    contest: Contest
    setups: tuple[EngineSetup, ...]
    sample: Path  # JSON list of lists of token ids
    reference: Path  # what the reference gave: written by the first setup of all, read by the others
    quality: Quality = Field(0.0, description="what does not reach it cannot win; 0: all can")
    limited: bool = Field(False, description="what is slower can win where it makes nobody wait as long")
    before: tuple[Run, ...] = Field((), description="of other engines")
    seconds: float = Field(UNBOUNDED, description="that are left of the race; what has not begun then does not")


class Runs(Value):
    """The runs of one contestant, one for each batch."""

    runs: tuple[Run, ...] = ()
    left_out: LeftOut | None = None
