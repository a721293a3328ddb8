"""Find the setup that runs the user's own texts fastest within the user's bounds. Each engine runs in a process of its
own.

The reference is transformers in fp32. Quality is measured on the user's texts: the largest difference of any number, and
the lowest cosine to the reference's vectors (of a text, or of the logits of a token)."""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from upshift.disk_full import write_cache_file
from upshift.errors import JobFailed, NothingFits, RequestError
from upshift.fork_server import ForkServer, fork_server
from upshift.hardware.spec import Host
from upshift.inference.computing_device import check_room, reference_precision
from upshift.inference.race.early_stopping import TEMPORARY_SIGNALS, is_temporary
from upshift.inference.race.forecast import Forecast
from upshift.inference.race.policy import MIN_AMOUNT, RacePolicy, pays_off, run_final
from upshift.inference.race.types import Contest, RaceRequest, RaceResult, Run, Skipped
from upshift.inference.registry import ENGINES, PACKAGES, EngineName, EngineSetup, contestants, is_available
from upshift.inference.weights import loading_engines, weights_identity
from upshift.settings import read_settings
from upshift.value import Value
from upshift.versions import installed_versions

LIBRARIES = (  # their versions are part of a race's key
    "torch",
    "transformers",
    "onnxruntime",
    "openvino",
    "nncf",
    "ctranslate2",
    "llama-cpp-python",
)
TIMEOUT_SECONDS = 300.0  # for one setup, with conversion and loading

logger = logging.getLogger(__name__)


class Race(Value):
    """The result of a race: all runs, in their order, and the chosen setup."""

    runs: tuple[Run, ...]
    chosen: EngineSetup
    file: Path | None  # the result on disk, for races with other bounds; None: nothing was raced
    recalled: bool = False
    expected: dict[EngineName, float | None] = Field(
        {}, description="forecast of the fastest setup of each engine that supports the model and is not installed"
    )
    divided: str | None = Field(None, description="why nothing was raced: the model is too large, and runs partly from the disk")
    final: tuple[EngineSetup, ...] = Field((), description="setups that ran again in the final; their runs have its rates")
    left_out: tuple[Skipped, ...] = Field((), description="setups that could not win, did not pay off, or came too late")
    seconds: float = Field(0.0, description="duration of the race")
    allowed: float = Field(0.0, description="time budget in seconds; the reference may take longer")
    ceiling: float | None = Field(None, description="texts or tokens per second if nothing is computed: no engine can do more")

    def best(self) -> list[Run]:
        """Return one run of each setup that did not fail, the fastest first: the chosen batch, or the batch of the final,
        or the fastest batch."""
        preferred = (self.chosen, *self.final)

        def preference(run: Run) -> tuple[bool, bool, float]:
            return run.setup not in preferred, run.setup != self.chosen, -(run.per_second or 0.0)

        best_by_label: dict[str, Run] = {}
        for run in sorted((run for run in self.runs if not run.failure), key=preference):
            best_by_label.setdefault(run.setup.label(), run)
        return sorted(best_by_label.values(), key=lambda run: -(run.per_second or 0.0))


def race(
    contest: Contest,
    host: Host,
    sample: Sequence[Sequence[Any]],
    policy: RacePolicy,
    *,
    forecast: Callable[[], Forecast],
    no_room: Callable[[], Race] | None = None,
    on_run: Callable[[Run], None] = lambda run: None,
) -> Race:
    """Run a race, or recall the result of the same race: contest, weights, hardware, versions and lengths.

    Args:
        contest: the model and the work.
        host: the machine.
        sample: token ids of some of the texts, or some of the images and sounds.
        policy: the bounds.
        forecast: returns the forecast of setups. It is called only if a race needs it.
        no_room: called instead of a race if no result is recalled and the reference does not fit into memory.
        on_run: called after each run.
    """
    reference = reference_precision(contest.source, host, contest.tensor_parallel)
    candidates = contestants(
        contest.task,
        contest.source,
        host,
        exact=policy.quality == "exact",
        batch=contest.batches[0],
        hint=contest.hint,
        stored=loading_engines(contest.source, contest.environment),
        reference=reference,
        environment=contest.environment,
        tensor_parallel=contest.tensor_parallel,
    )
    installed = [setup for setup in candidates if is_available(setup)]
    missing = [setup for setup in candidates if setup not in installed]
    requested = [setup for index, setup in enumerate(installed) if index == 0 or policy.engine in (None, setup.engine)]
    folder = _race_folder(contest, host, sample, requested)
    recalled = _recall(folder, policy)
    if recalled is not None:
        return recalled.changed(chosen=_choose(recalled, policy), recalled=True)
    if no_room is not None:
        return no_room()
    check_room(contest.source, host, reference, contest.tensor_parallel)
    if not policy.is_limited:
        unraced = _reference_alone(requested, missing, contest.batches[-1], forecast, policy)
        if unraced is not None:
            return unraced
    file = folder / f"{policy.quality}.json"
    result = _run_all(contest, policy, sample, requested, missing, forecast, on_run).changed(file=file)
    write_cache_file("the race's result is", file, result.to_json())
    return result.changed(chosen=_choose(result, policy))


def _reference_alone(
    requested: list[EngineSetup],
    missing: list[EngineSetup],
    batch: int,
    forecast: Callable[[], Forecast],
    policy: RacePolicy,
) -> Race | None:
    """Return the reference as the result if no other setup can race with it, or only one that compiles and does not pay
    off. Return None if there is a race."""
    is_requested = policy.engine is not None
    if len([setup for setup in requested if is_requested or not ENGINES[setup.engine].uncompiled]) > 1:
        return None
    expected = dict.fromkeys(setup.engine for setup in missing)
    result = Race(runs=(), chosen=requested[0].changed(batch=batch), file=None, expected=expected)
    if len(requested) == 1 or policy.amount < MIN_AMOUNT:
        return result
    reference_rate, *rates = map(forecast(), requested)
    if any(pays_off(rate, reference_rate, policy.amount) for rate in rates):
        return None
    skipped = [Skipped(setup=setup, reason="compiling", rate=rate) for setup, rate in zip(requested[1:], rates, strict=True)]
    return result.changed(left_out=tuple(skipped))


def _recall(folder: Path, policy: RacePolicy) -> Race | None:
    """Return the result of the same race under this quality, or under another one if nothing that it skipped could win
    under this one. Return None without such a result."""
    for file in (folder / f"{policy.quality}.json", *sorted(folder.glob("*.json"))):
        result = _read_race(file) if file.is_file() else None
        if result and policy.is_final(result.runs, result.left_out, result.allowed):
            return result
    return None


def _read_race(file: Path) -> Race | None:
    """Return the result in a file. If it cannot be read, log a warning, remove the file and return None."""
    try:
        return Race.from_file(file)
    except RequestError as error:  # another version wrote it, or it was cut short
        logger.warning("racing again: %s", error)
        with suppress(OSError):  # the folder may be read-only
            file.unlink()
        return None


def _run_all(
    contest: Contest,
    policy: RacePolicy,
    sample: Sequence[Sequence[Any]],
    requested: list[EngineSetup],
    missing: list[EngineSetup],
    make_forecast: Callable[[], Forecast],
    on_run: Callable[[Run], None],
) -> Race:
    """Run all requested setups, engine after engine, then the final.

    ``missing`` are setups of engines that are not installed: they get a forecast. The engine that computes nothing runs
    beside the reference, for the ceiling."""
    start = time.perf_counter()
    runs: list[Run] = []
    skipped: list[Skipped] = []
    ceiling = 0.0
    forecast = make_forecast()
    with (
        tempfile.TemporaryDirectory(prefix="upshift-race-") as name,
        fork_server(f"{PACKAGES[contest.task]}.raced_setup") as server,
    ):
        forecast(requested[0])  # trace the model while the engines' process imports
        request = _first_request(contest, policy, sample, Path(name))
        for _, group in groupby(requested, key=lambda setup: (setup == requested[0], setup.engine)):
            admission = policy.admit(tuple(group), runs, forecast)
            skipped += admission.skipped
            null_setups = () if runs else (requested[0].changed(engine="nothing", precision="fp32"),)
            setups = (*admission.setups, *null_setups)
            seconds_left = policy.time_budget(runs) - (time.perf_counter() - start)
            engine_request = request.changed(setups=setups, before=tuple(runs), seconds=seconds_left)
            for result in stream_runs(server, engine_request) if setups else ():
                if isinstance(result, Skipped):
                    skipped.append(result)
                elif result.setup.engine == "nothing":
                    ceiling = max(ceiling, result.per_second or 0.0)
                else:
                    runs.append(result if result.failure else result.changed(forecast_per_second=forecast(result.setup)))
                    on_run(runs[-1])
            if runs[0].failure:
                raise JobFailed(f"{contest.source.reference} does not run in transformers: {runs[0].failure}")
        seconds_left = policy.time_budget(runs) - (time.perf_counter() - start)
        final_runs = run_final(policy.select_finalists(runs), request, partial(stream_runs, server), seconds=seconds_left)
        final = {run.setup: run for run in final_runs}
        for run in final.values():
            on_run(run)
    runs = [final.get(run.setup, run) for run in runs]
    return Race(
        runs=tuple(runs),
        chosen=runs[0].setup,
        file=None,
        final=tuple(final),
        expected=_best_forecasts(missing, forecast),
        left_out=tuple(skipped),
        ceiling=ceiling or None,
        seconds=time.perf_counter() - start,
        allowed=policy.time_budget(runs),
    )


def _first_request(contest: Contest, policy: RacePolicy, sample: Sequence[Sequence[Any]], folder: Path) -> RaceRequest:
    """Write the sample to ``folder``, and return a request that names it and no setups yet."""
    request = RaceRequest(
        contest=contest,
        setups=(),
        sample=folder / "sample.json",
        reference=folder / "reference.npy",
        quality=policy.quality,
        limited=policy.is_limited,
    )
    request.sample.write_text(json.dumps(sample))
    return request


def _best_forecasts(setups: list[EngineSetup], forecast: Forecast) -> dict[EngineName, float | None]:
    """Return the highest forecast of each engine, or None for an engine without a forecast."""
    best: dict[EngineName, float | None] = {}
    for setup in setups:
        best[setup.engine] = max(forecast(setup) or 0.0, best.get(setup.engine) or 0.0) or None
    return best


def _choose(race: Race, policy: RacePolicy) -> EngineSetup:
    """Return the fastest setup within all bounds.

    Raise RequestError with the result of each requested setup if none has run, or none is within the quality. Raise NothingFits
    with the nearest setup if none keeps the limits."""
    requested = [run for run in race.runs if policy.engine in (None, run.setup.engine)]
    good = [run for run in requested if run.meets(policy.quality)]
    subject = "no setup" if policy.engine is None else f"no setup of --engine {policy.engine}"
    if not requested:
        raise RequestError(
            f"{subject} ran in the {race.allowed:.0f} s of the race; give it more time: --race-seconds {2 * race.allowed:.0f}"
        )
    if not good:
        results = "; ".join(f"{run.setup.precision} {run.failure or run.format_agreement()}" for run in requested)
        if all(run.failure for run in requested):
            place = "any engine" if policy.engine is None else f"--engine {policy.engine}"
            other = "" if policy.engine is None else "use another engine, or "
            raise RequestError(f"the model does not run in {place} here ({results}); {other}delete {race.file} to race again")
        raise RequestError(
            f"{subject} is within --quality {policy.quality} ({results}); allow less, or delete {race.file} to race again"
        )
    if not policy.limits:  # a finalist's other batches have the rates of the race, which are not comparable
        final_setups = {setup.label(): setup for setup in race.final}
        good = [run for run in good if final_setups.get(run.setup.label(), run.setup) == run.setup]
    quick = [run for run in good if run.limit_ratio(policy.limits) <= 1.0]
    if not quick:
        nearest = min(good, key=lambda run: run.limit_ratio(policy.limits))
        raise NothingFits(
            f"no setup within --quality {policy.quality} is as quick as asked; the nearest is {nearest.setup.label()} with a "
            f"batch of {nearest.setup.batch:,}: {nearest.format_times()}; allow more time or less quality, or delete "
            f"{race.file} to race again"
        )
    return min(quick, key=lambda run: run.seconds_for(policy.amount)).setup


def stream_runs(server: ForkServer, request: RaceRequest) -> Iterator[Run | Skipped]:
    """Yield the runs of each setup and batch as they come.

    If the process ends or takes too long, yield a failure for each setup that did not run. The end of the race's time is
    no failure."""
    waiting = list(request.setups)
    time_limit = TIMEOUT_SECONDS * len(waiting)
    if request.before:  # the reference runs to its end
        time_limit = min(time_limit, request.seconds)
    if time_limit <= 0.0:
        yield from (Skipped(setup=setup, reason="time") for setup in waiting)
        return
    for answer in server.ask(request, RaceResult, limit_seconds=time_limit):
        if isinstance(answer, RaceResult):
            waiting.pop(0)
            yield from answer.runs
            if answer.skipped is not None:
                yield answer.skipped
            continue
        for setup in waiting:
            if answer.timed_out and time_limit == request.seconds:
                yield Skipped(setup=setup, reason="time")
                continue
            failure = answer.last_words or f"its process ended with exit {answer.exit}, signal {answer.signal}"
            if answer.timed_out:
                failure = f"took longer than {time_limit:.0f} s"
            temporary = answer.timed_out or answer.signal in TEMPORARY_SIGNALS or is_temporary(failure)
            yield Run(setup=setup, failure=failure, temporary=temporary)


def _race_folder(contest: Contest, host: Host, sample: Sequence[Sequence[Any]], setups: list[EngineSetup]) -> Path:
    """Return the folder of the results of the same race. It has a file for each quality, because a race skips setups
    that cannot reach its quality.

    The key contains the quantiles of the lengths, rounded to an eighth of a power of two, and the number of texts, rounded
    to a power of two. Other texts with such lengths are the same race."""
    lengths = np.quantile([len(row) for row in sample], (0.1, 0.5, 0.9)) if sample else np.zeros(3)
    shape = [round(8 * float(np.log2(max(length, 1.0)))) for length in lengths] + [len(sample).bit_length()]
    labels = [setup.label() for setup in setups]
    weights = weights_identity(contest.source)
    identity = (contest.to_json(), host.fingerprint, shape, labels, weights, installed_versions(LIBRARIES))
    key = hashlib.sha256(repr(identity).encode()).hexdigest()[:16]
    return read_settings().cache_dir / "races" / f"{contest.source.model_hash}-{key}"
