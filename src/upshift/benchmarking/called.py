"""The process that calls one function of a comparison and says how long a call takes: started anew for each round.

python -m upshift.benchmarking.called MODULE:FUNCTION or FILE.py:FUNCTION

Imports and a first call are not counted; calls follow until they took long enough for the clock.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

LONG_ENOUGH = 0.05  # seconds


def find(name: str) -> Callable[[], Any]:
    home, _, attribute = name.rpartition(":")
    if home.endswith(".py"):
        found: Any = runpy.run_path(home, run_name="__compared__")[attribute]
        return found  # type: ignore[no-any-return]
    sys.path.insert(0, os.getcwd())
    found = import_module(home)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def measure(call: Callable[[], Any]) -> dict[str, Any]:
    """Of one call: ``seconds``, ``cpu_seconds`` of all threads, and the number that it returned, if it did."""
    call()
    calls, cpu, start = 0, time.process_time(), time.perf_counter()
    while not calls or time.perf_counter() - start < LONG_ENOUGH:
        result = call()
        calls += 1
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    number = float(result) if isinstance(result, int | float) else None
    return {"seconds": seconds / calls, "cpu_seconds": cpu / calls, "result": number}


if __name__ == "__main__":
    answer = measure(find(sys.argv[1]))
    sys.stdout.flush()
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
