"""Tests on a GPU that is not there. Each process of a test has the device by its environment (pretended_gpus.py)."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pretended_gpus
import pytest
from pretended_gpus import Run

from shared_traces import session_folder, share_traces

RUN_SECONDS = 900.0
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


@pytest.fixture
def on_gpus(tmp_path: Path, cache: Path) -> Run:
    """Return a function that runs Python on these GPUs: ``on_gpus("2xh100", "-m", "upshift", "doctor")``."""

    def run(gpus: str, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = pretended_gpus.environment(gpus, **{"UPSHIFT_CACHE": str(cache), **variables})
        return subprocess.run(
            [sys.executable, *command], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=RUN_SECONDS,
            check=False,
        )  # fmt: skip

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
