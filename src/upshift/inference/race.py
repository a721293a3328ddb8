"""Which setup runs the user's own texts fastest within the user's quality bound: each engine runs in a process of its own.

The reference is transformers in fp32. Quality is what the user's texts show: the largest difference of any number, and the
cosine to the reference's vector (of a text, or of the logits of a token) that agrees least.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from threading import Timer
from typing import Literal

import numpy as np
from pydantic import Field

from upshift.errors import JobFailed, NothingFits, RequestError
from upshift.hardware.spec import Host
from upshift.inference.engines import PACKAGES, contestants, is_installed
from upshift.inference.forecast import Forecast
from upshift.inference.setup import EngineName, EngineSetup, Hint, Task
from upshift.inference.weights import check_room, stored_for, weights_identity
from upshift.installed import installed_versions
from upshift.models.source import ModelSource
from upshift.record import Spread
from upshift.settings import read_settings
from upshift.value import Value
from upshift.whole_file import write_whole

LIBRARIES = (  # that decide what wins
    "torch", "transformers", "onnxruntime", "openvino", "nncf", "ctranslate2", "llama-cpp-python",
)  # fmt: skip
EXACT_DIFFERENCE = 1e-4
TIMEOUT_SECONDS = 300.0  # of one setup, loading and conversion included
SAID = "upshift runs: "  # what a line begins with that is Runs
Quality = float | Literal["exact"]


class Contest(Value):
    """What is raced for."""

    task: Task
    source: ModelSource
    asked: str  # the task's own value, as JSON
    pad: int
    batches: tuple[int, ...]  # every contestant tries each
    hint: Hint


class Entrants(Value):
    """What the process of one engine is asked: its setups, one after the other."""

    contest: Contest
    setups: tuple[EngineSetup, ...]
    sample: Path  # JSON list of lists of token ids
    reference: Path  # what the reference gave: written by the first setup of all, read by the others


class Limits(Value):
    """What the user can wait for. ``ttft_ms``: until the first token of prompts that are admitted together, or until the rows of
    a batch of texts; ``tpot_ms``: for one token more of each sequence, in the mean."""

    ttft_ms: float | None = Field(None, gt=0)
    tpot_ms: float | None = Field(None, gt=0)

    def __bool__(self) -> bool:
        return self.ttft_ms is not None or self.tpot_ms is not None


class Run(Value):
    """What came out of one contestant with one batch. Differences to the reference: of embeddings and scores as they are; of
    logits over the largest of them."""

    setup: EngineSetup
    failure: str | None = None
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
        """The largest of its times over what is allowed; up to 1.0 it holds them."""
        first, step = self.first_seconds or 0.0, self.step_seconds or 0.0
        return 1e3 * max(first / (limits.ttft_ms or math.inf), step / (limits.tpot_ms or math.inf))

    def times(self) -> str:
        step = "" if self.step_seconds is None else f", then {1e3 * self.step_seconds:.1f} ms a token"
        return f"{1e3 * (self.first_seconds or 0.0):.1f} ms{step}"


class Runs(Value):
    """Of one contestant, with each batch."""

    runs: tuple[Run, ...]


class Race(Value):
    """All runs, in their order, and what was chosen of them."""

    runs: tuple[Run, ...]
    chosen: EngineSetup
    file: Path | None  # where it is remembered: other bounds choose among the same runs; None: there was one setup alone
    recalled: bool = False
    expected: dict[EngineName, float] = Field({}, description="of what is not installed: the forecast of its fastest setup")

    def best(self) -> list[Run]:
        """Of each contestant that ran, its fastest batch, or the one that was chosen; the fastest contestant first."""
        found: dict[str, Run] = {}
        for run in sorted((run for run in self.runs if not run.failure), key=lambda run: -(run.per_second or 0.0)):
            if run.setup == self.chosen or run.setup.label() not in found:
                found[run.setup.label()] = run
        return sorted(found.values(), key=lambda run: -(run.per_second or 0.0))


def read_quality(text: str) -> Quality:
    """``exact``, or the lowest cosine that is allowed."""
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
    if milliseconds is not None and not milliseconds > 0.0:
        raise RequestError(f"--{name} {milliseconds:g} is not possible; give milliseconds above 0")
    return milliseconds


def race(
    contest: Contest,
    host: Host,
    sample: list[list[int]],
    quality: Quality,
    *,
    engine: EngineName | None = None,
    forecast: Callable[[], Forecast],
    limits: Limits,
    on_run: Callable[[Run], None] = lambda run: None,
) -> Race:
    """``sample``: token ids of some of the texts. ``engine``: only this one beside the reference. Remembered by contest, weights,
    hardware, versions and lengths."""
    stored, batch = stored_for(contest.source), contest.batches[0]
    able = contestants(contest.task, host, exact=quality == "exact", batch=batch, hint=contest.hint, stored=stored)
    setups = [setup for setup in able if is_installed(setup.engine)]
    asked = [setup for place, setup in enumerate(setups) if not place or engine in (None, setup.engine)]
    kept = _kept(contest, host, sample, asked)
    if kept.is_file():
        found = Race.from_file(kept)
        return found.changed(chosen=_choose(found, quality, limits, engine), recalled=True)
    check_room(contest.source, host)
    if len(asked) == 1 and not limits:
        return Race(runs=(), chosen=asked[0].changed(batch=contest.batches[-1]), file=None)
    runs, says = list[Run](), forecast()
    with tempfile.TemporaryDirectory(prefix="upshift-race-") as name:
        folder = Path(name)
        (folder / "sample.json").write_text(json.dumps(sample))
        for _, group in groupby(asked, key=lambda setup: setup.engine):
            entrants = Entrants(
                contest=contest, setups=tuple(group), sample=folder / "sample.json", reference=folder / "reference.npy"
            )
            for run in runs_of(entrants, folder):
                runs.append(run if run.failure else run.changed(forecast_per_second=says(run.setup)))
                on_run(runs[-1])
            if runs[0].failure:
                raise JobFailed(f"{contest.source.reference} does not run in transformers: {runs[0].failure}")
    expected = dict[EngineName, float]()
    for setup in able:
        if setup not in setups:
            expected[setup.engine] = max(says(setup) or 0.0, expected.get(setup.engine, 0.0))
    run_all = Race(runs=tuple(runs), chosen=runs[0].setup, file=kept, expected=expected)
    kept.parent.mkdir(parents=True, exist_ok=True)
    write_whole(kept, run_all.to_json())
    return run_all.changed(chosen=_choose(run_all, quality, limits, engine))


def _choose(race: Race, quality: Quality, limits: Limits, engine: EngineName | None) -> EngineSetup:
    """The fastest within all bounds. Raises RequestError with what became of each that was asked for, or NothingFits with what
    came nearest to the limits."""
    asked = [run for run in race.runs if engine in (None, run.setup.engine)]
    able = [run for run in asked if run.within(quality)]
    if not able:
        said = "; ".join(f"{run.setup.precision} {run.failure or run.agreement()}" for run in asked)
        raise RequestError(
            f"no setup of --engine {engine} is within --quality {quality} ({said}); allow less, or delete {race.file} to race "
            f"again"
        )
    quick = [run for run in able if run.beyond(limits) <= 1.0]
    if not quick:
        nearest = min(able, key=lambda run: run.beyond(limits))
        raise NothingFits(
            f"no setup within --quality {quality} is as quick as asked; the nearest is {nearest.setup.label()} with a batch of "
            f"{nearest.setup.batch:,}: {nearest.times()}; allow more time or less quality, or delete {race.file} to race again"
        )
    return max(quick, key=lambda run: run.per_second or 0.0).setup


def runs_of(entrants: Entrants, folder: Path) -> Iterator[Run]:
    """One of each setup and batch, as they come. What ends the process, or takes too long, is the failure of those that did not
    run."""
    request, errors = folder / "request.json", folder / "errors.txt"
    request.write_text(entrants.to_json(), encoding="utf-8")
    waiting = list(entrants.setups)
    limit = TIMEOUT_SECONDS * len(waiting)
    with errors.open("w") as file:
        command = [sys.executable, "-m", f"{PACKAGES[entrants.contest.task]}.contest", str(request)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True)
    assert process.stdout is not None
    timer = Timer(limit, process.kill)
    timer.start()
    begun = time.monotonic()
    try:
        for line in process.stdout:
            if line.startswith(SAID):  # libraries print, too
                waiting.pop(0)
                yield from Runs.from_json(line.removeprefix(SAID), origin="a contestant of the race").runs
            if not waiting:
                break  # what a library does at the end of a process is not awaited
        else:
            process.wait()
    finally:  # also when the user interrupts
        timer.cancel()
        process.kill()
        process.wait()
    last = (errors.read_text(errors="replace").strip().splitlines() or [f"its process ended with {process.returncode}"])[-1]
    late = time.monotonic() - begun >= limit
    for setup in waiting:
        yield Run(setup=setup, failure=f"took longer than {limit:.0f} s" if late else last)


def answer(run: Callable[[Entrants, EngineSetup], list[Run]]) -> None:
    """Of an engine's process, python -m MODULE REQUEST.json: a line for each setup. An error is that setup's failure alone."""
    entrants = Entrants.from_file(Path(sys.argv[1]))
    for setup in entrants.setups:
        try:
            found = run(entrants, setup)
        except Exception as error:  # whatever a library raises: it is told to the user as why this setup did not run
            found = [Run(setup=setup, failure=f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")]
        sys.stdout.write(f"{SAID}{Runs(runs=tuple(found)).to_json()}\n")
        sys.stdout.flush()
        gc.collect()  # before the next one is loaded


def _kept(contest: Contest, host: Host, sample: list[list[int]], setups: list[EngineSetup]) -> Path:
    """The lengths by their quantiles to an eighth of a power of two: other texts of such lengths are the same race."""
    lengths = np.quantile([len(row) for row in sample], (0.1, 0.5, 0.9)) if sample else np.zeros(3)
    shape = [round(8 * float(np.log2(max(length, 1.0)))) for length in lengths]
    labels = [setup.label() for setup in setups]
    weights = weights_identity(contest.source)
    said = (contest.to_json(), host.fingerprint, shape, labels, weights, installed_versions(LIBRARIES))
    key = hashlib.sha256(repr(said).encode()).hexdigest()[:16]
    return read_settings().cache_dir / "races" / f"{contest.source.model_hash}-{key}.json"
