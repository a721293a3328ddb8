"""Call one function of a comparison and print how long a call takes. This process is started anew for each round.

python -m upshift.benchmarking.call_process MODULE:FUNCTION or FILE.py:FUNCTION

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
from types import ModuleType, SimpleNamespace
from typing import Any

SHORTEST, LONG_ENOUGH = 0.001, 0.15  # seconds of a sample, and of all samples
NOT_FOUND = 64  # the exit code; sysexits.h has it for a command that is used wrongly


class NotFound(Exception):
    """An error for a file, module or function that does not exist."""


def find(name: str) -> Callable[[], Any]:
    """Return the function of that name. Raise NotFound, or what the file or module itself raises."""
    home, _, attribute = name.rpartition(":")
    if home.endswith(".py"):
        if not os.path.isfile(home):
            raise NotFound(f"there is no file {home}")
        found: Any = SimpleNamespace(**runpy.run_path(home, run_name="__compared__"))
    else:
        found = _import(home)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise NotFound(f"{home} has no {attribute}")
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def _import(home: str) -> ModuleType:
    sys.path.insert(0, os.getcwd())
    try:
        return import_module(home)
    except ModuleNotFoundError as error:
        if f"{home}.".startswith(f"{error.name}."):
            raise NotFound(f"there is no module {home}") from None
        raise  # of one that it imports


def measure(call: Callable[[], Any]) -> dict[str, Any]:
    """Return ``seconds`` and ``cpu_seconds`` (all threads) of the quickest call, and the last call's result if it is a number.

    The quickest, as timeit's manual says: what makes others slower is the machine. On two shared cores the ratio of two
    processes varied by 1.1 % by their quickest calls and by 3.8 % by their means.
    """
    result, calls, began = call(), 1, time.perf_counter()
    samples: list[tuple[float, float]] = []
    while not samples or time.perf_counter() - began < LONG_ENOUGH:
        start, cpu = time.perf_counter(), time.process_time()
        for _ in range(calls):
            result = call()
        took = time.perf_counter() - start, time.process_time() - cpu
        if took[0] < SHORTEST and not samples:
            calls *= 2  # too short for the clock: several are one sample
        else:
            samples.append(took)
    seconds, cpu_seconds = (min(one) / calls for one in zip(*samples, strict=True))
    number = float(result) if isinstance(result, int | float) else None
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "result": number}


if __name__ == "__main__":
    try:
        function = find(sys.argv[1])
    except NotFound as problem:
        sys.stderr.write(f"{problem}\n")
        sys.exit(NOT_FOUND)
    answer = measure(function)
    sys.stdout.flush()
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
