"""Open the storage of a study: SQLite by default, any database that Optuna takes, or a journal.

An error message is one line, and no password is in it.

Begin a study with the best values of earlier ones, which are tried first.

Earlier results are not taken over, as they may be of another model or other data. The sampler learns from the results here.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, IntegrityError, OperationalError, ProgrammingError, SQLAlchemyError

from upshift.errors import RequestError
from upshift.internals.optuna_names import CONTAINS

HEARTBEAT_SECONDS = 5
GRACE_SECONDS = 15  # a trial whose process was silent for so long is dead
MAKING_TRIES = 20
MAKING_SECONDS = 0.1
FILE = "study.db"
DRIVERS = {  # what pip calls them, by SQLAlchemy's names
    "psycopg": "psycopg[binary]", "psycopg2": "psycopg2-binary", "mysqldb": "mysqlclient", "pymysql": "PyMySQL",
    "mysqlconnector": "mysql-connector-python",
}  # fmt: skip
FORMS = "sqlite:///PATH, postgresql://USER:PASSWORD@HOST/NAME, mysql://USER:PASSWORD@HOST/NAME, or the path of a journal"


@contextmanager
def without_warnings() -> Iterator[None]:
    """Hide Optuna's warning that heartbeats are experimental, because they are wanted here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield


def persistent(given: Any, folder: Path) -> optuna.storages.BaseStorage:
    """Return the storage. Raise RequestError for one that ends with this process, or that cannot be opened."""
    if isinstance(given, optuna.storages.InMemoryStorage):
        raise RequestError("a storage in memory is not seen by the trials' processes; leave storage out, or give a database URL")
    if isinstance(given, optuna.storages.BaseStorage):
        return given
    if given is not None and "://" not in given:
        Path(given).parent.mkdir(parents=True, exist_ok=True)
        return journal(given)
    if given is None:
        folder.mkdir(parents=True, exist_ok=True)
    return database(given or in_folder(folder))


def in_folder(folder: Path) -> str:
    return f"sqlite:///{folder / FILE}"


def journal(path: str) -> optuna.storages.BaseStorage:
    from optuna.storages.journal import JournalFileBackend

    return optuna.storages.JournalStorage(JournalFileBackend(path))


def database(url: str) -> optuna.storages.BaseStorage:
    try:
        return _opened(url)
    except ImportError:
        driver = make_url(url).get_driver_name()
        raise RequestError(
            f"storage {shown(url)} needs a driver of its database: run  pip install '{DRIVERS.get(driver, driver)}'"
        ) from None
    except ArgumentError as error:
        raise RequestError(f"storage {shown(url)}: {_line(error)}; write {FORMS}") from None
    except (SQLAlchemyError, RuntimeError) as error:  # RuntimeError: of another version of Optuna's tables
        raise RequestError(f"storage {shown(url)} cannot be opened: {_line(error)}") from None


def _opened(url: str) -> optuna.storages.BaseStorage:
    """Open a database, and try again if another process makes its tables now.

    Processes that begin a study together make its tables together, and Optuna looks before it makes each one."""
    for _ in range(MAKING_TRIES):
        try:
            return _database_storage(url)
        except (OperationalError, ProgrammingError, IntegrityError) as error:
            if not isinstance(error, IntegrityError) and "already exists" not in str(error):
                raise
        time.sleep(MAKING_SECONDS)
    return _database_storage(url)


def _database_storage(url: str) -> optuna.storages.BaseStorage:
    with without_warnings():
        return optuna.storages.RDBStorage(
            url, heartbeat_interval=HEARTBEAT_SECONDS, grace_period=GRACE_SECONDS,
            heartbeat_stale_trial_callback=optuna.storages.RetryHeartbeatStaleTrialCallback(max_retry=1),
        )  # fmt: skip


def _line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:300]


def shown(storage: str) -> str:
    """Return a URL without its password."""
    if "://" not in storage:
        return storage
    try:
        return make_url(storage).render_as_string(hide_password=True)
    except ArgumentError:
        return storage.split("://")[0] + "://..."


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
    storage = _earlier_storage(place)
    return [optuna.load_study(study_name=name, storage=storage) for name in optuna.get_all_study_names(storage)]


def _earlier_storage(place: str) -> optuna.storages.BaseStorage:
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
