"""Say which pinned libraries have newer versions: `python newer.py constraints.txt NAME...` prints "name pinned -> newest" lines.

Ends with 0 where there are newer ones, 3 where there are none, and 4 where the registry does not answer.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def pinned(constraints: Path) -> dict[str, str]:
    lines = constraints.read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def newest(name: str) -> str | None:
    """Return what pip would install, or None where the registry does not answer."""
    command = [sys.executable, "-m", "pip", "index", "versions", name, "--retries", "1", "--timeout", "20"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    match = re.match(r"\S+ \(([^)]+)\)", answer.stdout)
    return match[1] if match else None


def main() -> None:
    versions = pinned(Path(sys.argv[1]))
    latest = {name: newest(name) for name in sys.argv[2:]}
    if None in latest.values():
        print("the registry does not answer for", ", ".join(name for name, version in latest.items() if version is None))
        sys.exit(4)
    newer = {name: version for name, version in latest.items() if version != versions[name]}
    for name, version in newer.items():
        print(f"{name} {versions[name]} -> {version}")
    sys.exit(0 if newer else 3)


if __name__ == "__main__":
    main()
