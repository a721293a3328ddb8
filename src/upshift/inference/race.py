"""Which setup runs the user's own texts fastest within the user's quality bound: each engine runs in a process of its own.

The reference is transformers in fp32. Quality is what the user's texts show: the largest difference of any number, and the
cosine to the reference's vector (of a text, or of the logits of a token) that agrees least.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path

import numpy as np
from pydantic import Field

from upshift.errors import JobFailed, NothingFits, RequestError
from upshift.fork_server import ForkServer, fork_server
from upshift.hardware.spec import Host
from upshift.inference.bounds import Limits, Quality
from upshift.inference.contestant import Contest, Entrants, Run, Runs
from upshift.inference.engines import ENGINES, PACKAGES, contestants, is_installed
from upshift.inference.forecast import Forecast
from upshift.inference.payback import FEW, Entering, entering, fastest, pays
from upshift.inference.setup import EngineName, EngineSetup
from upshift.inference.weights import check_room, reference_precision, stored_for, weights_identity
from upshift.installed import installed_versions
from upshift.settings import read_settings
from upshift.value import Value
from upshift.whole_file import write_whole

LIBRARIES = (  # that decide what wins
    "torch", "transformers", "onnxruntime", "openvino", "nncf", "ctranslate2", "llama-cpp-python",
)  # fmt: skip
TIMEOUT_SECONDS = 300.0  # of one setup, loading and conversion included


class Race(Value):
    """All runs, in their order, and what was chosen of them."""

    runs: tuple[Run, ...]
    chosen: EngineSetup
    file: Path | None  # where it is remembered: other bounds choose among the same runs; None: there was one setup alone
    recalled: bool = False
    expected: dict[EngineName, float | None] = Field(
        {}, description="of what is not installed and has such models: the forecast of its fastest setup"
    )
    left_out: dict[str, float | None] = Field({}, description="what compiles for longer than it would save, and its forecast")
    ceiling: float | None = Field(None, description="texts or tokens a second where nothing is computed: no engine does more")

    def best(self) -> list[Run]:
        """Of each contestant that ran, its fastest batch, or the one that was chosen; the fastest contestant first."""
        found: dict[str, Run] = {}
        ran = [run for run in self.runs if not run.failure]
        for run in sorted(ran, key=lambda run: (run.setup != self.chosen, -(run.per_second or 0.0))):
            found.setdefault(run.setup.label(), run)
        return sorted(found.values(), key=lambda run: -(run.per_second or 0.0))


def race(
    contest: Contest,
    host: Host,
    sample: list[list[int]],
    quality: Quality,
    *,
    engine: EngineName | None = None,
    forecast: Callable[[], Forecast],
    limits: Limits,
    amount: float,
    on_run: Callable[[Run], None] = lambda run: None,
) -> Race:
    """``sample``: token ids of some of the texts. ``engine``: only this one beside the reference. ``amount``: of all texts, or
    tokens to generate, which compiling is to pay for. Remembered by contest, weights, hardware, versions and lengths."""
    stored, batch = stored_for(contest.source), contest.batches[0]
    exact = quality == "exact"
    reference = reference_precision(contest.source, host)
    able = contestants(
        contest.task, contest.source, host, exact=exact, batch=batch, hint=contest.hint, stored=stored, reference=reference
    )
    setups = [setup for setup in able if is_installed(setup.engine)]
    asked = [setup for place, setup in enumerate(setups) if not place or engine in (None, setup.engine)]
    kept = _kept(contest, host, sample, asked)
    if kept.is_file():
        found = Race.from_file(kept)
        best = fastest(found.runs, quality)
        if not any(pays(rate, best, amount) for rate in found.left_out.values()):
            return found.changed(chosen=_choose(found, quality, limits, engine, amount), recalled=True)
    check_room(contest.source, host, reference)
    absent = [setup for setup in able if setup not in setups]
    plain = [setup for setup in asked if engine is not None or not ENGINES[setup.engine].uncompiled]
    if len(plain) == 1 and not limits:
        unknown = dict.fromkeys(setup.engine for setup in absent)
        alone = Race(runs=(), chosen=plain[0].changed(batch=contest.batches[-1]), file=None, expected=unknown)
        if len(asked) == 1 or amount < FEW:
            return alone
        best, *rates = map(forecast(), asked)
        if not any(pays(rate, best, amount) for rate in rates):
            return alone.changed(left_out={setup.label(): rate for setup, rate in zip(asked[1:], rates, strict=True)})
    enter = partial(entering, quality=quality, amount=amount if engine is None else None)
    run_all = _run_all(contest, sample, asked, absent, forecast, enter, on_run).changed(file=kept)
    kept.parent.mkdir(parents=True, exist_ok=True)
    write_whole(kept, run_all.to_json())
    return run_all.changed(chosen=_choose(run_all, quality, limits, engine, amount))


def _run_all(
    contest: Contest, sample: list[list[int]], asked: list[EngineSetup], absent: list[EngineSetup],
    forecast: Callable[[], Forecast], enter: Callable[..., Entering], on_run: Callable[[Run], None],
) -> Race:  # fmt: skip
    """``absent``: of engines that are not installed. ``enter``: which of an engine's setups run, by what ran before. What
    computes nothing runs beside the first of them."""
    runs, left_out, ceiling = list[Run](), dict[str, float | None](), 0.0
    with tempfile.TemporaryDirectory(prefix="upshift-race-") as name, fork_server(f"{PACKAGES[contest.task]}.contest") as server:
        says = forecast()
        sample_file, reference = Path(name) / "sample.json", Path(name) / "reference.npy"
        sample_file.write_text(json.dumps(sample))
        for setups in (tuple(group) for _, group in groupby(asked, key=lambda setup: setup.engine)):
            chosen = enter(setups, runs, says)
            left_out |= chosen.left_out
            beside = () if runs else (asked[0].changed(engine="nothing", precision="fp32"),)
            entrants = Entrants(contest=contest, setups=(*chosen.setups, *beside), sample=sample_file, reference=reference)
            for run in runs_of(server, entrants) if entrants.setups else ():
                if run.setup.engine == "nothing":
                    ceiling = max(ceiling, run.per_second or 0.0)
                    continue
                runs.append(run if run.failure else run.changed(forecast_per_second=says(run.setup)))
                on_run(runs[-1])
            if runs[0].failure:
                raise JobFailed(f"{contest.source.reference} does not run in transformers: {runs[0].failure}")
    expected = dict[EngineName, float | None]()
    for setup in absent:
        expected[setup.engine] = max(says(setup) or 0.0, expected.get(setup.engine) or 0.0) or None
    return Race(
        runs=tuple(runs), chosen=runs[0].setup, file=None, expected=expected, left_out=left_out, ceiling=ceiling or None
    )


def _choose(race: Race, quality: Quality, limits: Limits, engine: EngineName | None, amount: float) -> EngineSetup:
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
    return min(quick, key=lambda run: run.seconds_for(amount)).setup


def runs_of(server: ForkServer, entrants: Entrants) -> Iterator[Run]:
    """One of each setup and batch, as they come. What ends the process, or takes too long, is the failure of those that did not
    run."""
    waiting = list(entrants.setups)
    limit = TIMEOUT_SECONDS * len(waiting)
    for said in server.ask(entrants, Runs, limit_seconds=limit):
        if isinstance(said, Runs):
            waiting.pop(0)
            yield from said.runs
            continue
        for setup in waiting:
            last = said.last_words or f"its process ended with exit {said.exit}, signal {said.signal}"
            yield Run(setup=setup, failure=f"took longer than {limit:.0f} s" if said.timed_out else last)


def _kept(contest: Contest, host: Host, sample: list[list[int]], setups: list[EngineSetup]) -> Path:
    """The lengths by their quantiles to an eighth of a power of two: other texts of such lengths are the same race."""
    lengths = np.quantile([len(row) for row in sample], (0.1, 0.5, 0.9)) if sample else np.zeros(3)
    shape = [round(8 * float(np.log2(max(length, 1.0)))) for length in lengths]
    labels = [setup.label() for setup in setups]
    weights = weights_identity(contest.source)
    said = (contest.to_json(), host.fingerprint, shape, labels, weights, installed_versions(LIBRARIES))
    key = hashlib.sha256(repr(said).encode()).hexdigest()[:16]
    return read_settings().cache_dir / "races" / f"{contest.source.model_hash}-{key}.json"
