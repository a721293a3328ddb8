"""Define the values of a race: the user's bounds, the messages to and from the engines' processes, and their results.

Compare an engine's numbers with the reference's, and pick the user's own texts that a race runs on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
from pydantic import Field

from upshift.errors import RequestError
from upshift.inference.engine_environment import EngineEnvironment
from upshift.inference.registry import ENGINES, EngineSetup, Hint, Task
from upshift.models.source import ModelSource
from upshift.record import Spread
from upshift.value import Value

Quality = float | Literal["exact"]


class Limits(Value):
    """The longest times that the user accepts, in milliseconds. None sets no limit.

    ``ttft_ms`` limits the time until the first tokens of a batch of prompts, or until the results of a batch of texts.
    ``tpot_ms`` limits the mean time of one more token of each sequence."""

    ttft_ms: float | None = Field(None, gt=0)
    tpot_ms: float | None = Field(None, gt=0)

    def __bool__(self) -> bool:
        return self.ttft_ms is not None or self.tpot_ms is not None


def read_quality(text: str) -> Quality:
    """Return ``exact``, or the lowest cosine that is allowed. Raise RequestError for any other text."""
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
    """Return the limit of the option ``name``. Raise RequestError if it is not a positive number."""
    if milliseconds is not None and not 0.0 < milliseconds < math.inf:
        raise RequestError(f"--{name} {milliseconds:g} is not possible; give milliseconds above 0")
    return milliseconds


RaceSeconds = float | Literal["run"] | None  # of a race; "run": at most as long as the run itself; None: RacePolicy decides


def read_seconds(seconds: RaceSeconds) -> RaceSeconds:
    """Return the time limit of a race. Raise RequestError if it is not a positive number."""
    if isinstance(seconds, str):
        if seconds != "run":
            raise RequestError(f"race_seconds {seconds!r} is not possible; give seconds above 0, or 'run'")
        return seconds
    if seconds is not None and not 0.0 < seconds < math.inf:
        raise RequestError(f"--race-seconds {seconds:g} is not possible; give seconds above 0")
    return seconds


EXACT_DIFFERENCE = 1e-4  # largest difference to the reference under the quality "exact"
Stopped = Literal["quality", "behind", "time"]
Reason = Literal["compiling", "start", "quality", "time"]
UNBOUNDED = 1e9  # seconds: no time limit


class Contest(Value):
    """The model, the task and the batches of a race."""

    task: Task
    source: ModelSource
    asked: str  # the options of the task, as JSON; a part of the key of a race that is kept
    pad: int
    batches: tuple[int, ...]  # every setup tries each of them
    hint: Hint
    environment: EngineEnvironment | None = Field(None, description="of the engine that runs in its own Python environment")
    tensor_parallel: int = Field(1, gt=0, description="devices that share each layer")


class Run(Value):
    """The results of one setup with one batch.

    Differences to the reference are absolute for embeddings and scores. Differences of logits are divided by the largest
    logit."""

    setup: EngineSetup
    failure: str | None = None
    temporary: bool = Field(False, description="whether the failure may not come again (full disk or memory, timeout)")
    stopped: Stopped | None = Field(None, description="why the setup was not timed further, also not with larger batches")
    load_seconds: float | None = None
    seconds: Spread | None = None  # the time of the whole sample
    per_second: float | None = None  # texts, or generated tokens
    forecast_per_second: float | None = None  # by the planner's formulas, before it ran
    first_seconds: float | None = None  # until the first tokens of a batch of prompts, or the slowest batch of texts
    step_seconds: float | None = None  # generation only: the time of one more token of each sequence
    weight_bytes: int | None = None  # generation only: the bytes that every step reads
    same_tokens: float | None = None  # generation only: the share of the likeliest tokens that are the reference's
    largest_difference: float | None = None
    worst_cosine: float | None = None
    median_cosine: float | None = None

    def format_agreement(self) -> str:
        return f"differs by {self.largest_difference:.1e}, cosine {self.worst_cosine:.5f}"

    def meets(self, quality: Quality) -> bool:
        """Return whether the run was timed and its results agree with the reference as well as ``quality`` demands."""
        if self.seconds is None or self.largest_difference is None or self.worst_cosine is None:
            return False
        if quality == "exact":
            return self.largest_difference <= EXACT_DIFFERENCE
        return self.worst_cosine >= quality

    def limit_ratio(self, limits: Limits) -> float:
        """Return the largest ratio of a measured time to its limit. The run keeps all limits if it is at most 1."""
        first_ratio = (self.first_seconds or 0.0) / (limits.ttft_ms or math.inf)
        step_ratio = (self.step_seconds or 0.0) / (limits.tpot_ms or math.inf)
        return 1e3 * max(first_ratio, step_ratio)

    def seconds_for(self, amount: float) -> float:
        """Return the seconds for ``amount`` texts or tokens, with the time to load of an engine that compiles or
        starts a process at each load."""
        load_seconds = 0.0
        if ENGINES[self.setup.engine].loads_slowly:
            load_seconds = self.load_seconds or 0.0
        return load_seconds + amount / (self.per_second or math.inf)

    def format_times(self) -> str:
        step = "" if self.step_seconds is None else f", then {1e3 * self.step_seconds:.1f} ms a token"
        return f"{1e3 * (self.first_seconds or 0.0):.1f} ms{step}"


class Skipped(Value):
    """A setup that did not race, and why.

    ``rate`` is the predicted texts or tokens per second of an engine that compiles. ``cosine`` is the highest cosine
    that the setup can reach, as the run of the setup ``by`` showed."""

    setup: EngineSetup
    reason: Reason
    rate: float | None = None
    cosine: float | None = None
    by: EngineSetup | None = None


class RaceRequest(Value):
    """The message to the process of one engine, which runs its setups one after the other.

    ``sample`` is a JSON list of lists of token ids. ``reference`` is the file of the reference's results: the first
    setup of a race writes it, and the others read it."""

    contest: Contest
    setups: tuple[EngineSetup, ...]
    sample: Path
    reference: Path
    quality: Quality = Field(0.0, description="a setup that does not reach it cannot win; 0: every setup can win")
    limited: bool = Field(False, description="a slower setup can win, if it keeps the user's time limits")
    before: tuple[Run, ...] = Field((), description="runs of other engines")
    seconds: float = Field(UNBOUNDED, description="that are left of the race; no setup begins after them")


class RaceResult(Value):
    """The answer for one setup: its runs, one for each batch, or why it was skipped."""

    runs: tuple[Run, ...] = ()
    skipped: Skipped | None = None


def cosines(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the cosine of each row of ``left`` [N, D] with the same row of ``right``, [N].

    Two rows of zeros agree, so their cosine is 1. A row of zeros and another row have the cosine 0."""
    left_norms = np.linalg.norm(left, axis=1)
    right_norms = np.linalg.norm(right, axis=1)
    products = (left * right).sum(1)
    cosine: np.ndarray = products / np.where(left_norms == 0.0, 1.0, left_norms) / np.where(right_norms == 0.0, 1.0, right_norms)
    cosine[(left_norms == 0.0) & (right_norms == 0.0)] = 1.0
    return cosine


def with_agreement(run: Run, rows: np.ndarray, expected: np.ndarray) -> Run:
    """Return the run with the agreement of its rows with the reference's."""
    cosine = cosines(rows, expected)
    return run.changed(
        largest_difference=float(np.abs(rows - expected).max(initial=0.0)),
        worst_cosine=float(cosine.min(initial=1.0)),
        median_cosine=float(np.median(cosine)) if len(cosine) else 1.0,
    )


T = TypeVar("T")


def pick_evenly(items: Sequence[T], count: int) -> list[T]:
    """Return ``count`` of the items, evenly spread from the first to the last. Return all if there are fewer."""
    return pick_evenly_from_stream(items, len(items), count)


def pick_evenly_from_stream(items: Iterable[T], total: int, count: int) -> list[T]:
    """Return the items that ``pick_evenly`` returns, from ``total`` items that can be read only once, such as a file's."""
    picked = {number * total // count for number in range(count)} if count < total else range(total)
    return [item for index, item in enumerate(items) if index in picked]
