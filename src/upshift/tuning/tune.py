"""Search hyper-parameters (``upshift tune`` and ``upshift.tune``): check the request, run the study, return its results."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack

import optuna
from optuna.trial import FrozenTrial, TrialState
from pydantic import Field

from upshift.errors import RequestError
from upshift.hardware.spec import Host
from upshift.models.adapter import check_module_names
from upshift.models.sequence_length import sequence_length_of
from upshift.models.source import find_model
from upshift.training.arguments import Arguments, PlanOptions, RunNumbers, TrainRequest
from upshift.training.data.corpus import check_paths
from upshift.training.loop.events import Event
from upshift.tuning.backends import draw_values, optuna_distributions
from upshift.tuning.jobs import STEPS, FolderOwner, TrialRunner, claim_folder, own_folder, remove_trial, trial_folder
from upshift.tuning.mup_check import Growth, check_transfer, write_search_model
from upshift.tuning.objectives import Direction, Objective, find_objectives, read_values
from upshift.tuning.space import NOT_OF_TRIALS, RUN_FIELDS, Choices, Space, make_space, read_space
from upshift.tuning.storage import database_url, enqueue_warm_start, folder_url, hide_password
from upshift.tuning.study import EVALUATIONS, StudyTrial, decision_steps, open_study, reason_of, run_study
from upshift.value import Value

NARROW = "narrow"  # folder in the output folder, of the narrow copy that muP searches on
SECONDS_AN_HOUR = 3600.0


class TrialRow(Value):
    """A trial and its results."""

    number: int
    state: str = Field(description="complete, pruned, fail, running or waiting")
    values: dict[str, float] | None = Field(description="by objective; None where it did not come to its end")
    parameters: dict[str, Any]
    seconds: float | None
    steps: int = Field(description="optimizer steps that it did")
    reason: str = Field(description="why it has no values")


class TuneResult(Value):
    """The results of a study so far."""

    study: str
    storage: str
    objectives: dict[str, Direction] = Field(description="direction by name")
    best: tuple[TrialRow, ...] = Field(description="the best trial; of several objectives all that no other beats in each")
    trials: tuple[TrialRow, ...]
    fixed_parameters: dict[str, Any] = Field({}, description="of all trials: those of which the space has a single value")
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
    ended: Callable[[TrialRow], None] = lambda row: None


class SearchOptions(TypedDict, total=False):
    """Options of ``tune`` about the search. The fields of ``TuneRequest`` with these names explain them."""

    trials: int
    objective: Sequence[str]
    pruner: str
    evaluations: int
    jobs: int
    max_hours: float | None
    max_cost: float | None
    price_per_hour: float | None
    storage: str | None
    study_name: str
    warm_start: Sequence[str]
    mup_width: int | None
    host: Host | None
    seed: int


class TuneOptions(SearchOptions, PlanOptions, total=False):
    """Options of ``tune``: about the search, and about the training of every trial."""


@dataclass(frozen=True, kw_only=True)
class TuneRequest:
    """A search as the user requests it."""

    model: str
    data: str
    space: Space
    output: Path
    trials: int = 20  # the trials of all calls for this study
    objectives: tuple[Objective, ...]
    pruner: str = "halving"
    evaluations: int = EVALUATIONS  # evaluations in a trial; the pruner may end it at each
    jobs: int = 1  # trials that run at the same time
    max_hours: float | None = None
    max_cost: float | None = None  # in the currency of ``price_per_hour``
    price_per_hour: float | None = None  # the price of the machine
    storage: str | None = None  # a database URL or the path of a journal; None: SQLite in the output folder
    study_name: str = "upshift"
    warm_start: tuple[str, ...] = ()  # folders or databases of earlier searches, whose best values are tried first
    mup_width: int | None = None  # hidden_size of the copy to search on, which is ``mup_base`` of the whole model's training
    host: Host | None = None  # the machine that trials may use; None: this one
    seed: int = 42
    arguments: dict[str, Any]  # fields of ``Arguments`` that all trials share, without those that are None
    options: dict[str, Any]  # fields of ``TrainRequest``


def tune(
    model: str,
    data: str,
    *,
    space: Path | str | dict[str, Any],
    output: Path | str,
    arguments: dict[str, Any] | None = None,
    progress: Progress | None = None,
    **options: Unpack[TuneOptions],
) -> TuneResult:
    """Search ``space`` for the best training of ``model`` on ``data``.

    An existing study goes on: ``trials`` counts the trials of all its calls. Raise RequestError for wrong arguments, JobFailed
    if no trial completes.

    Args:
        model: a local Hugging Face directory, a config.json, or a hub id.
        data: the training data, as in ``train``.
        space: the hyper-parameters and their values, or a YAML file with them.
        output: the folder of the study and of the best models.
        arguments: fields of ``Arguments`` that all trials share.
        progress: callbacks that show progress.
        options: fields of ``TuneRequest`` and of ``TrainRequest``; ``objective`` has the names of the objectives.
    """
    training_options: dict[str, Any] = dict(options)
    search_options = {name: training_options.pop(name) for name in SearchOptions.__annotations__ if name in training_options}
    objective_names = tuple(search_options.pop("objective", ("eval_loss",)))
    if search_options.get("storage") is not None:
        search_options["storage"] = database_url(str(search_options["storage"]))
    search_options["warm_start"] = tuple(search_options.get("warm_start", ()))
    request = TuneRequest(
        model=model,
        data=data,
        space=make_space(space) if isinstance(space, dict) else read_space(Path(space)),
        output=Path(output),
        objectives=find_objectives(objective_names),
        arguments={name: value for name, value in (arguments or {}).items() if value is not None},
        options=training_options,
        **search_options,
    )
    return _search(request, progress or Progress())


def _search(request: TuneRequest, progress: Progress) -> TuneResult:
    """Check the request, and run its study in the folder that it owns."""
    start = time.monotonic()
    _check_jobs(request.jobs, request.options.get("fixed", ()))
    check_paths(request.data)  # before the study is made: it would keep the wrong path, and reject the right one
    training = _training_request(request)
    seconds = _budget_seconds(request)
    _check_lengths(request.model, request.space, training.sequence_length)
    with own_folder(request.output, storage=request.storage, study_name=request.study_name) as owner:
        return _run(request, training, owner, progress, start=start, seconds=seconds)


def _run(
    request: TuneRequest, training: TrainRequest, owner: FolderOwner, progress: Progress, *, start: float, seconds: float | None
) -> TuneResult:
    """Open the study, and run trials until it is complete or its budget is spent. ``start``: a time of the monotonic clock."""
    model = request.model
    if request.mup_width is not None:
        model = str(write_search_model(training, request.mup_width, request.output / NARROW))
    study = open_study(
        name=request.study_name,
        storage=request.storage,
        folder=request.output,
        directions=[objective.direction for objective in request.objectives],
        pruner=request.pruner,
        evaluations=request.evaluations,
        seed=request.seed,
        identity=_identity(request),
        forget=lambda number: remove_trial(trial_folder(request.output, number)),
    )
    claim_folder(request.output, owner, study)
    mup_check = None if model == request.model else check_transfer(study, model, request.model)
    enqueue_warm_start(study, request.warm_start, optuna_distributions(request.space))
    runner = TrialRunner(
        request=training.changed(model=model),
        output=request.output,
        arguments=request.arguments,
        evaluations=request.evaluations,
        deciding=_deciding_evaluations(request, study),
        at_once=request.jobs,
        host=request.host,
        on_step=progress.step,
    )

    def run_trial(trial: StudyTrial) -> Sequence[float]:
        return read_values(runner.run(trial, draw_values(trial.trial, request.space)), request.objectives)

    def on_end(trial: FrozenTrial) -> None:
        _remove_beaten_models(study, trial, runner)
        progress.ended(row_of(trial, request.objectives))

    with runner:
        run_study(study, run_trial, trials=request.trials, jobs=request.jobs, seconds=seconds, on_end=on_end)
    result = read_results(study, request, runner, seconds=time.monotonic() - start)
    return result.changed(
        price_per_hour=request.price_per_hour, mup_base=None if mup_check is None else model, mup_check=mup_check
    )


def _check_jobs(jobs: int, fixed: tuple[str, ...]) -> None:
    ranks = [assignment for assignment in fixed if assignment.startswith("num_processes=")]
    if jobs > 1 and ranks and ranks[0] != "num_processes=1":
        reason = "a trial of several ranks takes all cores"
        raise RequestError(f"--jobs {jobs} and {ranks[0]} exclude each other, because {reason}; use --jobs 1")


def _training_request(request: TuneRequest) -> TrainRequest:
    """Return the request that all trials share. Raise RequestError for arguments that would make every trial fail."""
    Arguments.from_fields({"max_steps": 1, "seed": request.seed})
    for name in NOT_OF_TRIALS:
        if name in request.arguments:
            raise RequestError(
                f"{name} is not for the trials of a search, which end and are judged as --pruner says; leave it out"
            )
    training = TrainRequest.of({**request.options, "model": request.model, "data": request.data}, request.arguments)
    _check_fixed_or_searched(request.space, training, request.arguments)
    adapted = training.changed(lora_rank=1) if "lora_rank" in request.space.parameters else training
    check_module_names(adapted.source(), adapted)
    RunNumbers.from_fields({name: request.options[name] for name in RunNumbers.model_fields if name in request.options})
    return training


def _check_fixed_or_searched(space: Space, training: TrainRequest, arguments: dict[str, Any]) -> None:
    """Raise RequestError for a value that would be ignored: one that is fixed and searched, or epochs beside max_steps.

    The seed of the search is that of the trials only if the space has none."""
    defaults = TrainRequest.model_fields
    fixed = {name: value for name in RUN_FIELDS if (value := getattr(training, name)) != defaults[name].default}
    fixed |= {name: value for name, value in arguments.items() if name != "seed"}
    for name, value in fixed.items():
        if name in space.parameters:
            raise RequestError(f"{name} is {value} for all trials, and the space has values for it; leave one of them out")
    if "epochs" in space.parameters and ("max_steps" in fixed or "max_steps" in space.parameters):
        raise RequestError("epochs of the space would have no effect, because max_steps replaces it; leave one of them out")


def _budget_seconds(request: TuneRequest) -> float | None:
    """Return the smaller of the budgets in time and in money, in seconds, or None without a budget."""
    max_cost = request.max_cost
    price_per_hour = request.price_per_hour
    for name, value in (("max-hours", request.max_hours), ("max-cost", max_cost), ("price-per-hour", price_per_hour)):
        if value is not None and not 0 <= value < math.inf:
            raise RequestError(f"--{name} {value} is not possible; give 0 or more, such as 2.5")
    if max_cost is not None and price_per_hour is None:
        raise RequestError("--max-cost needs the machine's price: add --price-per-hour, or give --max-hours")
    limits = [] if request.max_hours is None else [request.max_hours]
    if max_cost is not None and price_per_hour:
        limits.append(max_cost / price_per_hour)
    return min(limits) * SECONDS_AN_HOUR if limits else None


def _check_lengths(model: str, space: Space, sequence_length: int | None) -> None:
    """Raise RequestError for a sequence length of the request or of the space that the model has no positions for."""
    source = find_model(model)
    searched = space.parameters.get("sequence_length")
    lengths: list[Any] = []
    if isinstance(searched, Choices):
        lengths.extend(searched.choices)
    elif searched is not None:
        lengths.append(searched.high)
    for length in (sequence_length, *map(int, lengths)):
        sequence_length_of(source, length)


def _identity(request: TuneRequest) -> dict[str, Any]:
    """Return the settings that all trials of a study share. ``trial_seconds``, the time for testing plans, may differ.

    The config of the model is one of them, because another model may have come to its path. The pruner compares trials by the
    numbers of their evaluations, which mean other steps if a trial has another number of them."""
    options = {name: value for name, value in request.options.items() if name != "trial_seconds"}
    return {
        "model": request.model,
        "config": find_model(request.model).config_identity,
        "mup_width": request.mup_width,
        "data": request.data,
        "evaluations": request.evaluations,
        "space": request.space.model_dump(),
        "arguments": request.arguments,
        "request": options,
        "objectives": [objective.name for objective in request.objectives],
    }


def _deciding_evaluations(request: TuneRequest, study: optuna.Study) -> tuple[int, ...]:
    """Return the evaluations at which a trial may end early: none if there are several objectives."""
    return decision_steps(study.pruner, request.evaluations) if len(request.objectives) == 1 else ()


def _remove_beaten_models(study: optuna.Study, ended: FrozenTrial, runner: TrialRunner) -> None:
    """Remove the models of all trials but the best. The study keeps the numbers of all."""
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    best = {trial.number for trial in study.best_trials} if complete else set()
    for number in sorted({trial.number for trial in complete} | {ended.number}):
        if number not in best:
            remove_trial(runner.folder(number))


def read_results(study: optuna.Study, request: TuneRequest, runner: TrialRunner, *, seconds: float) -> TuneResult:
    """Return the results of all trials so far. ``seconds``: the time of this call."""
    rows = {trial.number: row_of(trial, request.objectives) for trial in study.get_trials(deepcopy=False)}
    best = [rows[trial.number] for trial in study.best_trials]
    checkpoint = runner.folder(best[0].number)
    return TuneResult(
        study=study.study_name,
        storage=hide_password(request.storage or folder_url(runner.output)),
        objectives={objective.name: objective.direction for objective in request.objectives},
        best=tuple(best),
        trials=tuple(rows.values()),
        fixed_parameters=request.space.fixed,
        seconds=seconds,
        checkpoint=str(checkpoint) if checkpoint.is_dir() else None,
    )


def row_of(trial: FrozenTrial, objectives: tuple[Objective, ...]) -> TrialRow:
    values = None
    if trial.state is TrialState.COMPLETE:
        values = dict(zip((objective.name for objective in objectives), trial.values, strict=True))
    return TrialRow(
        number=trial.number,
        state=trial.state.name.lower(),
        values=values,
        parameters=trial.params,
        seconds=trial.duration.total_seconds() if trial.duration else None,
        steps=trial.user_attrs.get(STEPS, 0),
        reason=reason_of(trial),
    )
