"""Run plans for a few seconds each. Each trial has its own process, whose parent survives if it dies."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypedDict

from pydantic import Field

from upshift.fork_server import ChildExit, ForkServer, fork_server
from upshift.models.source import AdapterOptions
from upshift.planning.plan import Plan
from upshift.record import Spread
from upshift.value import Value

LABELS_OF_A_LOSS = 1000  # a mean over this many labels is exact enough for the plain tolerance
WORKER = "upshift.training.trials.worker"


class ModelChoice(TypedDict):
    """The fields of a TrialRequest, and of a training job, that choose the model to train."""

    model_reference: str
    from_config: bool
    adapter: AdapterOptions


class TrialRequest(Value):
    """All that the worker needs. It answers with a TrialResult."""

    model_reference: str
    from_config: bool
    adapter: AdapterOptions = AdapterOptions()
    has_reward_head: bool = Field(False, description="whether the model gives each text one number, its reward")
    plan: Plan
    global_batch: int
    seconds: float = Field(gt=0, description="timed work; loading and compiling come on top, up to ``limit_seconds``")
    limit_seconds: float = Field(gt=0)
    data: str | None = Field(None, description="folder of the run's own data; None: synthetic full-length sequences")
    rows: str | None = Field(None, description="file of collated batches, cut into global batches; instead of data")
    total_steps: int = Field(64, gt=0, description="of the run; the work of a step is averaged over the first of them")
    clips_gradients: bool = True
    has_kl_pass: bool = Field(True, description="with rated answers: the mismatched ones are computed, for KTO's KL term")
    seed: int = Field(42, description="of the run: its weights and the order of its batches")


class TrialResult(Value):
    """The measurements of a trial. ``failure`` is set when there are no numbers."""

    failure: str | None = None
    out_of_memory: bool = False
    timed_out: bool = Field(False, description="it was ended at its limit; what it had measured by then is kept")
    rough: bool = Field(False, description="of one micro-batch, which may be cold: the trial ended before a steady step")
    busy: bool = Field(False, description="other programs computed during all that was timed; waiting for cores is taken off")
    waited_share: float = Field(0.0, description="of the timed seconds that were spent waiting for a core")
    cpu_seconds: float | None = Field(None, description="processor seconds of a step, over all processes")
    step_seconds: Spread | None = Field(None, description="of a whole global batch, without waiting for a core")
    update_seconds: float | None = None
    tokens_per_second: float | None = None
    one_time_seconds: float | None = Field(None, description="first steps and compilation beyond steady steps")
    largest_micro_batch: tuple[int, int] | None = Field(None, description="rows and tokens a row of what was run")
    largest_of_run: bool = Field(True, description="whether no batch of the run has a larger one; False: not all were looked at")
    peak_bytes: int | None = None
    resident_bytes: int | None = None
    base_resident_bytes: int | None = None
    check_loss: float | None = Field(None, description="of the untrained model on the same sequences under every plan")
    check_labels: int = Field(LABELS_OF_A_LOSS, description="labels in check_loss")
    wall_seconds: float = 0.0


def loosen_tolerance(tolerance: float, num_labels: int) -> float:
    """Return the tolerance for a mean over few labels.

    The effect of rounding and dropout falls with the square root of the number of labels.
    """
    return tolerance * math.sqrt(max(LABELS_OF_A_LOSS / max(num_labels, 1), 1.0))


class TrialServer:
    """A server that forks a child for every trial, so that a child that runs out of memory is a result like any other."""

    def __init__(self, server: ForkServer) -> None:
        self._server = server

    def run(self, request: TrialRequest) -> TrialResult:
        """Run one trial and return its result."""
        start = time.monotonic()
        *answers, ending = self._server.ask(request, TrialResult, limit_seconds=request.limit_seconds)
        results = [answer for answer in answers if isinstance(answer, TrialResult)]
        assert isinstance(ending, ChildExit)
        wall_seconds = time.monotonic() - start
        if ending.timed_out:
            partial = results[-1] if results else unfinished_result()
            return partial.changed(timed_out=True, wall_seconds=wall_seconds)
        if results and not results[-1].timed_out:
            return results[-1]
        return _failure_of(ending).changed(wall_seconds=wall_seconds)


def unfinished_result() -> TrialResult:
    """Return the result of a trial that ends before it has measured a speed."""
    return TrialResult(failure="took longer than the trial's limit", timed_out=True)


def _failure_of(ending: ChildExit) -> TrialResult:
    if ending.signal == signal.SIGKILL:
        return TrialResult(failure="killed by the system: out of memory", out_of_memory=True)
    return TrialResult(failure=f"the process died (exit {ending.exit}, signal {ending.signal}): {ending.last_words}")


@contextmanager
def trial_server() -> Iterator[TrialServer]:
    """Yield a server for trials, and stop it at the end."""
    with fork_server(WORKER) as server:
        yield TrialServer(server)
