"""Say which functions of src/upshift that name CUDA, NCCL or NVML the tests on pretended GPUs run, and why others do not run.

    python tests/pretended_gpu/functions_that_ran.py [OPTIONS OF PYTEST]

The reasons are in not_run.json. The exit code is 1 if a function has neither run nor a reason, or if it ran and has a reason.
FUNCTIONS_THAT_RAN=FILE adds to a file of an earlier call, or of commands on pretended GPUs by hand. The tests take six minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RECORD = "FUNCTIONS_THAT_RAN"


def load(name: str) -> Any:
    """Return a module of the device's folder, which stays out of sys.path: its pynvml is no module for other tests."""
    spec = spec_from_file_location(name, HERE / "device" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


record_functions = load("record_functions")


def reasons() -> dict[str, str]:
    """Return why functions do not run on pretended GPUs, by function."""
    found: dict[str, str] = json.loads((HERE / "not_run.json").read_text(encoding="utf-8"))
    return found


def lines_of(ran: set[str]) -> tuple[list[str], bool]:
    """Return the report, and whether each function either ran or has a reason. ``ran``: the lines of the record."""
    functions = record_functions.all_functions()
    left = [name for name in functions if name not in ran]
    named = reasons()
    lines = [f"{len(functions) - len(left)} of {len(functions)} functions that name CUDA, NCCL or NVML ran"]
    lines += [f"not run: {name}: {named[name]}" for name in left if name in named]
    one_sided = sorted(line for line in ran if line.endswith((" True", " False")) and other_side(line) not in ran)
    lines += [f"only one side: {line}" for line in one_sided]
    wrong = [f"NOT RUN, WITHOUT A REASON: {name}" for name in left if name not in named]
    wrong += [f"RAN, OR IS GONE: take it off not_run.json: {name}" for name in named if name not in left]
    return lines + wrong, not wrong


def other_side(line: str) -> str:
    condition, _, side = line.rpartition(" ")
    return f"{condition} {side == 'False'}"


def main(options: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        record = Path(os.environ.get(RECORD, f"{folder}/record"))
        record.touch()
        command = [sys.executable, "-m", "pytest", "-q", str(HERE), *options]
        tested = subprocess.run(command, env={**os.environ, RECORD: str(record.resolve())}, check=False)
        lines, is_whole = lines_of(set(record.read_text(encoding="utf-8").splitlines()))
    print("\n".join(lines))
    return tested.returncode or int(not is_whole)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
