"""One writer at a time for an output: who comes second is told who is first, and touches nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_parent_process import RUN, start, started, wait_for  # noqa: F401  a fixture
from test_train import a_job, home, prepared  # noqa: F401  fixtures
from transformers import AutoConfig, AutoModelForCausalLM

from upshift.errors import RequestError
from upshift.inference.quantize import check_output
from upshift.loading.output_lock import LOCK_NAME, check_free, claimed, lock_file_beside, locked
from upshift.loading.rewrite.rewrite import shard
from upshift.training.data.dataset import TrainingData
from upshift.training.job.job import run_job
from upshift.training.loop.state import RUN_NAME

HOLDER = """
import sys, time
from pathlib import Path
from upshift.loading.output_lock import claimed, locked, lock_file_beside
output = Path(sys.argv[1])
with claimed(output) if sys.argv[2] == "folder" else locked(output, lock_file_beside(output)):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holders() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def hold(output: Path, kind: str, holders: list[subprocess.Popen[str]]) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLDER, str(output), kind]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    holders.append(process)
    wait_for("held", process)
    return process


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_holder_in_another_process(kind: str, tmp_path: Path, holders: list[subprocess.Popen[str]]) -> None:
    output = tmp_path / "out"
    lock_file = output / LOCK_NAME if kind == "folder" else lock_file_beside(output)
    holder = hold(output, kind, holders)
    words = rf"out is being written by process {holder.pid} on {socket.gethostname()}; wait until that ends, or give another"
    with pytest.raises(RequestError, match=words), claimed(output) if kind == "folder" else locked(output, lock_file):
        pass
    with pytest.raises(RequestError, match=words):
        check_free(output, lock_file)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert lock_file.exists()
    with claimed(output) if kind == "folder" else locked(output, lock_file):
        assert lock_file.read_text() == f"{os.getpid()} {socket.gethostname()}"
    assert not lock_file.exists()
    second = hold(output, kind, holders)
    second.communicate("")
    assert second.returncode == 0 and not lock_file.exists()


def test_claims_are_nested_in_one_thread_alone(tmp_path: Path) -> None:
    refused: list[str] = []

    def other() -> None:
        try:
            with claimed(tmp_path):
                pass
        except RequestError as error:
            refused.append(str(error))

    with claimed(tmp_path), claimed(tmp_path):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(refused) == 1 and "another thread" in refused[0]
    with claimed(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_an_error_leaves_no_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError), claimed(tmp_path / "new"):
        raise ValueError
    assert not (tmp_path / "new").exists()
    with pytest.raises(ValueError), claimed(tmp_path / "new"):
        (tmp_path / "new" / "file").touch()
        raise ValueError
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["file"]
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match="is a file; give a directory"), claimed(tmp_path / "file"):
        pass


def test_a_second_run_does_not_touch_the_first(
    home: Path, prepared: Callable[[str], TrainingData], tmp_path: Path, started: list[subprocess.Popen[str]]  # noqa: F811
) -> None:
    output = tmp_path / "run"
    job = a_job(home, output, max_steps=400, save_steps=400)
    (tmp_path / "job.json").write_text(job.to_json())
    first = start(RUN.format(job=str(tmp_path / "job.json")), started)
    wait_for("StepDone", first)
    before = (output / RUN_NAME).read_bytes()
    for other in (job, job.changed(resume=True), job.changed(overwrite=True)):
        with pytest.raises(RequestError, match=rf"is being written by process {first.pid} on"):
            run_job(other, prepared("llama"))
    assert (output / RUN_NAME).read_bytes() == before
    first.communicate()
    assert first.returncode == 0 and (output / "model.safetensors").is_file() and not (output / LOCK_NAME).exists()


def test_after_a_kill_the_next_run_goes_on_at_once(
    home: Path, prepared: Callable[[str], TrainingData], tmp_path: Path, started: list[subprocess.Popen[str]]  # noqa: F811
) -> None:
    output = tmp_path / "run"
    job = a_job(home, output, max_steps=2000, save_steps=1, model="gpt2")
    (tmp_path / "job.json").write_text(job.to_json())
    first = start(RUN.format(job=str(tmp_path / "job.json")), started)
    wait_for("Saved", first)
    first.kill()
    record = run_job(job.changed(resume=True, stop_after_tokens=1), prepared("gpt2"))
    assert record.details["resumed_from_step"] >= 1


def test_other_commands(home: Path, tmp_path: Path, holders: list[subprocess.Popen[str]]) -> None:  # noqa: F811
    hold(tmp_path / "shards", "folder", holders)
    hold(tmp_path / "rounded", "file", holders)
    with pytest.raises(RequestError, match="is being written by process"):
        check_output(tmp_path / "rounded", overwrite=False)
    model = tmp_path / "model"
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(home / "llama")).save_pretrained(model)
    with pytest.raises(RequestError, match="is being written by process"):
        shard(str(model), tmp_path / "shards", max_shard_bytes=10**9, progress=lambda done, total: None)
