"""Run a study: trials that Optuna proposes, kept in a storage that outlives this process and may be shared with others.

Optuna decides which values to try next, and which trials to end early. This module makes sure that no trial is started in
vain, that a failed trial is a row with its reason, and that a study goes on after SIGKILL.

Choose the next trial's values by Optuna's TPE, with random numbers from the seed and the trial's number.

So processes that share a study, and a study that goes on, do not draw the same points twice.

Find the evaluations of a trial at which its pruner decides anything.

The others are not made: each costs a pass over held-out data.
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
from upshift.tuning.storage import persistent, without_warnings


class ByNumber(BaseSampler):
    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._of_running: dict[int, TPESampler] = {}

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self._of(trial).infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:  # fmt: skip
        return self._of(trial).sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:  # fmt: skip
        return self._of(trial).sample_independent(study, trial, param_name, param_distribution)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        self._of(trial).after_trial(study, trial, state, values)
        del self._of_running[trial.number]

    def _of(self, trial: FrozenTrial) -> TPESampler:
        if trial.number not in self._of_running:
            seed = int(np.random.SeedSequence([self._seed, trial.number]).generate_state(1)[0])
            self._of_running[trial.number] = TPESampler(seed=seed, constant_liar=True)  # others may run beside it
        return self._of_running[trial.number]


EVALUATIONS = 9
FACTOR = 3
PRUNERS: dict[str, Callable[[int], BasePruner]] = {  # of the evaluations of a trial
    "halving": lambda evaluations: SuccessiveHalvingPruner(min_resource=1, reduction_factor=FACTOR),
    "hyperband": lambda evaluations: HyperbandPruner(min_resource=1, max_resource=evaluations, reduction_factor=FACTOR),
    "median": lambda evaluations: MedianPruner(n_startup_trials=4),
    "none": lambda evaluations: NopPruner(),
}


def make_pruner(name: str, evaluations: int) -> BasePruner:
    if name not in PRUNERS:
        raise RequestError(f"pruner {name!r} is not one of {', '.join(PRUNERS)}")
    return PRUNERS[name](evaluations)


def rungs(pruner: BasePruner, longest: int) -> tuple[int, ...]:
    """Return steps up to ``longest``: the pruner decides at the first report from each of them on, and at no other.

    Return all steps for a pruner whose rungs are not known beforehand."""
    if type(pruner) is NopPruner:
        return ()
    first: int | None = None
    if type(pruner) is SuccessiveHalvingPruner and MIN_RESOURCE.of(pruner) is not None:  # None: computed from ended trials
        first = MIN_RESOURCE.of(pruner) * REDUCTION.of(pruner) ** STOPPING_RATE.of(pruner)
    if type(pruner) is HyperbandPruner and isinstance(MAX_RESOURCE.of(pruner), int):
        first = MIN_RESOURCE.of(pruner)  # of the bracket that begins earliest
    if first is None:
        return tuple(range(1, longest + 1))
    found = []
    while first <= longest:
        found.append(first)
        first *= REDUCTION.of(pruner)  # both have it
    return tuple(found)


def decides(found: tuple[int, ...], *, before: int, step: int) -> bool:
    """Return whether a report at ``step``, the first since ``before``, reaches a rung."""
    return any(before < rung <= step for rung in found)


REASON = "reason"
IDENTITY = "identity"
POLL_SECONDS = 0.5  # for the last trials of other processes
Report = Callable[[float, int], None]  # takes a value and the number of its evaluation; ends a trial that is not good enough


class Asked(NamedTuple):
    """One trial to run."""

    number: int
    trial: Any  # Optuna's
    report: Report


RunTrial = Callable[[Asked], Sequence[float]]  # raises NothingFits where it would not fit, JobFailed where it failed


def open_study(
    *, name: str, storage: str | None, folder: Path, directions: Sequence[Direction], pruner: str, seed: int,
    identity: dict[str, Any], evaluations: int = EVALUATIONS,
) -> optuna.Study:  # fmt: skip
    """Return the study of that name, or make it.

    ``storage``: a URL that Optuna knows (SQLite, PostgreSQL, MySQL), or the path of a journal; None: SQLite in the folder.
    ``identity``: settings that all its trials share. A study with other settings is refused."""
    ends_early = make_pruner(pruner, evaluations)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with without_warnings():
        study = optuna.create_study(
            study_name=name, storage=persistent(storage, folder), directions=list(directions), load_if_exists=True,
            sampler=ByNumber(seed), pruner=ends_early,
        )  # fmt: skip
    check_identity(study, identity, other="another --output")
    return study


def check_identity(study: optuna.Study, identity: dict[str, Any], *, other: str) -> None:
    """Raise RequestError if a study's trials are of something else, so that their values cannot be compared."""
    written = json.loads(json.dumps(identity, default=str))
    known = study.user_attrs.get(IDENTITY)
    if known is None:
        study.set_user_attr(IDENTITY, written)
    elif known != written:
        key = next(key for key in written if known.get(key) != written[key])
        raise RequestError(
            f"the study {study.study_name!r} has {key} {known.get(key)!r}, not {written[key]!r}; use the same, or {other}"
        )


def run_study(
    study: optuna.Study, run_trial: RunTrial, *, trials: int, jobs: int = 1, seconds: float | None = None,
    catch: tuple[type[Exception], ...] = (),
    on_end: Callable[[optuna.trial.FrozenTrial], None] = lambda trial: None,
) -> None:  # fmt: skip
    """Run trials until the study has so many, or the time is up. Trials of earlier and of other processes count.

    Raise JobFailed if not one of them gave a result."""

    def objective(trial: optuna.Trial) -> Sequence[float]:
        return _judged(study, trial, run_trial, catch)

    ran: list[int] = []

    def ended(_: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        ran.append(trial.number)
        on_end(trial)
        if count(study) + num_running(study) >= trials:
            study.stop()

    until = math.inf if seconds is None else time.monotonic() + seconds
    known: tuple[type[Exception], ...] = (JobFailed, RequestError, *catch)
    while (left := trials - count(study)) > 0 and (now := time.monotonic()) < until:
        wanted = left - num_running(study)  # running trials belong to other processes: this one runs none now
        if wanted <= 0:
            time.sleep(POLL_SECONDS)
            optuna.storages.fail_stale_trials(study)
            continue
        ran.clear()
        limit = None if seconds is None else until - now
        study.optimize(objective, n_trials=wanted, timeout=limit, n_jobs=jobs, catch=known, callbacks=[ended])
        if len(ran) < wanted and count(study) + num_running(study) < trials:
            break  # the sampler has no more to try
    if not study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        reasons = [reason_of(trial) for trial in study.get_trials(deepcopy=False)]
        raise JobFailed(f"no trial came to its end: {next((one for one in reasons if one), 'none was run in the time given')}")


def count(study: optuna.Study) -> int:
    """Return the number of trials that came to an end. A trial whose process was killed is run again, and counts once."""
    return sum(trial.state.is_finished() and not was_killed(trial) for trial in study.get_trials(deepcopy=False))


def num_running(study: optuna.Study) -> int:
    """Return the running trials of all processes. In a journal, which does not notice dead ones, return 0 and wait for none."""
    if not HEARTBEAT.get()(STUDY_STORAGE.of(study)):
        return 0
    return len(study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)))


def was_killed(trial: optuna.trial.FrozenTrial) -> bool:
    """Return whether a trial was killed with its process: it could not say why it failed."""
    return trial.state is TrialState.FAIL and REASON not in trial.user_attrs


def _judged(
    study: optuna.Study, trial: optuna.Trial, run_trial: RunTrial, catch: tuple[type[Exception], ...]
) -> Sequence[float]:  # fmt: skip
    single = len(study.directions) == 1
    expected: tuple[type[Exception], ...] = (UpshiftError, *catch)

    def report(value: float, number: int) -> None:
        if single:  # of several objectives Optuna ends no trial early
            trial.report(value, number)
            if trial.should_prune():
                trial.set_user_attr(REASON, f"ended after evaluation {number}, at {value:.4g}")
                raise optuna.TrialPruned

    try:
        return _checked(run_trial(Asked(trial.number, trial, report)), len(study.directions))
    except NothingFits as error:
        trial.set_user_attr(REASON, f"not started: {error}")
        raise optuna.TrialPruned from None
    except optuna.TrialPruned:
        raise
    except expected as error:
        trial.set_user_attr(REASON, str(error) or type(error).__name__)
        raise


def _checked(values: Sequence[float], wanted: int) -> Sequence[float]:
    """Return the values, or raise JobFailed.

    Optuna lets a trial with other values fail without an error, so that it would look like a killed one."""
    if len(values) != wanted:
        raise JobFailed(f"its objective gave {len(values)} values, and the study has {wanted} directions")
    if any(math.isnan(value) for value in values):
        raise JobFailed("its objective is not a number (NaN)")
    return values


def reason_of(trial: optuna.trial.FrozenTrial) -> str:
    """Return why a trial has no result, or an empty text if it has one."""
    if trial.state is TrialState.COMPLETE:
        return ""
    if was_killed(trial):
        return "its process was killed; run again"
    return str(trial.user_attrs.get(REASON, "ended early" if trial.state is TrialState.PRUNED else ""))
