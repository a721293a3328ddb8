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
from pathlib import Path
from typing import Any, NamedTuple

from upshift.benchmarking.call_process import NOT_FOUND
from upshift.benchmarking.harness import LOG_TAIL, TreeWatcher
from upshift.errors import JobFailed, RequestError

FUNCTION = re.compile(r"(?:[A-Za-z_][\w.]*|\S+\.py):[A-Za-z_][\w.]*")  # of a module, or of a file
Runnable = str | Sequence[str] | Callable[[], object]


class Sample(NamedTuple):
    seconds: float
    cpu_seconds: float  # of all its threads and processes
    resident_bytes: int  # the highest sum over its processes, sampled; 0: over before the first sample
    result: float | None  # the number that the function returned, or that the command's last line is


class Contender(NamedTuple):
    label: str
    command: tuple[str, ...]
    is_function: bool


def contender(given: Runnable) -> Contender:
    """Return the contender for a command as text (no shell reads it) or as words, or for a function or ``module:function``."""
    if callable(given):
        name = _name_of(given)
    elif isinstance(given, str) and FUNCTION.fullmatch(given.strip()):
        name = given.strip()
    else:
        return _command(given)
    return Contender(name, (sys.executable, "-m", "upshift.benchmarking.call_process", name), True)


def _command(given: str | Sequence[str]) -> Contender:
    try:
        words = tuple(shlex.split(given)) if isinstance(given, str) else tuple(map(str, given))
    except ValueError as error:
        raise RequestError(f"{given!r} is no command: {error}; close its quotes") from None
    if not words or shutil.which(words[0]) is None:
        what = f"{words[0]!r} is not a program that can be found" if words else "an empty text is no command"
        raise RequestError(f"{what}; give a command ('sh -c \"...\"' where a shell should read it) or module:function")
    return Contender(shlex.join(words), words, False)


def _name_of(function: Callable[[], object]) -> str:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<")
    home = module
    if module == "__main__":
        home = getattr(sys.modules["__main__"], "__file__", None)
    if home is None or "<" in name:
        raise RequestError(
            f"{name!r} cannot be found by a fresh process; give a function at the top of a file, or module:function"
        )
    return f"{home}:{name}"


def run_once(given: Contender, *, timeout_seconds: float) -> Sample:
    """Run a contender. Raise JobFailed with the end of its output, RequestError for a function that does not exist."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        start = time.perf_counter()
        process = subprocess.Popen(
            given.command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True
        )  # fmt: skip
        usage, seconds, late = _wait(process, start, timeout_seconds)
        if late:
            raise JobFailed(f"{given.label} took longer than {timeout_seconds:g} s; --timeout allows more")
        if given.is_function and process.returncode == NOT_FOUND:
            raise RequestError(f"{given.label} is no function: {_end(errors)}; give module:function, or file.py:function")
        if process.returncode:
            raise JobFailed(f"{given.label} failed (exit code {process.returncode}): {_end(errors) or 'it said nothing'}")
        last = (_end(output).splitlines() or [""])[-1]
    if given.is_function:
        answer: dict[str, Any] = json.loads(last)
        return Sample(answer["seconds"], answer["cpu_seconds"], usage.resident_bytes, answer["result"])
    return Sample(seconds, usage.cpu_seconds, usage.resident_bytes, _number(last))


class _Usage(NamedTuple):
    cpu_seconds: float
    resident_bytes: int


def _wait(process: subprocess.Popen[bytes], start: float, timeout_seconds: float) -> tuple[_Usage, float, bool]:
    """Wait for a process and return its usage, its seconds, and whether it was too late. Processes that it started end with it.

    It is reaped here, because only wait4 gives its processor time."""
    late = threading.Event()

    def end_it() -> None:
        late.set()
        _end_group(process.pid)

    timer, watcher = threading.Timer(timeout_seconds, end_it), TreeWatcher(process.pid)
    timer.start()
    watcher.start()
    try:
        _, status, used = os.wait4(process.pid, 0)
    finally:
        timer.cancel()
        watcher.stopping.set()
        _end_group(process.pid)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    return _Usage(used.ru_utime + used.ru_stime, watcher.highest), seconds, late.is_set()


def _end_group(pid: int) -> None:
    with suppress(ProcessLookupError):  # it ended
        os.killpg(pid, signal.SIGKILL)


def _end(file: Any) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - LOG_TAIL))
    return str(file.read().decode(errors="replace")).strip()


def _number(text: str) -> float | None:
    try:
        found = float(text)
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def short(label: str) -> str:
    """Shorten a label for a table: each path becomes its last part."""
    words = [Path(word).name if "/" in word else word for word in label.split()]
    return " ".join(words)[:60]
