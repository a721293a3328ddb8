"""Run a whole search: space, study, trials, results. ``upshift tune`` and ``upshift.tune`` call this module."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import optuna
from optuna.trial import FrozenTrial, TrialState
from pydantic import Field

from upshift.errors import RequestError
from upshift.hardware.spec import Host
from upshift.models.sequence_length import sequence_length_of
from upshift.models.source import find_model
from upshift.training.arguments import Arguments, PlanOptions, RunNumbers, TrainRequest
from upshift.training.loop.events import Event
from upshift.tuning.backends import distributions, draw
from upshift.tuning.jobs import STEPS, Jobs, claim, owner_of, remove
from upshift.tuning.mup_check import Growth, checked, copy_to_search
from upshift.tuning.objectives import Direction, Objective, find_objectives, values_of
from upshift.tuning.space import Choices, Space, make_space, read_space
from upshift.tuning.storage import in_folder, shown, start_from
from upshift.tuning.study import EVALUATIONS, Asked, open_study, reason_of, run_study, rungs
from upshift.value import Value

NARROW = "narrow"  # the copy that muP searches on, in the output folder
SECONDS_AN_HOUR = 3600.0


class Row(Value):
    """One trial."""

    number: int
    state: str = Field(description="complete, pruned, fail, running or waiting")
    values: dict[str, float] | None = Field(description="by objective; None where it did not come to its end")
    parameters: dict[str, Any]
    seconds: float | None
    steps: int = Field(description="optimizer steps that it did")
    reason: str = Field(description="why it has no values")


class Found(Value):
    """The results of a study so far."""

    study: str
    storage: str
    objectives: dict[str, Direction] = Field(description="direction by name")
    best: tuple[Row, ...] = Field(description="the best trial; of several objectives all that no other beats in each")
    trials: tuple[Row, ...]
    seconds: float = Field(description="of this call")
    price_per_hour: float | None = Field(None, description="of the machine; this call cost it for its seconds")
    checkpoint: str | None = Field(None, description="of the first of the best")
    mup_base: str | None = Field(None, description="the narrow copy that was searched, for the training of the whole model")
    mup_check: Growth | None = Field(None, description="whether muP carries what was found to the whole model's width")

    @property
    def cost(self) -> float | None:
        """Return the cost of this call, in the price's currency."""
        return None if self.price_per_hour is None else self.price_per_hour * self.seconds / SECONDS_AN_HOUR


@dataclass(frozen=True)
class Progress:
    """Callbacks that show progress."""

    step: Callable[[int, Event], None] = lambda number, event: None
    ended: Callable[[Row], None] = lambda row: None


def tune(
    model: str,
    data: str,
    *,
    space: Path | str | dict[str, Any],
    output: Path | str,
    trials: int = 20,
    objective: Sequence[str] = ("eval_loss",),
    pruner: str = "halving",
    evaluations: int = EVALUATIONS,
    jobs: int = 1,
    max_hours: float | None = None,
    max_cost: float | None = None,
    price_per_hour: float | None = None,
    storage: str | None = None,
    study_name: str = "upshift",
    warm_start: Sequence[str] = (),
    mup_width: int | None = None,
    host: Host | None = None,
    seed: int = 42,
    arguments: dict[str, Any] | None = None,
    progress: Progress | None = None,
    **options: Unpack[PlanOptions],
) -> Found:
    """Search ``space`` for the best training of ``model`` on ``data``.

    ``arguments``: fields of ``Arguments`` that all trials share; ``options``: of ``TrainRequest``; ``host``: what trials may
    take, by default this machine; ``warm_start``: folders or databases of earlier searches, whose best values go first;
    ``mup_width``: search on a copy of the model of this hidden_size, for ``mup_base`` of the model's own training. An existing
    study goes on: ``trials`` counts those of all its calls. Raise RequestError for wrong arguments, JobFailed if no trial came
    to its end."""
    began = time.monotonic()
    progress = progress or Progress()
    output = Path(output)
    wanted = make_space(space) if isinstance(space, dict) else read_space(Path(space))
    objectives = find_objectives(tuple(objective))
    shared = {name: value for name, value in (arguments or {}).items() if value is not None}
    _check_at_once(jobs, options.get("fixed", ()))
    request = _request(model, data, dict(options), shared, seed)
    seconds = _seconds(max_hours, max_cost, price_per_hour)
    _check_lengths(model, wanted, request.sequence_length)
    owner = owner_of(output, storage=storage, study_name=study_name)
    whole = model
    model = model if mup_width is None else str(copy_to_search(request, mup_width, output / NARROW))
    study = open_study(
        name=study_name, storage=storage, folder=output, directions=[one.direction for one in objectives], pruner=pruner,
        evaluations=evaluations, seed=seed,
        identity=_identity(dict(options), objectives, model=model, data=data, space=wanted.model_dump(), arguments=shared),
    )  # fmt: skip
    claim(output, owner, study)
    check = None if whole == model else checked(study, model, whole)
    start_from(study, warm_start, distributions(wanted))
    deciding = rungs(study.pruner, evaluations) if len(objectives) == 1 else ()  # of several objectives none ends a trial
    runs = Jobs(request.changed(model=model), output, shared, evaluations, deciding, jobs, host, progress.step)
    run = partial(_run, runs, wanted, objectives)
    ended = partial(_ended, study, runs, objectives, progress)
    with runs:
        run_study(study, run, trials=trials, jobs=jobs, seconds=seconds, on_end=ended)
    found = found_in(study, objectives, seconds=time.monotonic() - began, runs=runs, storage=storage)
    return found.changed(price_per_hour=price_per_hour, mup_base=None if check is None else model, mup_check=check)


def _run(runs: Jobs, space: Space, objectives: tuple[Objective, ...], asked: Asked) -> Sequence[float]:
    return values_of(runs.run(asked, draw(asked.trial, space)), objectives)


def _ended(study: optuna.Study, runs: Jobs, objectives: tuple[Objective, ...], progress: Progress, trial: FrozenTrial) -> None:
    _keep_best(study, trial, runs)
    progress.ended(row_of(trial, objectives))


def _identity(options: dict[str, Any], objectives: tuple[Objective, ...], **what: Any) -> dict[str, Any]:
    """Return the settings that trials share. ``trial_seconds`` is left out: plans may be tried for another time."""
    shared = {name: value for name, value in options.items() if name != "trial_seconds"}
    return {**what, "request": shared, "objectives": [one.name for one in objectives]}


def _request(model: str, data: str, options: dict[str, Any], shared: dict[str, Any], seed: int) -> TrainRequest:
    """Return the request that all trials share. Raise RequestError for what would be each trial's failure.

    ``shared``: the arguments that all trials share."""
    Arguments.from_fields({"max_steps": 1, "seed": seed})
    request = TrainRequest.of({**options, "model": model, "data": data}, shared)
    RunNumbers.from_fields({name: options[name] for name in RunNumbers.model_fields if name in options})
    return request


def _check_lengths(model: str, space: Space, given: int | None) -> None:
    """Raise RequestError for a sequence length of the space, or of all trials, that the model has no positions for."""
    source = find_model(model)
    searched = space.parameters.get("sequence_length")
    values = () if searched is None else searched.choices if isinstance(searched, Choices) else (searched.high,)
    for value in (given, *(int(value) for value in values)):
        sequence_length_of(source, value)


def found_in(study: optuna.Study, objectives: tuple[Objective, ...], *, seconds: float, runs: Jobs, storage: str | None) -> Found:
    rows = {trial.number: row_of(trial, objectives) for trial in study.get_trials(deepcopy=False)}
    best = [rows[trial.number] for trial in study.best_trials]
    return Found(
        study=study.study_name,
        storage=shown(storage or in_folder(runs.output)),
        objectives={one.name: one.direction for one in objectives},
        best=tuple(best),
        trials=tuple(rows.values()),
        seconds=seconds,
        checkpoint=str(runs.folder(best[0].number)) if runs.folder(best[0].number).is_dir() else None,
    )


def row_of(trial: FrozenTrial, objectives: tuple[Objective, ...]) -> Row:
    complete = trial.state is TrialState.COMPLETE
    return Row(
        number=trial.number,
        state=trial.state.name.lower(),
        values=dict(zip((one.name for one in objectives), trial.values, strict=True)) if complete else None,
        parameters=trial.params,
        seconds=trial.duration.total_seconds() if trial.duration else None,
        steps=trial.user_attrs.get(STEPS, 0),
        reason=reason_of(trial),
    )


def _keep_best(study: optuna.Study, ended: FrozenTrial, runs: Jobs) -> None:
    """Remove the trials' models except those of the best trials. The study keeps all numbers."""
    done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    best = {trial.number for trial in study.best_trials} if done else set()
    for number in {trial.number for trial in done} | {ended.number}:
        if number not in best:
            remove(runs.folder(number))


def _check_at_once(jobs: int, fixed: tuple[str, ...]) -> None:
    ranks = [text for text in fixed if text.startswith("num_processes=")]
    if jobs > 1 and ranks and ranks[0] != "num_processes=1":
        raise RequestError(f"--jobs {jobs} beside {ranks[0]}: a trial of several ranks takes all cores; use --jobs 1")


def _seconds(max_hours: float | None, max_cost: float | None, price_per_hour: float | None) -> float | None:
    """Return the budget in seconds, from money or hours or both; None: no limit."""
    for name, value in (("max-hours", max_hours), ("max-cost", max_cost), ("price-per-hour", price_per_hour)):
        if value is not None and not 0 <= value < math.inf:
            raise RequestError(f"--{name} {value} is not possible; give 0 or more, such as 2.5")
    if max_cost is not None and price_per_hour is None:
        raise RequestError("--max-cost needs the machine's price: add --price-per-hour, or give --max-hours")
    hours = [max_hours, max_cost / price_per_hour if max_cost is not None and price_per_hour else None]
    known = [one for one in hours if one is not None]
    return min(known) * SECONDS_AN_HOUR if known else None
