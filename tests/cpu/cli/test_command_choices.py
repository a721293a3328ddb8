"""The choices that help pages list are those that the code behind a command takes."""

from __future__ import annotations

from typing import get_args

import typer

from upshift.benchmarking.ab_test import Measure
from upshift.cli.launch import KINDS
from upshift.cli.main import app
from upshift.cli.tune import OBJECTIVES as LISTED_OBJECTIVES
from upshift.loading.files.tensors import COMPUTE_DTYPES
from upshift.planning.analysis.max_size import DimensionName
from upshift.planning.layout import FullyShard
from upshift.training.arguments import LearningRateSchedule
from upshift.tuning.objectives import OBJECTIVES
from upshift.tuning.study import PRUNERS

ROOT = typer.main.get_command(app)


def listed(path: str, name: str) -> set[str]:
    """Return the values that a shell completes for an option."""
    command = ROOT
    for word in path.split():
        command = command.commands[word]
    (option,) = (option for option in command.params if name in option.opts)
    return {item.value for item in option.shell_complete(typer.Context(command), "")}


def test_choices() -> None:
    assert set(LISTED_OBJECTIVES) == set(OBJECTIVES)
    assert listed("tune", "--pruner") == set(PRUNERS)
    assert listed("convert", "--dtype") == listed("inspect", "--dtype") == set(COMPUTE_DTYPES)
    assert listed("plan", "--largest") == set(get_args(DimensionName))
    assert listed("plan", "--fully-shard") == listed("train", "--fully-shard") == set(get_args(FullyShard))
    assert listed("train", "--lr-scheduler-type") == set(get_args(LearningRateSchedule))
    assert listed("bench compare", "--measure") == set(get_args(Measure))
    assert listed("launch", "--kind") == set(KINDS)
