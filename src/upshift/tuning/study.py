"""Run a study of Optuna in a storage that outlives this process and that several processes may share.

Optuna's TPE proposes the values of a trial, and a pruner ends trials early. The sampler's random numbers come from the seed and
the trial's number, so that processes that share a study, and a study that goes on, do not draw the same points twice. A trial
is evaluated only where its pruner decides, because each evaluation costs a pass over held-out data. A failed trial is a row
with its reason, and a study goes on after SIGKILL.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.samplers import BaseSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from upshift.errors import JobFailed, NothingFits, RequestError, UpshiftError
from upshift.internals.optuna_names import HEARTBEAT, MAX_RESOURCE, MIN_RESOURCE, REDUCTION, STOPPING_RATE, STUDY_STORAGE
from upshift.tuning.objectives import Direction
from upshift.tuning.storage import WARMED, ignore_experimental_warnings, open_storage


class SamplerByTrialNumber(BaseSampler):
    """Optuna's TPE with a sampler for each running trial, seeded by the study's seed and the trial's number."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._of_running: dict[int, TPESampler] = {}

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self._of(trial).infer_relative_search_space(study, trial)

    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]) -> dict[str, Any]:
        return self._of(trial).sample_relative(study, trial, search_space)

    def sample_independent(self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution) -> Any:
        return self._of(trial).sample_independent(study, trial, param_name, param_distribution)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        self._of(trial).after_trial(study, trial, state, values)
        del self._of_running[trial.number]

    def _of(self, trial: FrozenTrial) -> TPESampler:
        if trial.number not in self._of_running:
            seed = int(np.random.SeedSequence([self._seed, trial.number]).generate_state(1)[0])
            self._of_running[trial.number] = TPESampler(seed=seed, constant_liar=True)  # for trials at the same time
        return self._of_running[trial.number]


EVALUATIONS = 9
FACTOR = 3
PRUNERS: dict[str, Callable[[int], BasePruner]] = {  # each takes the number of evaluations of a trial
    "halving": lambda evaluations: SuccessiveHalvingPruner(min_resource=1, reduction_factor=FACTOR),
    "hyperband": lambda evaluations: HyperbandPruner(min_resource=1, max_resource=evaluations, reduction_factor=FACTOR),
    "median": lambda evaluations: MedianPruner(n_startup_trials=4),
    "none": lambda evaluations: NopPruner(),
}


def make_pruner(name: str, evaluations: int) -> BasePruner:
    if name not in PRUNERS:
        raise RequestError(f"pruner {name!r} is not one of {', '.join(PRUNERS)}")
    return PRUNERS[name](evaluations)


def decision_steps(pruner: BasePruner, last_step: int) -> tuple[int, ...]:
    """Return the steps, up to ``longest``, at which the pruner decides: at the first report from each of them on.

    These are the rungs of successive halving. Return all steps for a pruner whose rungs are not fixed beforehand."""
    if type(pruner) is NopPruner:
        return ()
    step: int | None = None
    if (
        type(pruner) is SuccessiveHalvingPruner and MIN_RESOURCE.of(pruner) is not None
    ):  # None: Optuna computes it from ended trials
        step = MIN_RESOURCE.of(pruner) * REDUCTION.of(pruner) ** STOPPING_RATE.of(pruner)
    if type(pruner) is HyperbandPruner and isinstance(MAX_RESOURCE.of(pruner), int):
        step = MIN_RESOURCE.of(pruner)  # of the bracket that starts earliest
    if step is None:
        return tuple(range(1, last_step + 1))
    steps = []
    while step <= last_step:
        steps.append(step)
        step *= REDUCTION.of(pruner)  # both have it
    return tuple(steps)


def crosses_decision_step(steps: tuple[int, ...], *, previous_step: int, step: int) -> bool:
    """Return whether a report at ``step``, after one at ``before``, is the first from a decision step on."""
    return any(previous_step < decision_step <= step for decision_step in steps)


REASON = "reason"
IDENTITY = "identity"
MUP_CHECK = "mup"  # attribute of a study: the result of the check of muP
OWN_ATTRIBUTES = frozenset({IDENTITY, MUP_CHECK, WARMED})  # of a study
POLL_SECONDS = 0.5  # while other processes run the last trials
Report = Callable[[float, int], None]  # takes a value and its evaluation's number; raises TrialPruned to end the trial


class StudyTrial(NamedTuple):
    """A trial to run."""

    number: int
    trial: Any  # Optuna's
    report: Report


RunTrial = Callable[[StudyTrial], Sequence[float]]  # raises NothingFits if no plan fits, JobFailed if the run fails


def open_study(
    *,
    name: str,
    storage: str | None,
    folder: Path,
    directions: Sequence[Direction],
    pruner: str,
    seed: int,
    identity: dict[str, Any],
    evaluations: int = EVALUATIONS,
    forget: Callable[[int], None] = lambda number: None,
) -> optuna.Study:
    """Return the study of that name, and create it if there is none.

    A study with other settings is replaced if nothing is lost with it: its command was wrong, and the command was corrected.

    ``storage``: a database URL (SQLite, PostgreSQL, MySQL), or the path of a journal; None: SQLite in the folder.
    ``identity``: settings that all trials share. ``forget`` is called with the number of each trial of a replaced study. Raise
    RequestError for a study with other settings that is kept."""
    study_pruner = make_pruner(pruner, evaluations)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    opened = open_storage(storage, folder)
    with ignore_experimental_warnings():

        def create() -> optuna.Study:
            return optuna.create_study(
                study_name=name,
                storage=opened,
                directions=list(directions),
                load_if_exists=True,
                sampler=SamplerByTrialNumber(seed),
                pruner=study_pruner,
            )

        study = create()
        if has_other_identity(study, identity) and may_replace(study):
            for trial in study.get_trials(deepcopy=False):
                forget(trial.number)
            optuna.delete_study(study_name=name, storage=opened)
            study = create()
    check_identity(study, identity, alternative="another --output")
    return study


def has_other_identity(study: optuna.Study, identity: dict[str, Any]) -> bool:
    """Return whether the study was made with other settings."""
    stored = study.user_attrs.get(IDENTITY)
    return stored is not None and stored != _as_stored(identity)


def may_replace(study: optuna.Study) -> bool:
    """Return whether an earlier command made the study, and nothing is lost with it.

    Lost would be a trial that has been evaluated, or runs now and may be, and what a user put into the study: attributes, and
    trials that wait."""
    if IDENTITY not in study.user_attrs or study.user_attrs.keys() - OWN_ATTRIBUTES:
        return False
    if HEARTBEAT.get()(STUDY_STORAGE.of(study)):
        optuna.storages.fail_stale_trials(study)
    return not any(_is_of_value(trial) for trial in study.get_trials(deepcopy=False))


def _is_of_value(trial: FrozenTrial) -> bool:
    if trial.state is TrialState.WAITING:
        return WARMED not in trial.user_attrs
    return trial.state in (TrialState.COMPLETE, TrialState.RUNNING) or bool(trial.intermediate_values)


def _as_stored(identity: dict[str, Any]) -> Any:
    return json.loads(json.dumps(identity, default=str))


def check_identity(study: optuna.Study, identity: dict[str, Any], *, alternative: str) -> None:
    """Raise RequestError if a study's earlier trials had another identity, so that values cannot be compared.

    ``alternative``: the option that gives another study, for the message."""
    current = _as_stored(identity)
    stored = study.user_attrs.get(IDENTITY)
    if stored is None:
        study.set_user_attr(IDENTITY, current)
    elif stored != current:
        path, stored_value, value = _first_difference(stored, current)
        raise RequestError(
            f"the study {study.study_name!r} has {' '.join(path)} {stored_value!r}, not {value!r}; use the same, or {alternative}"
        )


def _first_difference(stored: Any, current: Any) -> tuple[tuple[str, ...], Any, Any]:
    """Return the names down to the first entry in which two JSON documents differ, and its values. A missing one is None."""
    if not isinstance(stored, dict) or not isinstance(current, dict):
        return (), stored, current
    name = next(name for name in (*current, *stored) if stored.get(name) != current.get(name))
    path, stored_value, value = _first_difference(stored.get(name), current.get(name))
    return (name, *path), stored_value, value


def run_study(
    study: optuna.Study,
    run_trial: RunTrial,
    *,
    trials: int,
    jobs: int = 1,
    seconds: float | None = None,
    catch: tuple[type[Exception], ...] = (),
    on_end: Callable[[optuna.trial.FrozenTrial], None] = lambda trial: None,
) -> None:
    """Run trials until the study has ``trials`` of them, those of other processes included, or until the time is over.

    Raise JobFailed if no trial of the study has a result."""

    def objective(trial: optuna.Trial) -> Sequence[float]:
        return _run_and_report(study, trial, run_trial, catch)

    ended_trials: list[int] = []

    def on_trial_end(_: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        ended_trials.append(trial.number)
        on_end(trial)
        if count_finished(study) + num_running(study) >= trials:
            study.stop()

    deadline = math.inf if seconds is None else time.monotonic() + seconds
    caught: tuple[type[Exception], ...] = (JobFailed, RequestError, *catch)
    while (num_missing := trials - count_finished(study)) > 0 and (now := time.monotonic()) < deadline:
        num_to_start = num_missing - num_running(study)  # only other processes run trials now
        if num_to_start <= 0:
            time.sleep(POLL_SECONDS)
            optuna.storages.fail_stale_trials(study)
            continue
        ended_trials.clear()
        remaining_seconds = None if seconds is None else deadline - now
        study.optimize(
            objective, n_trials=num_to_start, timeout=remaining_seconds, n_jobs=jobs, catch=caught, callbacks=[on_trial_end]
        )
        if len(ended_trials) < num_to_start and count_finished(study) + num_running(study) < trials:
            break  # the sampler has no more points
    if not study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        reasons = [reason_of(trial) for trial in study.get_trials(deepcopy=False)]
        raise JobFailed(
            f"no trial came to its end: {next((reason for reason in reasons if reason), 'none was run in the time given')}"
        )


def count_finished(study: optuna.Study) -> int:
    """Return the number of finished trials, without those whose process was killed: they run again."""
    return sum(trial.state.is_finished() and not was_killed(trial) for trial in study.get_trials(deepcopy=False))


def num_running(study: optuna.Study) -> int:
    """Return the number of running trials of all processes, or 0 for a storage without heartbeats (a journal).

    Without heartbeats, dead trials look like running ones, and waiting for them would never end."""
    if not HEARTBEAT.get()(STUDY_STORAGE.of(study)):
        return 0
    return len(study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)))


def was_killed(trial: optuna.trial.FrozenTrial) -> bool:
    """Return whether a trial was killed with its process: a failed trial without a reason."""
    return trial.state is TrialState.FAIL and REASON not in trial.user_attrs


def _run_and_report(
    study: optuna.Study, trial: optuna.Trial, run_trial: RunTrial, catch: tuple[type[Exception], ...]
) -> Sequence[float]:
    has_one_objective = len(study.directions) == 1
    expected: tuple[type[Exception], ...] = (UpshiftError, *catch)

    def report(value: float, number: int) -> None:
        if has_one_objective:  # with several objectives Optuna prunes no trial
            trial.report(value, number)
            if trial.should_prune():
                trial.set_user_attr(REASON, f"ended after evaluation {number}, at {value:.4g}")
                raise optuna.TrialPruned

    try:
        return _check_values(run_trial(StudyTrial(trial.number, trial, report)), len(study.directions))
    except NothingFits as error:
        trial.set_user_attr(REASON, f"not started: {error}")
        raise optuna.TrialPruned from None
    except optuna.TrialPruned:
        raise
    except expected as error:
        trial.set_user_attr(REASON, str(error) or type(error).__name__)
        raise


def _check_values(values: Sequence[float], num_expected: int) -> Sequence[float]:
    """Return the values. Raise JobFailed if their number is wrong or one is not a number.

    Optuna would let such a trial fail without a reason, so that it would look like a killed one."""
    if len(values) != num_expected:
        raise JobFailed(f"its objective gave {len(values)} values, and the study has {num_expected} directions")
    if any(math.isnan(value) for value in values):
        raise JobFailed("its objective is not a number (NaN)")
    return values


def reason_of(trial: optuna.trial.FrozenTrial) -> str:
    """Return the reason why a trial has no result, or an empty text if it has one."""
    if trial.state is TrialState.COMPLETE:
        return ""
    if was_killed(trial):
        return "its process was killed; run again"
    return str(trial.user_attrs.get(REASON, "ended early" if trial.state is TrialState.PRUNED else ""))
