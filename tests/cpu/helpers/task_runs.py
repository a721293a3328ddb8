"""Runs that train a task on a few rows: each step has all rows, at a constant learning rate, as in ``plain_loop``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import upshift

STEPS = 4
RATE = 1e-3


def write_rows(file: Path, *rows: Any) -> Path:
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def run(model: Path, data: Path | str, output: Path, *, rows: int, steps: int = STEPS, rate: float = RATE, **options: Any) -> Any:
    """Return the record of a run. Without ``eval_data`` no rows are held out."""
    arguments = {"max_steps": steps, "learning_rate": rate, "lr_scheduler_type": "constant"}
    held_out = {} if "eval_data" in options else {"eval_size": 0}
    given = {**held_out, **options}
    record = upshift.train(str(model), str(data), output=output, arguments=arguments, global_batch=rows, **given)
    assert record is not None
    return record


def losses_of(record: Any) -> list[float]:
    return [loss for _, loss in record.details["loss_curve"]]


def train(*paths: Any, **options: Any) -> list[float]:
    """Return the losses of the steps of ``run``."""
    return losses_of(run(*paths, **options))
