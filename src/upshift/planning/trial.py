"""Runs plans for real, a few seconds each, each in a process of its own that its parent survives."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import Field

from upshift.fork_server import Ending, ForkServer, fork_server
from upshift.planning.plan import Plan
from upshift.record import Spread
from upshift.value import Value

LABELS_OF_A_LOSS = 1000  # a mean over so many is exact enough to be compared as it is
WORKER = "upshift.training.trial_worker"


class TrialRequest(Value):
    """Everything the worker needs; it answers with a TrialResult."""

    model_reference: str
    from_config: bool
    lora_rank: int | None = None
    load_in_4bit: bool = False
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
    """Forks a child for every trial: out of memory in one is a result."""

    def __init__(self, server: ForkServer) -> None:
        self._server = server

    def run(self, request: TrialRequest) -> TrialResult:
        start = time.monotonic()
        *answers, ending = self._server.ask(request, TrialResult, limit_seconds=request.limit_seconds)
        for answer in answers:
            if isinstance(answer, TrialResult):
                return answer
        assert isinstance(ending, Ending)
        return _died(ending).changed(wall_seconds=time.monotonic() - start)


def _died(ending: Ending) -> TrialResult:
    if ending.timed_out:
        return TrialResult(failure="took longer than the trial's limit")
    if ending.signal == signal.SIGKILL:
        return TrialResult(failure="killed by the system: out of memory", out_of_memory=True)
    return TrialResult(failure=f"the process died (exit {ending.exit}, signal {ending.signal}): {ending.last_words}")


@contextmanager
def trial_server() -> Iterator[TrialServer]:
    with fork_server(WORKER) as server:
        yield TrialServer(server)
