"""Open the storage of a study: SQLite by default, any database that Optuna takes, or a journal.

An error message is one line, and no password is in it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, IntegrityError, OperationalError, ProgrammingError, SQLAlchemyError

from upshift.errors import RequestError

HEARTBEAT_SECONDS, GRACE_SECONDS = 5, 15  # a trial whose process was silent for so long is dead
MAKING_TRIES, MAKING_SECONDS = 20, 0.1
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
            return _storage(url)
        except (OperationalError, ProgrammingError, IntegrityError) as error:
            if not isinstance(error, IntegrityError) and "already exists" not in str(error):
                raise
        time.sleep(MAKING_SECONDS)
    return _storage(url)


def _storage(url: str) -> optuna.storages.BaseStorage:
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
