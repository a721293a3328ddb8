"""Which setup encodes the user's own texts fastest within the user's quality bound: each runs in a process of its own.

The reference is transformers in fp32. Quality is what the user's texts show: the largest difference of any number, and the
cosine to the reference's vector of the text that agrees least.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np

from upshift.errors import JobFailed, RequestError
from upshift.hardware.spec import Host
from upshift.inference.encode import weights_identity
from upshift.inference.engines.registry import contestants
from upshift.inference.recipe import Recipe
from upshift.inference.setup import EngineName, EngineSetup
from upshift.installed import installed_versions
from upshift.models.source import ModelSource
from upshift.record import Spread
from upshift.settings import read_settings
from upshift.value import Value
from upshift.whole_file import write_whole

WORKER = "upshift.inference.race_worker"
LIBRARIES = ("torch", "transformers", "onnxruntime", "openvino", "nncf")  # that decide what wins
EXACT_DIFFERENCE = 1e-4
TIMEOUT_SECONDS = 300.0  # of one contestant, loading and conversion included
SAMPLE_TEXTS = 128
Quality = float | Literal["exact"]


class Entrant(Value):
    """What the worker is asked."""

    source: ModelSource
    recipe: Recipe
    setup: EngineSetup
    pad: int
    sample: Path  # JSON list of lists of token ids
    reference: Path  # the reference's vectors: written by the reference, read by the others
    is_reference: bool


class Run(Value):
    """What came out of one contestant."""

    setup: EngineSetup
    failure: str | None = None
    load_seconds: float | None = None
    seconds: Spread | None = None
    texts_per_second: float | None = None
    largest_difference: float | None = None
    worst_cosine: float | None = None
    resident_bytes: int | None = None

    def agreement(self) -> str:
        return f"differs by {self.largest_difference:.1e}, cosine {self.worst_cosine:.5f}"

    def within(self, quality: Quality) -> bool:
        if self.seconds is None or self.largest_difference is None or self.worst_cosine is None:
            return False
        return self.largest_difference <= EXACT_DIFFERENCE if quality == "exact" else self.worst_cosine >= quality


class Race(Value):
    """All runs, in their order, and what was chosen of them."""

    runs: tuple[Run, ...]
    chosen: EngineSetup
    file: Path  # where it is remembered: another bound chooses among the same runs
    recalled: bool = False


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


def race(
    source: ModelSource,
    recipe: Recipe,
    host: Host,
    sample: list[list[int]],
    quality: Quality,
    *,
    pad: int,
    engine: EngineName | None = None,
    on_run: Callable[[Run], None] = lambda run: None,
) -> Race:
    """``sample``: token ids of some of the texts. ``engine``: only this one beside the reference. Remembered by model, weights,
    hardware, versions and lengths."""
    kept = _kept(source, recipe, host, sample, engine, exact=quality == "exact")
    if kept.is_file():
        found = Race.from_file(kept)
        return found.changed(chosen=_choose(found.runs, quality, engine, kept), recalled=True)
    runs = []
    with tempfile.TemporaryDirectory(prefix="upshift-race-") as name:
        folder = Path(name)
        (folder / "sample.json").write_text(json.dumps(sample))
        for number, setup in enumerate(contestants(host, exact=quality == "exact")):
            if number and engine not in (None, setup.engine):
                continue
            entrant = Entrant(
                source=source, recipe=recipe, setup=setup, pad=pad, sample=folder / "sample.json",
                reference=folder / "reference.npy", is_reference=number == 0,
            )  # fmt: skip
            runs.append(_run(entrant, folder / "request.json"))
            on_run(runs[-1])
            if number == 0 and runs[0].failure:
                raise JobFailed(f"{source.reference} does not run in transformers: {runs[0].failure}")
    all_runs = tuple(runs)
    kept.parent.mkdir(parents=True, exist_ok=True)
    write_whole(kept, Race(runs=all_runs, chosen=runs[0].setup, file=kept).to_json())
    return Race(runs=all_runs, chosen=_choose(all_runs, quality, engine, kept), file=kept)


def _choose(runs: tuple[Run, ...], quality: Quality, engine: EngineName | None, file: Path) -> EngineSetup:
    """The fastest within the bound. Raises RequestError with what became of each that was asked for."""
    asked = [run for run in runs if engine in (None, run.setup.engine)]
    able = [run for run in asked if run.within(quality)]
    if not able:
        said = "; ".join(f"{run.setup.precision} {run.failure or run.agreement()}" for run in asked)
        raise RequestError(
            f"no setup of --engine {engine} is within --quality {quality} ({said}); allow less, or delete {file} to race again"
        )
    return max(able, key=lambda run: run.texts_per_second or 0.0).setup


def _run(entrant: Entrant, request: Path) -> Run:
    request.write_text(entrant.to_json(), encoding="utf-8")
    command = [sys.executable, "-m", WORKER, str(request)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        return Run(setup=entrant.setup, failure=f"took longer than {TIMEOUT_SECONDS:.0f} s")
    if done.returncode:
        return Run(setup=entrant.setup, failure=done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "it died")
    return Run.from_json(done.stdout.strip().splitlines()[-1], origin="the race's worker")


def _kept(source: ModelSource, recipe: Recipe, host: Host, sample: list[list[int]], engine: str | None, *, exact: bool) -> Path:
    """The lengths by their quantiles to an eighth of a power of two: other texts of such lengths are the same race."""
    lengths = np.quantile([len(row) for row in sample], (0.1, 0.5, 0.9)) if sample else np.zeros(3)
    shape = [round(8 * float(np.log2(max(length, 1.0)))) for length in lengths]
    setups = [setup.label() for setup in contestants(host, exact=exact)]
    said = (recipe.to_json(), host.fingerprint, shape, engine, setups, weights_identity(source), installed_versions(LIBRARIES))
    key = hashlib.sha256(repr(said).encode()).hexdigest()[:16]
    return read_settings().cache_dir / "races" / f"{source.model_hash}-{key}.json"
