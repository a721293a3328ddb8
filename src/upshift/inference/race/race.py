"""Find the setup that runs the user's own texts fastest within the user's quality bound. Each engine runs in a
process of its own.

The reference is transformers in fp32. Quality is measured on the user's texts: the largest difference of any number,
and the cosine to the reference's vector (of a text, or of the logits of a token) that agrees least."""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path

import numpy as np
from pydantic import Field

from upshift.disk_full import keep
from upshift.errors import JobFailed, NothingFits, RequestError
from upshift.fork_server import ForkServer, fork_server
from upshift.hardware.spec import Host
from upshift.inference.race.forecast import Forecast
from upshift.inference.race.policy import FEW, RacePolicy, pays, run_final
from upshift.inference.race.types import Contest, Entrants, LeftOut, Run, Runs
from upshift.inference.registry import ENGINES, PACKAGES, EngineName, EngineSetup, contestants, is_installed
from upshift.inference.weights import check_room, reference_precision, stored_for, weights_identity
from upshift.settings import read_settings
from upshift.value import Value
from upshift.versions import installed_versions

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
    policy: RacePolicy,
    *,
    forecast: Callable[[], Forecast],
    no_room: Callable[[], Race] | None = None,
    on_run: Callable[[Run], None] = lambda run: None,
) -> Race:
    """Run a race, or recall its result by contest, weights, hardware, versions and lengths.

    Args:
        contest: the model and the work.
        host: the machine.
        sample: token ids of some of the texts.
        policy: the bounds.
        forecast: returns the forecast of setups. It is called if a race needs it.
        no_room: called if no race is remembered and the reference does not fit.
        on_run: called after each run.
    """
    stored, batch = stored_for(contest.source), contest.batches[0]
    reference = reference_precision(contest.source, host)
    able = contestants(
        contest.task, contest.source, host, exact=policy.quality == "exact", batch=batch, hint=contest.hint, stored=stored,
        reference=reference,
    )  # fmt: skip
    setups = [setup for setup in able if is_installed(setup.engine)]
    asked = [setup for place, setup in enumerate(setups) if not place or policy.engine in (None, setup.engine)]
    kept = _kept(contest, host, sample, asked)
    found = _recalled(kept, policy)
    if found is not None:
        return found.changed(chosen=_choose(found, policy), recalled=True)
    if no_room is not None:
        return no_room()
    check_room(contest.source, host, reference)
    absent = [setup for setup in able if setup not in setups]
    if not policy.is_limited and (alone := _alone(asked, absent, contest.batches[-1], forecast, policy)):
        return alone
    file = kept / f"{policy.quality}.json"
    run_all = _run_all(contest, policy, sample, asked, absent, forecast, on_run).changed(file=file)
    keep("the race's result is", file, run_all.to_json())
    return run_all.changed(chosen=_choose(run_all, policy))


def _alone(
    asked: list[EngineSetup],
    absent: list[EngineSetup],
    batch: int,
    forecast: Callable[[], Forecast],
    policy: RacePolicy,
) -> Race | None:
    """Return the reference if no other setup can race with it, or only one that compiles and does not pay."""
    named = policy.engine is not None
    if len([setup for setup in asked if named or not ENGINES[setup.engine].uncompiled]) > 1:
        return None
    unknown = dict.fromkeys(setup.engine for setup in absent)
    alone = Race(runs=(), chosen=asked[0].changed(batch=batch), file=None, expected=unknown)
    if len(asked) == 1 or policy.amount < FEW:
        return alone
    best, *rates = map(forecast(), asked)
    if any(pays(rate, best, policy.amount) for rate in rates):
        return None
    out = (LeftOut(setup=setup, reason="compiling", rate=rate) for setup, rate in zip(asked[1:], rates, strict=True))
    return alone.changed(left_out=tuple(out))


def _recalled(kept: Path, policy: RacePolicy) -> Race | None:
    """Return the same race under this bound, or under another bound if nothing that was left out could win under this
    one."""
    for file in (kept / f"{policy.quality}.json", *sorted(kept.glob("*.json"))):
        race = Race.from_file(file) if file.is_file() else None
        if race and policy.is_settled(race.runs, race.left_out, race.allowed):
            return race
    return None


def _run_all(
    contest: Contest, policy: RacePolicy, sample: list[list[int]], asked: list[EngineSetup], absent: list[EngineSetup],
    forecast: Callable[[], Forecast], on_run: Callable[[Run], None],
) -> Race:  # fmt: skip
    """Run all contestants.

    ``absent``: setups of engines that are not installed. The engine that computes nothing runs beside the reference."""
    start = time.perf_counter()
    runs, left_out, ceiling = list[Run](), list[LeftOut](), 0.0
    says = forecast()
    with tempfile.TemporaryDirectory(prefix="upshift-race-") as name, fork_server(f"{PACKAGES[contest.task]}.contest") as server:
        says(asked[0])  # the model is traced while the engines' process imports
        entrants = Entrants(
            contest=contest, setups=(), sample=Path(name) / "sample.json", reference=Path(name) / "reference.npy",
            quality=policy.quality, limited=policy.is_limited,
        )  # fmt: skip
        entrants.sample.write_text(json.dumps(sample))
        for setups in (tuple(group) for _, group in groupby(asked, key=lambda setup: (setup == asked[0], setup.engine))):
            chosen = policy.admit(setups, runs, says)
            left_out += chosen.left_out
            beside = () if runs else (asked[0].changed(engine="nothing", precision="fp32"),)
            left = policy.budget(runs) - (time.perf_counter() - start)
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
        left = policy.budget(runs) - (time.perf_counter() - start)
        again = run_final(policy.run_again(runs), entrants, partial(runs_of, server), seconds=left)
        final = {run.setup: run for run in again}
        for run in final.values():
            on_run(run)
        runs = [final.get(run.setup, run) for run in runs]
    expected = dict[EngineName, float | None]()
    for setup in absent:
        expected[setup.engine] = max(says(setup) or 0.0, expected.get(setup.engine) or 0.0) or None
    return Race(
        runs=tuple(runs), chosen=runs[0].setup, file=None, final=tuple(final), expected=expected,
        left_out=tuple(left_out), ceiling=ceiling or None, seconds=time.perf_counter() - start, allowed=policy.budget(runs),
    )  # fmt: skip


def _choose(race: Race, policy: RacePolicy) -> EngineSetup:
    """Return the fastest setup within all bounds. Raise RequestError with the result of each requested one, or
    NothingFits with the one that came nearest to the limits."""
    quality, limits, engine = policy.quality, policy.limits, policy.engine
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
    return min(quick, key=lambda run: run.seconds_for(policy.amount)).setup


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
