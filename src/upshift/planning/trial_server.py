"""The process behind ``trial_server``: imports the worker once, then forks a child for each request on standard input."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from typing import Any

POLL_SECONDS = 0.02


def main(worker_name: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print goes to the log, not into the answers
    worker = importlib.import_module(worker_name)
    for line in sys.stdin:
        task = json.loads(line)
        ending = _run_child(worker, task)
        answers.write(json.dumps(ending) + "\n")
        answers.flush()


def _run_child(worker: Any, task: dict[str, Any]) -> dict[str, Any]:
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        code = 1
        try:
            worker.main(task["request"], task["answer"])
            code = 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return _wait(child, limit_seconds=float(task["limit"]))


def _wait(child: int, *, limit_seconds: float) -> dict[str, Any]:
    deadline, timed_out = time.monotonic() + limit_seconds, False
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        if not timed_out and time.monotonic() > deadline:
            timed_out = True
            os.killpg(child, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
    return {
        "timed_out": timed_out,
        "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
        "exit": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
    }


if __name__ == "__main__":
    main(sys.argv[1])
