"""After kill -9 of a process none of what it started is alive: ranks, trials, engines, copies that heal, forked tasks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from test_train import a_job, a_plan, home  # noqa: F401  a fixture

HELPERS = Path(__file__).parents[1] / "helpers"

LIMIT_SECONDS = 3.0
PATIENCE_SECONDS = 120.0

RUN = """
from pathlib import Path
from upshift.models.source import find_model
from upshift.training.job.job import Job, prepare_data, run_job
from upshift.training.loop.events import StepDone
job = Job.from_file(Path({job!r}))
data = prepare_data(find_model(job.model_reference), Path(job.data), sequence_length=32)
run_job(job, data, on_event=lambda event: print(type(event).__name__, flush=True), fresh_process=True)
"""
FORK_SERVER = """
import sleeping_worker, threading
from upshift.fork_server import fork_server
def ask():
    with fork_server("sleeping_worker") as server:
        for answer in server.ask(sleeping_worker.Asleep(pid=0), sleeping_worker.Asleep, limit_seconds=1e9):
            print("Asleep", flush=True)
{start}
"""
FORKED = """
import torch
torch.set_num_threads(2)
from sleeping_worker import nap
from upshift.models.tracing.fork_map import run_forked
import threading
threading.Timer(1.0, lambda: print("Asleep", flush=True)).start()
run_forked([nap, nap, nap])
"""
ENGINE = """
import asyncio
from upshift.serving.engine_process import EngineProcess
from upshift.serving.messages import EngineRequest
async def main():
    engine = EngineProcess(EngineRequest(**{request!r}))
    starting = asyncio.create_task(engine.start())
    while engine.pid is None:
        await asyncio.sleep(0.01)
    print("Asleep", flush=True)
    await starting
    print("Ready", flush=True)
    await asyncio.sleep(100)
asyncio.run(main())
"""
COMMAND = """
import subprocess, threading
from upshift import parent_process
def start():
    subprocess.Popen(parent_process.command("sleeping_worker"))
{start}
print("Asleep", flush=True)
import time
time.sleep(100)
"""
IN_THREAD = "thread = threading.Thread(target={0})\nthread.start()\nthread.join({1})"


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        for one in [process.pid, *pids_below(process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        process.wait()


def pids_below(pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def start(code: str, started: list[subprocess.Popen[str]]) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(HELPERS), str(HELPERS.parents[2] / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    started.append(process)
    return process


def wait_for(word: str, process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == word:
            return
    raise AssertionError(f"it ended before {word}")


def check_all_end(process: subprocess.Popen[str], *, at_least: int) -> None:
    below = pids_below(process.pid)
    assert len(below) >= at_least, below
    process.kill()
    process.wait()
    end = time.monotonic() + LIMIT_SECONDS
    while left := [pid for pid in below if alive(pid)]:
        assert time.monotonic() < end, [psutil.Process(pid).cmdline() for pid in left]
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("word", ["", "StepDone"], ids=["while it imports", "in its steps"])
def test_ranks(word: str, home: Path, tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:  # noqa: F811
    plan = a_plan(num_processes=2, per_device_train_batch_size=2)
    job = a_job(home, tmp_path / "run", plan=plan, max_steps=100_000)
    (tmp_path / "job.json").write_text(job.to_json())
    process = start(RUN.format(job=str(tmp_path / "job.json")), started)
    if word:
        wait_for(word, process)
    else:
        end = time.monotonic() + PATIENCE_SECONDS
        while not pids_below(process.pid):
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.01)
    check_all_end(process, at_least=2 if word else 1)


@pytest.mark.skipif(find_spec("torchft") is None, reason="needs torchft")
def test_copies_that_heal(home: Path, tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:  # noqa: F811
    plan = a_plan(num_processes=2, per_device_train_batch_size=2)
    job = a_job(home, tmp_path / "run", plan=plan, max_steps=100_000, heal=True)
    (tmp_path / "job.json").write_text(job.to_json())
    process = start(RUN.format(job=str(tmp_path / "job.json")), started)
    wait_for("StepDone", process)
    check_all_end(process, at_least=4)


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_fork_server_and_what_its_child_forks(in_thread: bool, started: list[subprocess.Popen[str]]) -> None:
    """Of trials, of races, and of the trials of a search, which threads ask for."""
    process = start(FORK_SERVER.format(start=IN_THREAD.format("ask", "") if in_thread else "ask()"), started)
    wait_for("Asleep", process)
    check_all_end(process, at_least=3)


def test_forked_tasks(started: list[subprocess.Popen[str]]) -> None:
    process = start(FORKED, started)
    wait_for("Asleep", process)
    check_all_end(process, at_least=2)


def test_an_engine_that_is_starting(home: Path, tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:  # noqa: F811
    process = start(ENGINE.format(request=json.loads(engine_request(with_weights(home / "llama", tmp_path / "llama")))), started)
    wait_for("Asleep", process)
    time.sleep(1.0)
    check_all_end(process, at_least=1)


def with_weights(folder: Path, output: Path) -> Path:
    """Copy a folder of a config and a tokenizer, and add random weights: an engine ends at once where there are none."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(folder, output)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(output)
    return output


def engine_request(model: Path) -> str:
    from upshift.serving.messages import EngineRequest

    fields = EngineRequest.model_fields
    needed = {"model": str(model)}
    assert {name for name, field in fields.items() if field.is_required()} <= needed.keys(), fields
    return EngineRequest(**needed).to_json()


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_child_lives_as_long_as_the_process(in_thread: bool, started: list[subprocess.Popen[str]]) -> None:
    """And longer than the thread that started it."""
    process = start(COMMAND.format(start=IN_THREAD.format("start", "") if in_thread else "start()"), started)
    wait_for("Asleep", process)
    time.sleep(2.0)
    (child,) = pids_below(process.pid)
    assert alive(child)
    check_all_end(process, at_least=1)


@pytest.mark.parametrize("by_kernel", [False, True])
def test_a_parent_that_is_gone_already(by_kernel: bool) -> None:
    end = f"end_with(os.getppid() + 1, by_kernel={by_kernel})"
    code = f"from upshift.parent_process import end_with; import os; {end}; print('here')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL and not done.stdout
