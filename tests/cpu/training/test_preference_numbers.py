"""The rewards of pairs: in the record and the run file, also after a resumption, in trackers, and in printed lines."""
# ruff: noqa: F811  fixtures of another file

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from test_preferences import a_job, data, home  # noqa: F401  fixtures
from test_run_options import scalars

from upshift.cli.run_display import RunDisplay
from upshift.errors import Interrupted
from upshift.training.arguments import Arguments, TrainRequest
from upshift.training.checkpoint.directory import TENSORBOARD_FOLDER
from upshift.training.data.data_options import DataOptions, ObjectiveName
from upshift.training.data.dataset import TrainingData
from upshift.training.job.job import run_job
from upshift.training.loop.events import Evaluated, Event, StepDone, event_from_json, event_to_json
from upshift.training.loop.state import Run, new_run
from upshift.training.trackers import RunTrackers

NAMES: tuple[ObjectiveName | None, ...] = (None, "causal-lm", "dpo")
ARGUMENTS = {"max_steps": 6, "logging_steps": 3, "eval_steps": 2}


def test_a_resumed_run_has_the_rewards_of_all_its_steps(home: Path, data: TrainingData, tmp_path: Path) -> None:
    """It is stopped between two logged steps, and after the last evaluation that its checkpoint knows."""

    def stop(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    whole = run_job(a_job(home, tmp_path / "whole", arguments=ARGUMENTS), data).details
    job = a_job(home, tmp_path / "out", arguments=ARGUMENTS)
    with pytest.raises(Interrupted):
        run_job(job, data, on_event=stop)
    resumed = run_job(job.changed(resume=True), data).details
    assert [row[0] for row in whole["rewards"]] == [1, 2, 3, 4, 5, 6]
    assert [row[0] for row in whole["evaluation_rewards"]] == [2, 4, 6]
    for name in ("rewards", "evaluation_rewards"):
        assert resumed[name] == whole[name], name
    run = Run.read(tmp_path / "out")
    assert [list(row) for row in run.rewards] == whole["rewards"]
    earlier = run.as_of_step(3)
    assert [row[0] for row in earlier.rewards] == [1, 2, 3] and [row[0] for row in earlier.evaluation_rewards] == [2]
    for resumed_entry, entry in zip(resumed["logged_steps"], whole["logged_steps"], strict=True):
        steps = whole["rewards"][entry["step"] - 3 : entry["step"]]
        for number, name in ((1, "reward_accuracy"), (2, "reward_margin")):
            assert resumed_entry[name] == entry[name] == pytest.approx(sum(row[number] for row in steps) / 3)


@pytest.mark.parametrize("logging_steps", [0, 3])
def test_trackers_and_printed_lines_have_the_rewards(
    logging_steps: int, home: Path, data: TrainingData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under the names that TRL gives them. Logged steps have the means since the previous one, as their losses have."""
    arguments = ARGUMENTS | {"logging_steps": logging_steps}
    request = TrainRequest(
        model="MODEL", data="DATA", output=tmp_path / "out", report_to=("tensorboard",), arguments=Arguments(**arguments)
    )
    events: list[Event] = []
    with RunTrackers(request, lambda event: events.append(event_from_json(event_to_json(event)))) as trackers:
        trackers.begin()
        record = run_job(a_job(home, tmp_path / "out", arguments=arguments), data, on_event=trackers.event)
    rows = {step: (accuracy, margin) for step, accuracy, margin in record.details["rewards"]}
    if logging_steps:
        rows = {row["step"]: (row["reward_accuracy"], row["reward_margin"]) for row in record.details["logged_steps"]}
    held_out = {step: (accuracy, margin) for step, accuracy, margin in record.details["evaluation_rewards"]}
    values = scalars(tmp_path / "out" / TENSORBOARD_FOLDER)
    for mode, expected in (("train", rows), ("eval", held_out)):
        assert len(expected) > 1
        for number, name in enumerate(("accuracies", "margins")):
            by_step = {step: row[number] for step, row in expected.items()}
            assert values[f"{mode}/rewards/{name}"] == pytest.approx(by_step, rel=1e-6, abs=1e-9)
    with RunDisplay() as display:
        for event in events:
            display.watcher.event(event)
    lines = capsys.readouterr().err.splitlines()
    printed = [line for line in lines if line.startswith("Step ")]
    assert len(printed) == (2 if logging_steps else 0)
    for line, (accuracy, margin) in zip(printed, rows.values(), strict=False):
        assert f" · reward accuracy {accuracy:.0%} · margin {margin:.3f} · " in line
    assert len([line for line in lines if line.startswith("held-out loss") and "reward accuracy" in line]) == len(
        [event for event in events if isinstance(event, Evaluated)]
    )


def test_a_run_file_holds_the_objective_that_changes_the_training(home: Path, data: TrainingData, tmp_path: Path) -> None:
    """So a run that named the model's own objective may be resumed without naming it, and the other way round."""
    job = a_job(home, tmp_path)
    objectives = {name: new_run(job.changed(data_options=DataOptions(objective=name)), data).objective for name in NAMES}
    assert objectives == {None: None, "causal-lm": None, "dpo": "dpo"}
