"""Run a script of the tests as a program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def run_script(script: str | Path, *arguments: str, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    """Return the script's exit code and what it printed. Kill it and raise TimeoutExpired after ``timeout`` seconds."""
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout, check=False)
