"""Run a command of Python in a fork of a process that has imported what the scripts of ranks need (warm_scripts.py)."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import parallel_runs

import upshift.benchmarking.meters
import upshift.training.job.job  # noqa: F401

parallel_runs.import_all()


def run_folder(folder: Path) -> None:
    """Run the command of command.json as ``python ARGUMENTS`` does. The folder gets what it prints."""
    command = read_command(folder)
    run_python(command["arguments"])


def read_command(folder: Path) -> dict[str, Any]:
    """Return the command, whose working folder and environment this process takes. It prints into files of ``folder``."""
    command: dict[str, Any] = json.loads((folder / "command.json").read_text())
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        with (folder / name).open("w") as stream:
            os.dup2(stream.fileno(), descriptor)
    if command["environment"] is not None:
        os.environ.clear()
        os.environ.update(command["environment"])
    if command["cwd"] is not None:
        os.chdir(command["cwd"])
    return command


def run_python(arguments: list[str]) -> None:
    """Run ``-m MODULE``, ``-c CODE`` or a script, with its arguments, as the main module."""
    first, *rest = arguments
    if first == "-m":
        sys.argv = rest
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        exec(compile(rest[0], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(first).parent))
        runpy.run_path(first, run_name="__main__")
