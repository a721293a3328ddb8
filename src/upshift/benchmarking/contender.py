"""Run a contender of a comparison in a fresh process: a command, timed whole, or a function, timed without its imports."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from upshift.benchmarking.call_process import NOT_FOUND
from upshift.benchmarking.harness import LOG_TAIL, TreeWatcher
from upshift.errors import JobFailed, RequestError

FUNCTION = re.compile(r"(?:[A-Za-z_][\w.]*|\S+\.py):[A-Za-z_][\w.]*")  # module:function, or file.py:function
Runnable = str | Sequence[str] | Callable[[], object]


class Sample(NamedTuple):
    """The measurements of one run of a contender."""

    seconds: float
    cpu_seconds: float  # CPU time of all its threads and processes
    resident_bytes: int  # the highest sum over its processes, sampled; 0: it ended before the first sample
    result: float | None  # the number that the function returned, or that the command printed last


class Contender(NamedTuple):
    """One side of a comparison, as a command."""

    label: str
    command: tuple[str, ...]
    is_function: bool


def make_contender(runnable: Runnable) -> Contender:
    """Return the contender for a command (text that no shell reads, or words), a function, or ``module:function``."""
    if callable(runnable):
        name = _name_of(runnable)
    elif isinstance(runnable, str) and FUNCTION.fullmatch(runnable.strip()):
        name = runnable.strip()
    else:
        return _command(runnable)
    return Contender(name, (sys.executable, "-m", "upshift.benchmarking.call_process", name), True)


def _command(command: str | Sequence[str]) -> Contender:
    try:
        arguments = tuple(shlex.split(command)) if isinstance(command, str) else tuple(map(str, command))
    except ValueError as error:
        raise RequestError(f"{command!r} is no command: {error}; close its quotes") from None
    if not arguments or shutil.which(arguments[0]) is None:
        problem = f"{arguments[0]!r} is not a program that can be found" if arguments else "an empty text is no command"
        raise RequestError(f"{problem}; give a command ('sh -c \"...\"' where a shell should read it) or module:function")
    return Contender(shlex.join(arguments), arguments, False)


def _name_of(function: Callable[[], object]) -> str:
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", "<")
    home = module
    if module == "__main__":
        home = getattr(sys.modules["__main__"], "__file__", None)
    if home is None or "<" in name:
        raise RequestError(
            f"{name!r} cannot be found by a fresh process; give a function at the top of a file, or module:function"
        )
    return f"{home}:{name}"


def run_once(contender: Contender, *, timeout_seconds: float) -> Sample:
    """Run a contender once. Raise JobFailed with the end of its output, or RequestError if the function does not exist."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        start = time.perf_counter()
        process = subprocess.Popen(
            contender.command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True
        )
        usage, seconds, is_late = _wait(process, start, timeout_seconds)
        if is_late:
            raise JobFailed(f"{contender.label} took longer than {timeout_seconds:g} s; --timeout allows more")
        if contender.is_function and process.returncode == NOT_FOUND:
            raise RequestError(
                f"{contender.label} is no function: {_read_end(errors)}; give module:function, or file.py:function"
            )
        if process.returncode:
            raise JobFailed(
                f"{contender.label} failed (exit code {process.returncode}): {_read_end(errors) or 'it said nothing'}"
            )
        last_line = (_read_end(output).splitlines() or [""])[-1]
    if contender.is_function:
        answer: dict[str, Any] = json.loads(last_line)
        return Sample(answer["seconds"], answer["cpu_seconds"], usage.resident_bytes, answer["result"])
    return Sample(seconds, usage.cpu_seconds, usage.resident_bytes, _finite_number(last_line))


class _Usage(NamedTuple):
    cpu_seconds: float
    resident_bytes: int


def _wait(process: subprocess.Popen[bytes], start: float, timeout_seconds: float) -> tuple[_Usage, float, bool]:
    """Wait for a process, and kill the processes that it started. Return (its usage, its seconds, whether it timed out).

    It is reaped by wait4, the only call that gives its processor time."""
    timed_out = threading.Event()

    def kill_on_timeout() -> None:
        timed_out.set()
        _kill_group(process.pid)

    timer = threading.Timer(timeout_seconds, kill_on_timeout)
    watcher = TreeWatcher(process.pid)
    timer.start()
    watcher.start()
    try:
        _, status, usage = os.wait4(process.pid, 0)
    finally:
        timer.cancel()
        watcher.stop_event.set()
        _kill_group(process.pid)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    return _Usage(usage.ru_utime + usage.ru_stime, watcher.peak_bytes), seconds, timed_out.is_set()


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError):  # it ended already
        os.killpg(pid, signal.SIGKILL)


def _read_end(file: Any) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - LOG_TAIL))
    return str(file.read().decode(errors="replace")).strip()


def _finite_number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
