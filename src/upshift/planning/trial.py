"""Runs plans for real, a few seconds each, each in a process of its own that its parent survives.

One server process imports torch and transformers once and forks a child for every trial, so that a trial starts in
milliseconds and dies alone: out of memory in a trial is a result. The worker is named, not imported: planning stands
below training.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import Field

from upshift.errors import JobFailed
from upshift.planning.plan import Plan
from upshift.record import Spread
from upshift.value import Value

LABELS_OF_A_LOSS = 1000  # a mean over so many is exact enough to be compared as it is
WORKER = "upshift.training.trial_worker"
SERVER = "upshift.planning.trial_server"


class TrialRequest(Value):
    """Everything the worker needs; it answers with a TrialResult."""

    model_reference: str
    from_config: bool
    plan: Plan
    global_batch: int
    seconds: float = Field(gt=0, description="timed work; loading and compiling come on top, up to ``limit_seconds``")
    limit_seconds: float = Field(gt=0)
    sample: str | None = Field(None, description="npz with tokens and offsets; None: synthetic full-length sequences")
    rows: str | None = Field(None, description="file of collated batches, which make the global batch; instead of a sample")
    objective: dict[str, Any] | None = Field(
        None, description="the training objective; None: the model's own, without a tokenizer"
    )
    seed: int = 42


class TrialResult(Value):
    """What the machine said. ``failure`` is set when there are no numbers."""

    failure: str | None = None
    out_of_memory: bool = False
    step_seconds: Spread | None = Field(None, description="of a whole global batch")
    update_seconds: float | None = None
    tokens_per_second: float | None = None
    one_time_seconds: float | None = Field(None, description="first micro-batch and update beyond a steady one")
    largest_micro_batch: tuple[int, int] | None = Field(None, description="rows and tokens a row of what was run")
    peak_bytes: int | None = None
    resident_bytes: int | None = None
    base_resident_bytes: int | None = None
    check_loss: float | None = Field(None, description="of the untrained model on the same sequences under every plan")
    check_labels: int = Field(LABELS_OF_A_LOSS, description="labels in check_loss")
    wall_seconds: float = 0.0


def loosened(tolerance: float, num_labels: int) -> float:
    """For a mean over few labels: what rounding and dropout do to it falls with the root of their number."""
    return tolerance * math.sqrt(max(LABELS_OF_A_LOSS / max(num_labels, 1), 1.0))


class TrialServer:
    """A process with the heavy libraries imported; ``run`` gives it one request and waits."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process, self._folder, self._count = process, folder, 0

    def run(self, request: TrialRequest) -> TrialResult:
        self._count += 1
        path = self._folder / f"request-{self._count}.json"
        path.write_text(request.to_json())
        answer = self._folder / f"result-{self._count}.json"
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(
            json.dumps({"request": str(path), "answer": str(answer), "limit": request.limit_seconds}) + "\n"
        )
        self._process.stdin.flush()
        start = time.monotonic()
        line = self._process.stdout.readline()
        if not line:
            raise JobFailed(f"the trial server ended; its log ends with: {self._log_tail()}")
        if answer.exists():
            return TrialResult.from_json(answer.read_bytes(), origin="the trial's answer")
        return _died(json.loads(line)).changed(wall_seconds=time.monotonic() - start)

    def _log_tail(self) -> str:
        log = self._folder / "server.log"
        return log.read_text(errors="replace").strip()[-400:] if log.exists() else "nothing"


def _died(ending: dict[str, object]) -> TrialResult:
    if ending.get("timed_out"):
        return TrialResult(failure="took longer than the trial's limit")
    if ending.get("signal") == 9:
        return TrialResult(failure="killed by the system: out of memory", out_of_memory=True)
    return TrialResult(failure=f"the process died (exit {ending.get('exit')}, signal {ending.get('signal')})")


@contextmanager
def trial_server(*, worker: str = WORKER) -> Iterator[TrialServer]:
    """Start the server; it ends with the context, and its files with it."""
    with tempfile.TemporaryDirectory(prefix="upshift-trial-") as name:
        folder = Path(name)
        with (folder / "server.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", SERVER, worker],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
            try:
                yield TrialServer(process, folder)
            finally:
                process.stdin.close()  # type: ignore[union-attr]
                try:
                    process.wait(timeout=5)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
