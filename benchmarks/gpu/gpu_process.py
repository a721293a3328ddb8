"""Run a part in a process of its own, within a time limit, and return its answer or why there is none.

python gpu_process.py REQUEST.json: the process itself. It calls the part's function and writes the answer as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
from gpu_rows import Answer

LOG = "log.txt"
ANSWER = "answer.json"
REQUEST = "request.json"
MAX_LINE = 300  # characters of an error in a row; the log has all
ENDED_SECONDS = 5.0  # to wait for processes that were killed


@dataclass(frozen=True)
class PartRequest:
    """What a part's function gets.

    folder: of the whole check. free_bytes: the memory of the GPU that has least. quick: tiny sizes.
    """

    part: str
    function: str
    folder: Path
    quick: bool
    names: tuple[str, ...]
    free_bytes: int

    @property
    def part_folder(self) -> Path:
        return self.folder / "parts" / self.part

    @property
    def work(self) -> Path:
        return self.folder / "work"

    @property
    def results(self) -> Path:
        return self.folder / "results"


def run_part(request: dict[str, Any], *, limit_seconds: float, folder: Path, variables: Mapping[str, str]) -> Answer:
    """Run a part's process. Its messages go to a file. A process that fails, is killed or takes too long is an Answer, too."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ANSWER).unlink(missing_ok=True)
    (folder / REQUEST).write_text(json.dumps(request), encoding="utf-8")
    log = folder / LOG
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), str(folder / REQUEST)],
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=dict(variables), start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            return failure(f"took longer than its {limit_seconds:.0f} s", last_line(log), timed_out=True)
        finally:
            end_tree(process)
    if process.returncode < 0:
        return failure(f"was killed by {signal.Signals(-process.returncode).name}", last_line(log))
    if process.returncode:
        return failure(f"exit code {process.returncode}", error_line(log))
    if not (folder / ANSWER).is_file():
        return failure("ended without an answer", last_line(log))
    return Answer.from_file(folder / ANSWER)


def failure(what: str, line: str, *, timed_out: bool = False) -> Answer:
    return Answer(reason=f"{what}: {line[:MAX_LINE]}", failed=True, details={"timed_out": timed_out})


def log_lines(log: Path) -> list[str]:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line for line in lines if line.strip()] or ["it printed nothing"]


def last_line(log: Path) -> str:
    return log_lines(log)[-1].strip()


def error_line(log: Path) -> str:
    """Return the exception of the last traceback, which lines of advice may follow. Without a traceback: the last line."""
    lines = log_lines(log)
    starts = [number for number, line in enumerate(lines) if line.startswith("Traceback (")]
    if not starts:
        return last_line(log)
    after = lines[starts[-1] + 1 :]
    return next((line for line in after if not line.startswith(" ")), lines[-1]).strip()


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process, if it still runs, and the processes that it started, also those in sessions of their own."""
    members: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        members = psutil.Process(process.pid).children(recursive=True)
    if process.poll() is None:
        process.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for member in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
    psutil.wait_procs(members, timeout=ENDED_SECONDS)


def main(path: Path) -> None:
    fields = json.loads(path.read_bytes())
    request = PartRequest(**{**fields, "folder": Path(fields["folder"]), "names": tuple(fields["names"])})
    module, _, name = request.function.partition(":")
    answer: Answer = getattr(import_module(module), name)(request)
    partial = path.with_name(ANSWER + ".partial")
    partial.write_text(answer.to_json(indent=1), encoding="utf-8")
    partial.replace(path.with_name(ANSWER))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
