"""Run the tests that need a real vLLM, in an environment of its own that is kept between runs: ``make test-vllm``.

Without room on the disk, or without the packages, it says so and ends well: the same tests run with a pretended engine in
``make test``."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from upshift.errors import JobFailed, NothingFits, RequestError
from upshift.inference.engine_environment import INSTALLED, environment_python, find_environment
from upshift.inference.engine_install import check_install, install, plan_install

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".venv-vllm"
KEY = "upshift-commands"  # the file with the commands that made the environment
VARIABLE = "UPSHIFT_VLLM_PYTHON"
TESTS = (
    "tests/cpu/inference/test_generate_vllm.py",
    "tests/cpu/inference/test_generate_vllm_stored.py",
    "tests/cpu/serving/test_serve_vllm.py",
)


class RealOnly:
    """A plugin of pytest that leaves out the tests that need no real vLLM."""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if any(VARIABLE in str(mark.kwargs) for mark in item.iter_markers("skipif"))]


def make_environment() -> Path:
    """Return the interpreter of the environment. Make it where there is none, or where other commands have made it.

    Raise NothingFits, JobFailed or RequestError if it cannot be made."""
    plan = plan_install(FOLDER, "cpu")
    key = repr(plan.commands[1:])  # the first one has the path of this interpreter
    key_file = FOLDER / KEY
    if not (FOLDER / INSTALLED).is_file() or not key_file.is_file() or key_file.read_text() != key:
        shutil.rmtree(FOLDER, ignore_errors=True)
        check_install(plan)
        install(plan, print)
        key_file.write_text(key)
    return environment_python(FOLDER)


def main() -> int:
    try:
        python = Path(os.environ[VARIABLE]) if VARIABLE in os.environ else make_environment()
        environment = find_environment(python)
    except (NothingFits, JobFailed, RequestError) as problem:
        print(f"make test-vllm: not run: {problem}")
        return 0
    print(f"make test-vllm: {environment.describe() if environment else python}", flush=True)
    os.environ[VARIABLE] = str(python)
    return int(pytest.main([*(str(ROOT / test) for test in TESTS), "-n", "0", "--durations=5", *sys.argv[1:]], [RealOnly()]))


if __name__ == "__main__":
    sys.exit(main())
