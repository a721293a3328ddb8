"""Tests on a GPU that is not there. Each process of a test has the device by its environment (pretended_gpus.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pretended_gpus
import pytest
from pretended_gpus import Run

RUN_SECONDS = 900.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = pretended_gpus.missing()
    if reason is None:
        return
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def on_gpus(tmp_path: Path) -> Run:
    """Return a function that runs Python on these GPUs: ``on_gpus("2xh100", "-m", "upshift", "doctor")``."""

    def run(gpus: str, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = pretended_gpus.environment(gpus, UPSHIFT_CACHE=str(tmp_path / "cache"), **variables)
        return subprocess.run(
            [sys.executable, *command], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=RUN_SECONDS,
            check=False,
        )  # fmt: skip

    return run
