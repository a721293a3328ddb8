"""Tests on a GPU that is not there. Each process of a test has the device by its environment (pretended_gpus.py).

Commands, and the processes that they start, are forks of one process that has imported everything (forked_command.py). So that
a process finds the device by itself is shown by tests that start new ones.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pretended_gpus
import pytest
from pretended_gpus import Run
from warm_processes import WarmProcesses

from shared_traces import session_folder, share_traces

RUN_SECONDS = 900.0
MOST_GPUS = "8xh100"  # of the process that commands are forks of: each fork has the GPUs of its own environment
RECORD = "FUNCTIONS_THAT_RAN"  # is begun when a process starts
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = pretended_gpus.missing()
    if reason is None:
        return
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def cache(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the cache of a test's processes. Only the traces in it are also other tests'."""
    return share_traces(tmp_path / "cache", session_folder(tmp_path_factory.getbasetemp()), "pretended_gpu")


@pytest.fixture(scope="session")
def forked_commands() -> Iterator[WarmProcesses]:
    variables = pretended_gpus.environment(MOST_GPUS)
    path = os.pathsep.join([variables["PYTHONPATH"], str(HERE)])
    commands = WarmProcesses("forked_command", variables | {"PYTHONPATH": path}, taken=("OMP_NUM_THREADS", "PYTHONPATH"))
    yield commands
    commands.close()


@pytest.fixture(scope="session")
def run_on_gpus(forked_commands: WarmProcesses, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a function that runs Python on these GPUs: ``run_on_gpus("8xh100", "script.py")``."""

    def run(gpus: str, *command: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = pretended_gpus.environment(gpus, **variables)
        folder = cwd or tmp_path_factory.getbasetemp()
        if RECORD not in environment:
            return forked_commands.run(*command, timeout=RUN_SECONDS, cwd=folder, environment=environment)
        return run_anew(command, folder, environment)

    return run


def run_anew(command: Sequence[str], cwd: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], env=environment, cwd=cwd, capture_output=True, text=True, timeout=RUN_SECONDS, check=False,
    )  # fmt: skip


@pytest.fixture
def on_gpus(tmp_path: Path, cache: Path, run_on_gpus: Run) -> Run:
    """Return a function that runs Python on these GPUs in the test's folder: ``on_gpus("2xh100", "-m", "upshift", "doctor")``."""

    def run(gpus: str, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return run_on_gpus(gpus, *command, cwd=tmp_path, **{"UPSHIFT_CACHE": str(cache), **variables})

    return run


@pytest.fixture
def in_new_process(tmp_path: Path, cache: Path) -> Run:
    """Return what ``on_gpus`` does, in a process that imports everything anew: for tests about imports and the probe itself."""

    def run(gpus: str, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return run_anew(command, tmp_path, pretended_gpus.environment(gpus, **{"UPSHIFT_CACHE": str(cache), **variables}))

    return run


@pytest.fixture(scope="session")
def probes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("probes")


@pytest.fixture
def keep_probe(on_gpus: Run, cache: Path, probes: Path) -> Callable[[str], None]:
    """Return a function that gives the test's cache the probe of these GPUs. A process makes it once in a session."""

    def keep(gpus: str) -> None:
        if not (probes / gpus).is_dir():
            done = on_gpus(gpus, str(HERE / "keep_probe.py"), UPSHIFT_CACHE=str(probes / gpus))
            assert done.returncode == 0, done.stderr
        shutil.copytree(probes / gpus / "probe", cache / "probe", dirs_exist_ok=True)

    return keep
