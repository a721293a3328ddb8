"""Open the storage of a study (SQLite by default, another database, or a journal), and start studies from earlier ones.

Error messages are one line and hold no password. A warm start tries the best values of earlier studies first. It does not take
over their results, which may be of another model or other data.
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
OPEN_TRIES = 20
OPEN_RETRY_SECONDS = 0.1
FILE = "study.db"
DRIVERS = {  # packages by SQLAlchemy's names of the drivers
    "psycopg": "psycopg[binary]",
    "psycopg2": "psycopg2-binary",
    "mysqldb": "mysqlclient",
    "pymysql": "PyMySQL",
    "mysqlconnector": "mysql-connector-python",
}
SQLITE_MAGIC = b"SQLite format 3\0"  # https://www.sqlite.org/fileformat.html, section 1.3
JOURNAL_START = b'{"op_code":'  # each line that Optuna writes begins so; another process may be writing the first one
FORMS = "sqlite:///PATH, postgresql://USER:PASSWORD@HOST/NAME, mysql://USER:PASSWORD@HOST/NAME, or the path of a journal"


@contextmanager
def ignore_experimental_warnings() -> Iterator[None]:
    """Hide Optuna's warning that heartbeats are experimental."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield


def open_storage(storage: Any, folder: Path) -> optuna.storages.BaseStorage:
    """Return the storage: Optuna's own, of a database URL, or of a path, which is SQLite's or a journal's; None: in the folder.

    Raise RequestError for a storage in memory, and for one that cannot be opened."""
    if isinstance(storage, optuna.storages.InMemoryStorage):
        raise RequestError("a storage in memory is not seen by the trials' processes; leave storage out, or give a database URL")
    if isinstance(storage, optuna.storages.BaseStorage):
        return storage
    if storage is None:
        folder.mkdir(parents=True, exist_ok=True)
        return open_database(folder_url(folder))
    url = database_url(storage)
    return open_database(url) if "://" in url else open_journal(url)


def folder_url(folder: Path) -> str:
    return f"sqlite:///{folder / FILE}"


def database_url(storage: str) -> str:
    """Return the URL of a path that is SQLite's file. Return a URL, and the path of another file, as it is."""
    if "://" in storage:
        return storage
    is_sqlite = _first_bytes(Path(storage), len(SQLITE_MAGIC)) == SQLITE_MAGIC
    return f"sqlite:///{storage}" if is_sqlite else storage


def _first_bytes(path: Path, count: int) -> bytes:
    """Return the first bytes of a file: none if it cannot be read. The code that opens it later makes it, or says why it
    cannot."""
    try:
        with path.open("rb") as file:
            return file.read(count)
    except OSError:
        return b""


def open_journal(path: str) -> optuna.storages.BaseStorage:
    """Open a journal, and make it if there is none. Raise RequestError for a folder and for a file of another kind."""
    from optuna.storages.journal import JournalFileBackend

    if Path(path).is_dir():
        raise RequestError(f"storage {path} is a folder; give a file, such as {Path(path) / FILE}, or one of {FORMS}")
    try:
        if not JOURNAL_START.startswith(_first_bytes(Path(path), len(JOURNAL_START))):
            raise ValueError(path)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return optuna.storages.JournalStorage(JournalFileBackend(path))
    except OSError as error:
        raise RequestError(f"storage {path} cannot be opened: {error.strerror or error}; write {FORMS}") from None
    except (ValueError, LookupError, TypeError):  # Optuna reads lines of JSON with keys of its own, and does not check them
        raise RequestError(f"storage {path} is neither SQLite nor a journal of Optuna; write {FORMS}") from None


def open_database(url: str) -> optuna.storages.BaseStorage:
    """Open a database. Raise RequestError if its driver is missing, its URL is wrong, or it does not answer."""
    try:
        return _open_with_retries(url)
    except ImportError:
        driver = make_url(url).get_driver_name()
        raise RequestError(
            f"storage {hide_password(url)} needs a driver of its database: run  pip install '{DRIVERS.get(driver, driver)}'"
        ) from None
    except ArgumentError as error:
        raise RequestError(f"storage {hide_password(url)}: {_first_line(error)}; write {FORMS}") from None
    except (SQLAlchemyError, RuntimeError) as error:  # RuntimeError: its tables are of another version of Optuna
        raise RequestError(f"storage {hide_password(url)} cannot be opened: {_first_line(error)}") from None


def _open_with_retries(url: str) -> optuna.storages.BaseStorage:
    """Open a database, and try again if another process creates its tables at the same time.

    Processes that begin a study together all create the tables, and Optuna only checks for each before it creates it."""
    for _ in range(OPEN_TRIES):
        try:
            return _database_storage(url)
        except (OperationalError, ProgrammingError, IntegrityError) as error:
            if not isinstance(error, IntegrityError) and "already exists" not in str(error):
                raise
        time.sleep(OPEN_RETRY_SECONDS)
    return _database_storage(url)


def _database_storage(url: str) -> optuna.storages.BaseStorage:
    with ignore_experimental_warnings():
        return optuna.storages.RDBStorage(
            url,
            heartbeat_interval=HEARTBEAT_SECONDS,
            grace_period=GRACE_SECONDS,
            heartbeat_stale_trial_callback=optuna.storages.RetryHeartbeatStaleTrialCallback(max_retry=1),
        )


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:300]


def hide_password(storage: str) -> str:
    """Return a URL without its password, and a path as it is."""
    if "://" not in storage:
        return storage
    try:
        return make_url(storage).render_as_string(hide_password=True)
    except ArgumentError:
        return storage.split("://")[0] + "://..."


POINTS = 5  # from each earlier search
WARMED = "warm start"  # attribute of a study and of the trials that a warm start enqueued


def enqueue_warm_start(study: optuna.Study, sources: Sequence[str], space: dict[str, BaseDistribution]) -> None:
    """Enqueue the best points of earlier searches. A study that goes on has them already.

    The sampler draws the parameters that are not in the space, or whose values are outside its ranges."""
    if not sources or WARMED in study.user_attrs:
        return
    points = [point for source in sources for point in best_points(source, study, space)]
    study.set_user_attr(WARMED, [hide_password(source) for source in sources])
    for point in points:
        study.enqueue_trial(point, user_attrs={WARMED: True}, skip_if_exists=True)


def best_points(source: str, study: optuna.Study, space: dict[str, BaseDistribution]) -> list[dict[str, Any]]:
    """Return different points, the best first. Raise RequestError if no point is within the space."""
    trials: list[FrozenTrial] = []
    for earlier in _studies(source):
        if earlier.directions == study.directions:
            trials += earlier.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if not trials:
        raise RequestError(
            f"--warm-start {hide_password(source)} has no trial that came to its end, for objectives of the same directions"
        )
    points: list[dict[str, Any]] = []
    for trial in _sort_best_first(trials, study.directions):
        point = {
            name: trial.params[name]
            for name, distribution in space.items()
            if name in trial.params and _contains(distribution, trial.params[name])
        }
        if point and point not in points:
            points.append(point)
    if not points:
        raise RequestError(
            f"--warm-start {hide_password(source)}: none of its trials has a value within this space ({', '.join(space)})"
        )
    return points[:POINTS]


def _studies(source: str) -> list[optuna.Study]:
    storage = _earlier_storage(source)
    return [optuna.load_study(study_name=name, storage=storage) for name in optuna.get_all_study_names(storage)]


def _earlier_storage(source: str) -> optuna.storages.BaseStorage:
    url = database_url(source)
    if "://" in url:
        return open_database(url)
    path = Path(source)
    if path.is_file():
        return open_journal(source)
    if not (path / FILE).is_file():
        raise RequestError(f"--warm-start {source!r} is no output folder of an earlier search, no journal and no database URL")
    return open_database(folder_url(path))


def _sort_best_first(trials: list[FrozenTrial], directions: Sequence[optuna.study.StudyDirection]) -> list[FrozenTrial]:
    """Return the trials, the best first. Several objectives: by the sum of the trial's ranks in each."""
    rank_sums = dict.fromkeys(range(len(trials)), 0)  # by the trial's index
    for objective, direction in enumerate(directions):
        sign = -1 if direction is optuna.study.StudyDirection.MAXIMIZE else 1
        order = sorted(rank_sums, key=lambda index: sign * trials[index].values[objective])
        for rank, index in enumerate(order):
            rank_sums[index] += rank
    return [trials[index] for index in sorted(rank_sums, key=lambda index: rank_sums[index])]


def _contains(distribution: BaseDistribution, value: Any) -> bool:
    try:
        return bool(CONTAINS.of(distribution)(distribution.to_internal_repr(value)))
    except ValueError:  # the value is none of the choices
        return False
