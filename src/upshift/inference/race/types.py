"""Define the messages to and from the process of an engine that takes part in a race.

Define the bounds that a user sets: how near to the reference an answer must be, and how long it may take.

Compare an engine's numbers with the reference's.

Pick the user's own texts that a race runs on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
from pydantic import Field

from upshift.errors import RequestError
from upshift.inference.registry import ENGINES, EngineSetup, Hint, Task
from upshift.models.source import ModelSource
from upshift.record import Spread
from upshift.value import Value

Quality = float | Literal["exact"]


class Limits(Value):
    """The longest times that the user can wait. ``ttft_ms``: until the first token of prompts that are admitted
    together, or until the rows of a batch of texts. ``tpot_ms``: for one more token of each sequence, in the mean."""

    ttft_ms: float | None = Field(None, gt=0)
    tpot_ms: float | None = Field(None, gt=0)

    def __bool__(self) -> bool:
        return self.ttft_ms is not None or self.tpot_ms is not None


def read_quality(text: str) -> Quality:
    """Return ``exact``, or the lowest cosine that is allowed."""
    if text == "exact":
        return "exact"
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= 1.0:
        raise RequestError(f"--quality {text!r} is not possible; use exact, or a cosine such as 0.999 or 0.99")
    return value


def read_limit(name: str, milliseconds: float | None) -> float | None:
    if milliseconds is not None and not 0.0 < milliseconds < math.inf:
        raise RequestError(f"--{name} {milliseconds:g} is not possible; give milliseconds above 0")
    return milliseconds


def read_seconds(seconds: float | None) -> float | None:
    """Return the seconds of a race."""
    if seconds is not None and not 0.0 < seconds < math.inf:
        raise RequestError(f"--race-seconds {seconds:g} is not possible; give seconds above 0")
    return seconds


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


def cosines(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the cosine of each row of ``one`` with the same row of ``other``, [N]."""
    norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    found: np.ndarray = (one * other).sum(1) / np.maximum(norms, 1e-12)
    return found


T = TypeVar("T")


def spread(items: Sequence[T], count: int) -> list[T]:
    """Return ``count`` of the items, evenly from first to last."""
    return spread_over(items, len(items), count)


def spread_over(items: Iterable[T], total: int, count: int) -> list[T]:
    """Return the same as ``spread`` for items that are read once, one after the other, as those of a file are."""
    places = {place * total // count for place in range(count)} if count < total else range(total)
    return [item for place, item in enumerate(items) if place in places]
