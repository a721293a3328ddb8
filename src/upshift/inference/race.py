"""Find the setup that runs the user's own texts fastest within the user's quality bound. Each engine runs in a
process of its own.

The reference is transformers in fp32. Quality is measured on the user's texts: the largest difference of any number,
and the cosine to the reference's vector (of a text, or of the logits of a token) that agrees least."""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

import numpy as np
from pydantic import Field

from upshift.disk_full import keep
from upshift.errors import JobFailed, NothingFits, RequestError
from upshift.fork_server import ForkServer, fork_server
from upshift.hardware.spec import Host
from upshift.inference.bounds import Limits, Quality
from upshift.inference.contestant import Contest, Entrants, LeftOut, Run, Runs
from upshift.inference.engines import ENGINES, PACKAGES, contestants, is_installed
from upshift.inference.final import finalists, run_final
from upshift.inference.forecast import Forecast
from upshift.inference.payback import FEW, LONGER, Entering, allowed, entering, pays, settled
from upshift.inference.setup import EngineName, EngineSetup
from upshift.inference.weights import check_room, reference_precision, stored_for, weights_identity
from upshift.installed import installed_versions
from upshift.settings import read_settings
from upshift.value import Value

LIBRARIES = (  # that decide what wins
    "torch", "transformers", "onnxruntime", "openvino", "nncf", "ctranslate2", "llama-cpp-python",
)  # fmt: skip
TIMEOUT_SECONDS = 300.0  # of one setup, loading and conversion included


class Race(Value):
    """All runs, in their order, and the chosen setup."""

    runs: tuple[Run, ...]
    chosen: EngineSetup
    file: Path | None  # where it is remembered: other bounds choose among the same runs; None: there was one setup alone
    recalled: bool = False
    expected: dict[EngineName, float | None] = Field(
        {}, description="of what is not installed and has such models: the forecast of its fastest setup"
    )
    divided: str | None = Field(None, description="why nothing was raced: the model has no room, and runs partly from the disk")
    final: tuple[EngineSetup, ...] = Field((), description="who ran again, and has that rate")
    left_out: tuple[LeftOut, ...] = Field((), description="what could not win, would not pay, or came after the race's time")
    seconds: float = Field(0.0, description="that the race took")
    allowed: float = Field(0.0, description="seconds that it might take; the reference runs to its end")
    ceiling: float | None = Field(None, description="texts or tokens a second where nothing is computed: no engine does more")

    def best(self) -> list[Run]:
        """Return, for each contestant that ran, its fastest batch, or the chosen one, or the one in the final. The
        fastest comes first."""
        found: dict[str, Run] = {}
        ran = [run for run in self.runs if not run.failure]
        known = (self.chosen, *self.final)
        for run in sorted(ran, key=lambda run: (run.setup not in known, run.setup != self.chosen, -(run.per_second or 0.0))):
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
    seconds: float | None = None,
    no_room: Callable[[], Race] | None = None,
    on_run: Callable[[Run], None] = lambda run: None,
) -> Race:
    """Run a race, or recall its result by contest, weights, hardware, versions and lengths.

    ``sample``: token ids of some of the texts. ``engine``: only this one beside the reference. ``amount``: all texts,
    or tokens to generate, for which compiling must pay. ``seconds``: of the race. None: by the amount. ``no_room``:
    called if no race is remembered and the reference does not fit."""
    stored, batch = stored_for(contest.source), contest.batches[0]
    exact = quality == "exact"
    reference = reference_precision(contest.source, host)
    able = contestants(
        contest.task, contest.source, host, exact=exact, batch=batch, hint=contest.hint, stored=stored, reference=reference
    )
    setups = [setup for setup in able if is_installed(setup.engine)]
    asked = [setup for place, setup in enumerate(setups) if not place or engine in (None, setup.engine)]
    kept = _kept(contest, host, sample, asked)
    longest = partial(allowed, seconds, quality=quality, amount=amount)
    found = _recalled(kept, quality, limits, amount, longest)
    if found is not None:
        return found.changed(chosen=_choose(found, quality, limits, engine, amount), recalled=True)
    if no_room is not None:
        return no_room()
    check_room(contest.source, host, reference)
    absent = [setup for setup in able if setup not in setups]
    if not limits and (alone := _alone(asked, absent, contest.batches[-1], forecast, amount, named=engine is not None)):
        return alone
    enter = partial(entering, quality=quality, amount=amount if engine is None else None)
    nobody = Entrants(contest=contest, setups=(), sample=Path(), reference=Path(), quality=quality, limited=bool(limits))
    # A final is about the time of many texts; under limits who is chosen may be far from the fastest.
    near = partial(finalists, quality=quality) if amount >= FEW and not limits else lambda runs: ()
    file = kept / f"{quality}.json"
    run_all = _run_all(nobody, sample, asked, absent, forecast, enter, longest, near, on_run).changed(file=file)
    keep("the race's result is", file, run_all.to_json())
    return run_all.changed(chosen=_choose(run_all, quality, limits, engine, amount))


def _alone(
    asked: list[EngineSetup],
    absent: list[EngineSetup],
    batch: int,
    forecast: Callable[[], Forecast],
    amount: float,
    *,
    named: bool,
) -> Race | None:
    """Return the reference if no other setup can race with it, or only one that compiles and does not pay."""
    if len([setup for setup in asked if named or not ENGINES[setup.engine].uncompiled]) > 1:
        return None
    unknown = dict.fromkeys(setup.engine for setup in absent)
    alone = Race(runs=(), chosen=asked[0].changed(batch=batch), file=None, expected=unknown)
    if len(asked) == 1 or amount < FEW:
        return alone
    best, *rates = map(forecast(), asked)
    if any(pays(rate, best, amount) for rate in rates):
        return None
    out = (LeftOut(setup=setup, reason="compiling", rate=rate) for setup, rate in zip(asked[1:], rates, strict=True))
    return alone.changed(left_out=tuple(out))


def _recalled(
    kept: Path, quality: Quality, limits: Limits, amount: float, longest: Callable[[Sequence[Run]], float]
) -> Race | None:
    """Return the same race under this bound, or under another bound if nothing that was left out could win under this
    one."""
    for file in (kept / f"{quality}.json", *sorted(kept.glob("*.json"))):
        race = Race.from_file(file) if file.is_file() else None
        longer = race is not None and longest(race.runs) > LONGER * race.allowed
        if race and settled(race.runs, race.left_out, quality, amount=amount, limited=bool(limits), longer=longer):
            return race
    return None


def _run_all(
    entrants: Entrants, sample: list[list[int]], asked: list[EngineSetup], absent: list[EngineSetup],
    forecast: Callable[[], Forecast], enter: Callable[..., Entering], longest: Callable[[Sequence[Run]], float],
    near: Callable[[Sequence[Run]], Sequence[Run]], on_run: Callable[[Run], None],
) -> Race:  # fmt: skip
    """Run all contestants.

    ``entrants``: without setups and files. ``absent``: setups of engines that are not installed. ``enter``: returns
    which of an engine's setups run, by the earlier runs. ``longest``: returns the seconds of the race, by the same.
    ``near``: returns who runs again at the end. The engine that computes nothing runs beside the reference."""
    start, contest = time.perf_counter(), entrants.contest
    runs, left_out, ceiling = list[Run](), list[LeftOut](), 0.0
    says = forecast()
    with tempfile.TemporaryDirectory(prefix="upshift-race-") as name, fork_server(f"{PACKAGES[contest.task]}.contest") as server:
        says(asked[0])  # the model is traced while the engines' process imports
        entrants = entrants.changed(sample=Path(name) / "sample.json", reference=Path(name) / "reference.npy")
        entrants.sample.write_text(json.dumps(sample))
        for setups in (tuple(group) for _, group in groupby(asked, key=lambda setup: (setup == asked[0], setup.engine))):
            chosen = enter(setups, runs, says)
            left_out += chosen.left_out
            beside = () if runs else (asked[0].changed(engine="nothing", precision="fp32"),)
            left = longest(runs) - (time.perf_counter() - start)
            group = entrants.changed(setups=(*chosen.setups, *beside), before=tuple(runs), seconds=left)
            for said in runs_of(server, group) if group.setups else ():
                if isinstance(said, LeftOut):
                    left_out.append(said)
                elif said.setup.engine == "nothing":
                    ceiling = max(ceiling, said.per_second or 0.0)
                else:
                    runs.append(said if said.failure else said.changed(forecast_per_second=says(said.setup)))
                    on_run(runs[-1])
            if runs[0].failure:
                raise JobFailed(f"{contest.source.reference} does not run in transformers: {runs[0].failure}")
        left = longest(runs) - (time.perf_counter() - start)
        final = {run.setup: run for run in run_final(near(runs), entrants, partial(runs_of, server), seconds=left)}
        for run in final.values():
            on_run(run)
        runs = [final.get(run.setup, run) for run in runs]
    expected = dict[EngineName, float | None]()
    for setup in absent:
        expected[setup.engine] = max(says(setup) or 0.0, expected.get(setup.engine) or 0.0) or None
    return Race(
        runs=tuple(runs), chosen=runs[0].setup, file=None, final=tuple(final), expected=expected,
        left_out=tuple(left_out), ceiling=ceiling or None, seconds=time.perf_counter() - start, allowed=longest(runs),
    )  # fmt: skip


def _choose(race: Race, quality: Quality, limits: Limits, engine: EngineName | None, amount: float) -> EngineSetup:
    """Return the fastest setup within all bounds. Raise RequestError with the result of each requested one, or
    NothingFits with the one that came nearest to the limits."""
    asked = [run for run in race.runs if engine in (None, run.setup.engine)]
    able = [run for run in asked if run.within(quality)]
    if not able:
        said = "; ".join(f"{run.setup.precision} {run.failure or run.agreement()}" for run in asked)
        raise RequestError(
            f"no setup of --engine {engine} is within --quality {quality} ({said}); allow less, or delete {race.file} to race "
            f"again"
        )
    in_final = {} if limits else {setup.label(): setup for setup in race.final}  # their other batches have the race's rates
    able = [run for run in able if in_final.get(run.setup.label(), run.setup) == run.setup]
    quick = [run for run in able if run.beyond(limits) <= 1.0]
    if not quick:
        nearest = min(able, key=lambda run: run.beyond(limits))
        raise NothingFits(
            f"no setup within --quality {quality} is as quick as asked; the nearest is {nearest.setup.label()} with a batch of "
            f"{nearest.setup.batch:,}: {nearest.times()}; allow more time or less quality, or delete {race.file} to race again"
        )
    return min(quick, key=lambda run: run.seconds_for(amount)).setup


def runs_of(server: ForkServer, entrants: Entrants) -> Iterator[Run | LeftOut]:
    """Yield the runs of each setup and batch, as they come. If the process ends or takes too long, the setups that
    did not run have failed. The end of the race's time is no failure."""
    waiting = list(entrants.setups)
    limit = TIMEOUT_SECONDS * len(waiting)
    if entrants.before:  # the reference runs to its end
        limit = min(limit, entrants.seconds)
    if limit <= 0.0:
        yield from (LeftOut(setup=setup, reason="time") for setup in waiting)
        return
    for said in server.ask(entrants, Runs, limit_seconds=limit):
        if isinstance(said, Runs):
            waiting.pop(0)
            yield from said.runs
            if said.left_out is not None:
                yield said.left_out
            continue
        for setup in waiting:
            if said.timed_out and limit == entrants.seconds:
                yield LeftOut(setup=setup, reason="time")
                continue
            last = said.last_words or f"its process ended with exit {said.exit}, signal {said.signal}"
            yield Run(setup=setup, failure=f"took longer than {limit:.0f} s" if said.timed_out else last)


def _kept(contest: Contest, host: Host, sample: list[list[int]], setups: list[EngineSetup]) -> Path:
    """Return the folder of a race's files. A race leaves out what cannot win under its bound, so each bound has a
    file.

    The key has the quantiles of the lengths to an eighth of a power of two, and their number to a power of two: other
    texts of such lengths are the same race."""
    lengths = np.quantile([len(row) for row in sample], (0.1, 0.5, 0.9)) if sample else np.zeros(3)
    shape = [round(8 * float(np.log2(max(length, 1.0)))) for length in lengths] + [len(sample).bit_length()]
    labels = [setup.label() for setup in setups]
    weights = weights_identity(contest.source)
    said = (contest.to_json(), host.fingerprint, shape, labels, weights, installed_versions(LIBRARIES))
    key = hashlib.sha256(repr(said).encode()).hexdigest()[:16]
    return read_settings().cache_dir / "races" / f"{contest.source.model_hash}-{key}"
