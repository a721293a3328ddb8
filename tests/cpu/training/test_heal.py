"""Copies of a model that heal each other: one that is killed comes back, the others go on, and no loss changes."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_train import (
    command_of,
    home,  # noqa: F401
)
from warm_processes import WarmProcesses

from upshift.errors import Interrupted, JobFailed, RequestError
from upshift.planning.layout import Layout
from upshift.planning.plan import ALONE, Plan
from upshift.training.checkpoint.checkpoint import newest_checkpoint
from upshift.training.checkpoint.state import SavedState
from upshift.training.elastic.supervisor import WORKER, check_healing, fixed_for_healing
from upshift.training.loop.events import Event, StepDone, Waited
from upshift.training.run import Watcher, train

PLAIN = {"from_config": True, "sequence_length": 32, "global_batch": 6, "trial_seconds": 0.0}
# Six micro-batches, among two copies, or one; what is left to plan is little.
ONE_EACH = ("per_device_train_batch_size=1", "torch_compile=off", "precision=fp32", "attention=sdpa", "optim=adamw_torch")
MOST = 20_000
HELD_BACK_SECONDS, START_SECONDS = 12.0, 60.0


def processes(warm: WarmProcesses) -> dict[int, int]:
    """Return the copies that run now: number -> pid. Each is the child of a fork server of its own; these start in turn.

    A fork server is a new process if an earlier test left other variables than those with which ``warm`` began."""
    forked = [process.pid for process in warm.running() if process.args[-1] == WORKER]
    others = [child for child in psutil.Process().children() if command_of(child)[-1:] == [WORKER]]
    started = [child.pid for child in sorted(others, key=lambda child: (child.create_time(), child.pid))]
    found = enumerate(psutil.Process(pid).children() for pid in forked or started)
    return {number: children[0].pid for number, children in found if children}


class Murderer:
    """Kills the copy that speaks, sees it come back, and ends the run."""

    def __init__(self, warm: WarmProcesses) -> None:
        self._warm = warm
        self.steps: list[int] = []
        self.waited: list[str] = []
        self.killed: dict[int, int] = {}
        self.back = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self.steps.append(event.step)
            if event.step == 20:
                self.killed = processes(self._warm)
                os.kill(self.killed[0], signal.SIGKILL)
            if self.back and event.step == self.back + 20:
                os.kill(os.getpid(), signal.SIGINT)
        elif isinstance(event, Waited):
            if event.words.startswith("copy "):  # on a busy machine others speak, too: the data loader, the watchdogs
                self.waited.append(event.words)
            if self.killed and "is here" in event.words:
                self.back = event.step
                assert processes(self._warm)[1] == self.killed[1], "the other one was started again, too"


def run(home: Path, output: Path, steps: int, *, learning_rate: float = 1e-3, **request: Any) -> Any:  # noqa: F811
    arguments = {"max_steps": steps, "lr_scheduler_type": "constant", "learning_rate": learning_rate}
    return train(str(home / "llama"), str(home / "data.jsonl"), output=output, arguments=arguments, **{**PLAIN, **request})


@pytest.mark.skipif(find_spec("torchft") is None, reason="torchft is not installed (pip install '.[heal]')")
def test_a_killed_copy_comes_back_and_no_loss_changes(
    home: Path,  # noqa: F811
    warm_processes: WarmProcesses,
    tmp_path: Path,
) -> None:
    murderer = Murderer(warm_processes)
    with pytest.raises(Interrupted, match="is saved in .* continue with the same command and --resume"):
        run(home, tmp_path / "healed", MOST, heal=True, fixed=(*ONE_EACH, "num_processes=2"), watcher=Watcher(event=murderer))
    killed = "copy 0 of 2 was killed (SIGKILL); the others go on, and it is started again"
    assert murderer.waited == [killed, "copy 0 is here, and has what the others have"]
    assert murderer.steps == [*range(1, len(murderer.steps) + 1)] and len(murderer.steps) >= murderer.back + 20
    checkpoint = newest_checkpoint(tmp_path / "healed")
    assert checkpoint is not None
    state = SavedState.read(checkpoint).train
    assert Plan.model_validate(state.plan).num_processes == 2, "what goes on from it would plan anew"
    healed = state.loss_curve
    undisturbed = run(home, tmp_path / "undisturbed", len(healed), fixed=ONE_EACH).details["loss_curve"]
    assert len(healed) >= len(murderer.steps) and healed == pytest.approx([loss for _, loss in undisturbed], rel=1e-5)


@pytest.mark.skipif(find_spec("torchft") is None, reason="torchft is not installed (pip install '.[heal]')")
def test_copies_end_together(
    home: Path,  # noqa: F811
    warm_processes: WarmProcesses,
    tmp_path: Path,
) -> None:
    """At the last step, or with the words of one that fails."""
    request: Any = {"heal": True, "fixed": (*ONE_EACH, "num_processes=2")}
    began: list[float] = []
    late = ThreadPoolExecutor(1).submit(hold_back, 1, warm_processes)
    watcher = Watcher(event=lambda event: began.append(time.monotonic()))
    record = run(home, tmp_path / "healed", 6, watcher=watcher, **request)
    assert (record.plan["num_processes"], record.plan["gradient_accumulation_steps"]) == (2, 3)
    healed = record.details
    assert began[0] > late.result(), "one went ahead of the other"
    alone = run(home, tmp_path / "alone", 6, fixed=ONE_EACH).details
    assert [loss for _, loss in healed["loss_curve"]] == pytest.approx([loss for _, loss in alone["loss_curve"]], rel=1e-5)
    assert healed["evaluations"] == [[tokens, pytest.approx(loss, rel=1e-5)] for tokens, loss in alone["evaluations"]]
    with pytest.raises(JobFailed, match="the loss became"):
        run(home, tmp_path / "bad", 40, learning_rate=1e30, **request)


def hold_back(number: int, warm: WarmProcesses) -> float:
    """When the copy went on, which had to wait while another could have begun."""
    end = time.monotonic() + START_SECONDS
    while number not in processes(warm):
        assert time.monotonic() < end, f"copy {number} was not started"
        time.sleep(0.01)
    child = psutil.Process(processes(warm)[number])
    child.suspend()
    time.sleep(HELD_BACK_SECONDS)
    child.resume()
    return time.monotonic()


def plan_with(**fields: Any) -> Plan:
    given: dict[str, Any] = {"device": "cpu", "host": "", "model": "", "sequence_length": 32, "per_device_train_batch_size": 1}
    return Plan(**{**given, "gradient_accumulation_steps": 1, "num_processes": 2, **fields})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_processes": 1}, "the plan has one process; add --nproc 2"),
        ({"layout": Layout(tensor_parallel=2)}, "whole model each, not tp 2; leave the layout out"),
        ({"optimizer_in_backward": True}, "--set optimizer_in_backward=false"),
    ],
)
def test_what_cannot_heal(fields: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as there:
        there.setattr("importlib.util.find_spec", lambda name: True)
        check_healing(plan_with())
        with pytest.raises(RequestError, match=words):
            check_healing(plan_with(**fields))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"pip install '.*\[heal\]'"):
        check_healing(plan_with())


@pytest.mark.parametrize("name", [*ALONE.model_dump(), "optimizer_in_backward"])
def test_a_field_that_cannot_heal_is_refused_before_anything_is_planned(name: str) -> None:
    value = next(value for value in ("2", "true", "other") if value != str(ALONE.model_dump().get(name, "false")).lower())
    with pytest.raises(RequestError, match=rf"--heal needs {name}=.* and {name}={value} was given; leave it out, or --heal"):
        fixed_for_healing((f"{name}={value}",), launched=False)


def test_only_whole_copies_are_planned() -> None:
    fixed = fixed_for_healing(("tensor_parallel=1", "sequence_parallel=False", "num_processes=2"), launched=False)
    assert fixed[:3] == ("tensor_parallel=1", "sequence_parallel=False", "num_processes=2")
    assert "fully_shard=no" in fixed and "optimizer_in_backward=false" in fixed and fixed.count("tensor_parallel=1") == 1
    with pytest.raises(RequestError, match="a launcher did here; use upshift train --nproc 2 --heal alone"):
        fixed_for_healing((), launched=True)
