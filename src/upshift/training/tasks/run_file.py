"""Keep what a run that resumes must have in common with the run before, in a file of the output folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from upshift.errors import RequestError
from upshift.models.source import AdapterOptions
from upshift.training.arguments import Arguments
from upshift.training.checkpoint.checkpoint import newest_checkpoint
from upshift.training.checkpoint.directory import TASK_CHECKPOINTS as CHECKPOINTS
from upshift.training.checkpoint.directory import TASK_RUN_NAME as RUN_FILE
from upshift.training.checkpoint.directory import finished_run, replace_text
from upshift.training.loop.state import another_run

Paths = Mapping[str, str]  # of the data and of the evaluation data as a user gave them, by "data" and "eval_data"


def write_run_file(output: Path, identity: Mapping[str, Any], *, finished: bool) -> None:
    replace_text(output / RUN_FILE, json.dumps({**identity, "finished": finished}, indent=1))


def _read_run_file(path: Path) -> dict[str, Any]:
    """Return what the file of a run has. Raise RequestError if it cannot be read."""
    try:
        run: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"{path} cannot be read ({str(error)[:80]}); start anew with --overwrite") from None
    if not isinstance(run, dict) or not isinstance(run.get("arguments", {}), dict):
        raise RequestError(f"{path} is not the file of a run; start anew with --overwrite")
    return run


def found_rate_of(output: Path) -> dict[str, float]:
    """Return the learning rate that was found before the first checkpoint of the run in a folder, or nothing without one.

    Raise RequestError if the file of the run has none."""
    path = output / RUN_FILE
    if newest_checkpoint(output / CHECKPOINTS) is None or not path.is_file():
        return {}
    rate = _read_run_file(path).get("arguments", {}).get("learning_rate")
    if not isinstance(rate, int | float):
        raise RequestError(
            f"{path} has no learning rate; give that of the run with --learning-rate in place of --find-learning-rate, or start "
            "anew with --overwrite"
        )
    return {"learning_rate": rate}


def checkpoint_to_resume(output: Path, identity: Mapping[str, Any], paths: Paths) -> str | None:
    """Return the newest whole checkpoint, or None if the run ended before its first one, so that it begins again.

    Raise RequestError if the checkpoint is of another run, or if the run is finished and has none.
    """
    checkpoint = newest_checkpoint(output / CHECKPOINTS)
    path = output / RUN_FILE
    if checkpoint is None and not path.is_file():
        return None
    earlier = _read_run_file(path)
    if checkpoint is None:
        if earlier.get("finished", True):
            raise finished_run(output)
        return None
    if "adapter" in earlier:
        AdapterOptions.model_validate(identity["adapter"]).check_same(AdapterOptions.model_validate(earlier["adapter"]), output)
    missing = identity["arguments"].keys() - earlier.get("arguments", {}).keys()  # the program of the run had no such options
    earlier["arguments"] = earlier.get("arguments", {}) | {name: Arguments.model_fields[name].default for name in missing}
    for name, value in identity.items():
        if name != "adapter" and name in earlier and earlier[name] != value:
            raise another_run(output, *_named_difference(name, earlier[name], value))
    if "rows" not in earlier:  # the program of the run compared paths, and no rows
        _check_same_paths(output, earlier, paths)
    return str(checkpoint)


def _check_same_paths(output: Path, earlier: Mapping[str, Any], paths: Paths) -> None:
    for name in ("data", "eval_data"):
        path = str(Path(paths[name]).resolve()) if name in paths else None
        if name in earlier and earlier[name] != path:
            raise another_run(output, name, earlier[name], path)


def check_same_data(output: Path, identity: Mapping[str, str | None], paths: Paths) -> None:
    """Raise RequestError if a run that resumes had other rows, labels, images or sounds."""
    earlier = _read_run_file(output / RUN_FILE)
    of_training = f"--data {paths['data']}"
    of_evaluation = f"--eval-data {paths['eval_data']}" if "eval_data" in paths else of_training
    for name, value in identity.items():
        if name in earlier and earlier[name] != value:
            raise RequestError(
                f"{of_evaluation if name == 'held_out_rows' else of_training} has other rows, labels, images or sounds than the "
                f"run in {output} had ({value}, and before {earlier[name]}); resume with the data of that run, or start anew in "
                "another output directory"
            )


def _named_difference(name: str, old: Any, new: Any) -> tuple[str, Any, Any]:
    """Return the name of what differs in two runs, and both values: of a group of fields, the first field that differs."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return name, old, new
    field = next(field for field in (*new, *old) if old.get(field) != new.get(field))
    return field, old.get(field), new.get(field)
