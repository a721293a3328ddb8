"""Children of a fork server answer, die alone, and are gone with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from upshift.errors import JobFailed
from upshift.fork_server import ChildExit, ForkServer, fork_server
from upshift.value import Value

WORKER = """
import os, sys, time
from answers import Said
LOADED = os.getpid()

def main(path, answer):
    asked = Said.from_file(path).text
    answer(Said(text=f"{asked} by {os.getpid()} of {LOADED}"))
    if asked == "print":
        print("a warning", file=sys.stderr)
        print("{}", flush=True)
        answer(Said(text="again"))
    if asked == "sleep":
        time.sleep(600)
    if asked == "die":
        os._exit(7)
    if asked == "raise":
        raise ValueError("no such kernel")
"""
# Of a worker whose import asks CUDA something, as torch tells it in the forks of that process.
ASKS_CUDA = """
import torch

def lost():
    torch.cuda._is_in_bad_fork = lambda: True
os.register_at_fork(after_in_child=lost)
"""
ANSWERS = """
from upshift.value import Value

class Said(Value):
    text: str
"""


class Said(Value):
    text: str


@pytest.fixture(scope="module", params=["a fork", "asks CUDA"])
def worker(request: pytest.FixtureRequest) -> str:
    return WORKER if request.param == "a fork" else WORKER.replace("LOADED =", f"{ASKS_CUDA}LOADED =")


@pytest.fixture(scope="module")
def server(worker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    folder = tmp_path_factory.mktemp("worker")
    (folder / "worker_of_a_test.py").write_text(worker)
    (folder / "answers.py").write_text(ANSWERS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        with fork_server("worker_of_a_test") as started:
            yield started


def ask(server: ForkServer, text: str, limit: float = 60.0) -> tuple[list[str], ChildExit]:
    *said, ending = server.ask(Said(text=text), Said, limit_seconds=limit)
    assert isinstance(ending, ChildExit)
    return [one.text for one in said if isinstance(one, Said)], ending


def test_children_answer_and_die_alone(server: ForkServer, worker: str) -> None:
    (first, second), ending = ask(server, "print")
    assert second == "again" and (ending.exit, ending.signal, ending.last_words) == (0, None, "a warning")
    _, _, child, _, parent = first.split()
    assert (child == parent) == (worker != WORKER) and os.getpid() not in (int(child), int(parent))
    assert ask(server, "die")[1].exit == 7
    (raised,), ending = ask(server, "raise")
    _, _, child, _, loaded = raised.split()
    assert loaded == (parent if worker == WORKER else child)
    assert (ending.exit, ending.last_words) == (1, "ValueError: no such kernel")
    _, late = ask(server, "sleep", limit=0.5)
    assert late.timed_out and late.signal == 9 and ask(server, "die")[1].timed_out is False


@pytest.fixture
def written(worker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "worker_of_a_test.py").write_text(worker)
    (tmp_path / "answers.py").write_text(ANSWERS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)


def begun(server: ForkServer) -> psutil.Process:
    """A child that sleeps."""
    first = next(iter(server.ask(Said(text="sleep"), Said, limit_seconds=600.0)))
    assert isinstance(first, Said)
    return psutil.Process(int(first.text.split()[2]))


def ends(process: psutil.Process) -> bool:
    deadline = time.monotonic() + 10.0
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.05)
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.usefixtures("written")
def test_what_runs_ends_with_the_server() -> None:
    with fork_server("worker_of_a_test") as server:
        child = begun(server)
    assert ends(child)


ASKER = """
from answers import Said
from upshift.fork_server import fork_server
with fork_server("worker_of_a_test") as server:
    for said in server.ask(Said(text="sleep"), Said, limit_seconds=600.0):
        print(said.text, flush=True)
"""


@pytest.mark.usefixtures("written")
def test_what_runs_ends_with_who_asked() -> None:
    """Who was killed has no last words to the server."""
    with subprocess.Popen([sys.executable, "-c", ASKER], stdout=subprocess.PIPE, text=True) as asker:
        assert asker.stdout is not None
        words = asker.stdout.readline().split()
        child, server = psutil.Process(int(words[2])), psutil.Process(int(words[4]))
        asker.kill()
    assert ends(child) and ends(server)


@pytest.mark.usefixtures("written")
def test_an_interrupt_reaches_the_child_that_runs_and_the_next_one() -> None:
    with fork_server("worker_of_a_test") as server:
        answers = server.ask(Said(text="sleep"), Said, limit_seconds=600.0)
        next(answers)
        server.interrupt()
        for answer in (next(answers), list(server.ask(Said(text="sleep"), Said, limit_seconds=600.0))[-1]):
            assert isinstance(answer, ChildExit) and answer.signal == signal.SIGINT and not answer.timed_out


def test_a_worker_that_cannot_be_imported_says_why() -> None:
    with fork_server("no_such_worker") as server, pytest.raises(JobFailed, match="No module named 'no_such_worker'"):
        list(server.ask(Said(text="x"), Said, limit_seconds=60.0))
