"""Call one function of a comparison and print how long a call takes. Each round starts this process anew.

python -m upshift.benchmarking.call_process MODULE:FUNCTION or FILE.py:FUNCTION

The imports and the first call are not timed. More calls follow until they took long enough for the clock.
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

MIN_SAMPLE_SECONDS = 0.001
MIN_TOTAL_SECONDS = 0.15
NOT_FOUND = 64  # the exit code; sysexits.h has it for a command that is used wrongly


class NotFound(Exception):
    """The file, module or function does not exist."""


def find_function(name: str) -> Callable[[], Any]:
    """Return the function of that name. Raise NotFound, or any exception of the file or module itself."""
    origin, _, attribute = name.rpartition(":")
    if origin.endswith(".py"):
        if not os.path.isfile(origin):
            raise NotFound(f"there is no file {origin}")
        target: Any = SimpleNamespace(**runpy.run_path(origin, run_name="__compared__"))
    else:
        target = _import(origin)
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise NotFound(f"{origin} has no {attribute}")
        target = getattr(target, part)
    return target  # type: ignore[no-any-return]


def _import(module_name: str) -> ModuleType:
    sys.path.insert(0, os.getcwd())
    try:
        return import_module(module_name)
    except ModuleNotFoundError as error:
        if f"{module_name}.".startswith(f"{error.name}."):
            raise NotFound(f"there is no module {module_name}") from None
        raise  # a module that this one imports does not exist


def time_quickest_call(call: Callable[[], Any]) -> dict[str, Any]:
    """Return ``seconds`` and ``cpu_seconds`` (all threads) of the quickest call, and the last call's result if it is a number.

    The quickest call counts because slower ones are slowed by the machine, as timeit's manual says. On two shared cores the
    ratio of two processes varied by 1.1 % by their quickest calls and by 3.8 % by their means.
    """
    result = call()
    calls_per_sample = 1
    first_start = time.perf_counter()
    samples: list[tuple[float, float]] = []
    while not samples or time.perf_counter() - first_start < MIN_TOTAL_SECONDS:
        start = time.perf_counter()
        cpu = time.process_time()
        for _ in range(calls_per_sample):
            result = call()
        sample = time.perf_counter() - start, time.process_time() - cpu
        if sample[0] < MIN_SAMPLE_SECONDS and not samples:
            calls_per_sample *= 2  # one call is too short for the clock: a sample is several calls
        else:
            samples.append(sample)
    seconds, cpu_seconds = (min(times) / calls_per_sample for times in zip(*samples, strict=True))
    number = float(result) if isinstance(result, int | float) else None
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "result": number}


if __name__ == "__main__":
    try:
        function = find_function(sys.argv[1])
    except NotFound as problem:
        sys.stderr.write(f"{problem}\n")
        sys.exit(NOT_FOUND)
    answer = time_quickest_call(function)
    sys.stdout.flush()
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
