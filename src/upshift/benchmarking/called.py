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

LONG_ENOUGH = 0.15  # seconds


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
    """Of the quickest call: ``seconds``, ``cpu_seconds`` of all threads, and the number that the last one returned, if it did.

    The quickest, as timeit's manual says: what makes others slower is the machine. On two shared cores the ratio of two processes
    varied by 1.1 % by their quickest calls and by 3.8 % by their means.
    """
    call()
    seconds, cpu_seconds = [], []
    while sum(seconds) < LONG_ENOUGH:
        start, cpu = time.perf_counter(), time.process_time()
        result = call()
        cpu_seconds.append(time.process_time() - cpu)
        seconds.append(time.perf_counter() - start)
    number = float(result) if isinstance(result, int | float) else None
    return {"seconds": min(seconds), "cpu_seconds": min(cpu_seconds), "result": number}


if __name__ == "__main__":
    answer = measure(find(sys.argv[1]))
    sys.stdout.flush()
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
