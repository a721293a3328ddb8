"""Begin a study with the best values of earlier ones, which are tried first.

Earlier results are not taken over, as they may be of another model or other data. The sampler learns from the results here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState

from upshift.errors import RequestError
from upshift.internals.optuna_names import CONTAINS
from upshift.tuning.storage import FILE, database, in_folder, journal, shown

POINTS = 5  # of each place
WARMED = "warm start"


def start_from(study: optuna.Study, places: Sequence[str], space: dict[str, BaseDistribution]) -> None:
    """Enqueue the points once: a study that goes on has them already.

    Parameters that the space lacks, and values outside its ranges, are left to the sampler."""
    if not places or WARMED in study.user_attrs:
        return
    points = [point for place in places for point in best_points(place, study, space)]
    study.set_user_attr(WARMED, [shown(place) for place in places])
    for point in points:
        study.enqueue_trial(point, skip_if_exists=True)


def best_points(place: str, study: optuna.Study, space: dict[str, BaseDistribution]) -> list[dict[str, Any]]:
    """Return the best points first, each once. Raise RequestError if no point can be used."""
    done = [trial for other in _studies(place) if other.directions == study.directions for trial in _complete(other)]
    if not done:
        raise RequestError(
            f"--warm-start {shown(place)} has no trial that came to its end, for objectives of the same directions"
        )
    points: list[dict[str, Any]] = []
    for trial in _in_order(done, study.directions):
        point = {
            name: trial.params[name]
            for name, one in space.items()
            if name in trial.params and _inside(one, trial.params[name])
        }  # fmt: skip
        if point and point not in points:
            points.append(point)
    if not points:
        raise RequestError(f"--warm-start {shown(place)}: none of its trials has a value within this space ({', '.join(space)})")
    return points[:POINTS]


def _studies(place: str) -> list[optuna.Study]:
    storage = _storage(place)
    return [optuna.load_study(study_name=name, storage=storage) for name in optuna.get_all_study_names(storage)]


def _storage(place: str) -> optuna.storages.BaseStorage:
    if "://" in place:
        return database(place)
    path = Path(place)
    if path.is_file():
        return journal(place)
    if not (path / FILE).is_file():
        raise RequestError(f"--warm-start {place!r} is no output folder of an earlier search, no journal and no database URL")
    return database(in_folder(path))


def _complete(study: optuna.Study) -> list[FrozenTrial]:
    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))


def _in_order(trials: list[FrozenTrial], directions: Sequence[optuna.study.StudyDirection]) -> list[FrozenTrial]:
    """Sort the trials, best first. For several objectives, sum over them how many other trials are better."""
    ranks = dict.fromkeys(range(len(trials)), 0)
    for at, direction in enumerate(directions):
        sign = -1 if direction is optuna.study.StudyDirection.MAXIMIZE else 1
        for rank, number in enumerate(sorted(ranks, key=lambda one: sign * trials[one].values[at])):
            ranks[number] += rank
    return [trials[number] for number in sorted(ranks, key=lambda one: ranks[one])]


def _inside(distribution: BaseDistribution, value: Any) -> bool:
    try:
        return bool(CONTAINS.of(distribution)(distribution.to_internal_repr(value)))
    except ValueError:  # the value is none of the choices
        return False
