"""A page in a real browser without a screen."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--virtual-time-budget=8000", "--enable-logging=stderr",
)  # fmt: skip


def browser() -> str:
    found = next((path for path in map(shutil.which, NAMES) if path), None)
    if found is None:
        pytest.skip(f"no browser on this machine: looked for {', '.join(NAMES)}")
    return found


def opened(page: Path, profile: Path, *, width: int = 800) -> tuple[str, list[str]]:
    """The page after its scripts ran, and what they said on the console."""
    command = [browser(), *FLAGS, f"--window-size={width},800", f"--user-data-dir={profile}", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
