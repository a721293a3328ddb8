"""Run a script of the tests in a fork of a process that has imported what the scripts of ranks need (warm_scripts.py)."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

import parallel_runs

import upshift.benchmarking.meters
import upshift.training.job.job  # noqa: F401

parallel_runs.import_all()


def run_folder(folder: Path) -> None:
    """Run the script of command.json as ``python SCRIPT ARGUMENTS`` does. The folder gets what it prints."""
    script, *arguments = json.loads((folder / "command.json").read_text())
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        with (folder / name).open("w") as stream:
            os.dup2(stream.fileno(), descriptor)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
