"""Manage the output folder of a search: one study's trials leave their models there. Only files that they wrote are deleted."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import optuna

from upshift.errors import RequestError
from upshift.training.checkpoint.checkpoint import check_output_directory
from upshift.training.loop.run import OWN_FILES
from upshift.tuning.storage import in_folder, shown
from upshift.value import Value
from upshift.whole_file import write_whole

OWNER_NAME = "upshift_study.json"
OF_TRIAL = re.compile(r"trial-\d+")


class Owner(Value):
    study: str
    storage: str | None  # None: in the folder itself, wherever that is moved to


def owner_of(output: Path, *, storage: str | None, study_name: str) -> Owner:
    """Return the study of that name. Raise RequestError if the folder cannot be used, or holds models of another study."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"output directory {output} cannot be used: {error.strerror}; give another --output") from None
    owner = Owner(study=study_name, storage=None if storage in (None, in_folder(output)) else shown(storage))
    _check_owner(output, owner)
    return owner


def _check_owner(output: Path, owner: Owner) -> None:
    path = output / OWNER_NAME
    found = Owner.from_file(path) if path.exists() else owner
    if found != owner:
        kept = "there" if found.storage is None else f"in {found.storage}"
        raise RequestError(
            f"{output} has the models of the study {found.study!r}, kept {kept}; go on with that one, or give another --output"
        )


def claim(output: Path, owner: Owner, study: optuna.Study) -> None:
    """Take the folder for a study, before its first trial.

    Raise RequestError if it belongs to another study, or if a folder with a trial's name is not of this study."""
    there = sorted(path.name for path in output.iterdir())  # before its trials are read: other processes may begin some
    known = {trial_folder(output, trial.number).name for trial in study.get_trials(deepcopy=False)}
    foreign = [name for name in there if OF_TRIAL.fullmatch(name) and name not in known]
    if foreign:
        raise RequestError(f"{output / foreign[0]} is not of this study's trials; move it away, or give another --output")
    if OWNER_NAME not in there:
        write_whole(output / OWNER_NAME, owner.to_json())
    _check_owner(output, owner)  # two studies may have come at once


def trial_folder(output: Path, number: int) -> Path:
    return output / f"trial-{number}"


def remove(folder: Path) -> None:
    """Remove a trial's folder with its model. The folder stays if a file is in it that no trial writes."""
    if folder.is_dir():
        with suppress(RequestError, OSError):  # OSError: another process of the study removes it, too
            check_output_directory(folder, overwrite=True, resume=False, own_files=OWN_FILES)
            folder.rmdir()
