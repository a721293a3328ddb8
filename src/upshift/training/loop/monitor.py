"""Feed a run's steps to debugging/step_signs.py, and leave the findings for `upshift doctor RUN_DIR`.

Turn failures of a run into words that a user can act on.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import torch
from torch import nn

from upshift.benchmarking.environment import library_versions
from upshift.benchmarking.meters import resident_bytes
from upshift.debugging.finding import Finding
from upshift.debugging.half_precision import examine_fp16
from upshift.debugging.run_report import forget, leave_findings, report_of
from upshift.debugging.step_signs import Signs, Step, leak
from upshift.errors import Interrupted, JobFailed, RequestError
from upshift.planning.plan import Plan
from upshift.training.checkpoint.directory import still_loadable
from upshift.training.out_of_memory import find_out_of_memory

STATM = Path("/proc/self/statm")  # of Linux; in pages: size, resident, ...
PAGE_BYTES = mmap.PAGESIZE
ATTRIBUTED_STEPS = 8  # in which memory is looked at before and after everyone who runs

OnFinding = Callable[[Finding], None]


def count_compiled_frames() -> int:
    """Return the number of frames that torch.compile has compiled in this process, and 0 if it was not imported."""
    utils = sys.modules.get("torch._dynamo.utils")
    return int(utils.counters["frames"]["ok"]) if utils is not None else 0


def recompile_reason() -> str | None:
    """Return torch's own reason for the newest recompilation, or None."""
    utils = sys.modules.get("torch._dynamo.utils")
    metrics = utils.get_compilation_metrics() if utils is not None else []
    reasons = [one.recompile_reason for one in metrics if one.recompile_reason]
    return " ".join(reasons[-1].split())[:160] if reasons else None


class RunMonitor:
    """The signs of one rank's run. ``fetching`` surrounds the wait for a batch. ``begin`` is called when a step begins."""

    def __init__(self, output: Path, *, rank: int, device: str, data_fix: str, tell: OnFinding) -> None:
        self._output = output
        self._rank = rank
        self._tell = tell
        self._on_device = device == "cuda"
        self._statm = STATM.open("rb", buffering=0) if STATM.exists() else None
        self._signs = Signs(data_fix=data_fix)
        self._found: list[Finding] = []
        self._start: float | None = None
        self._waited = 0.0
        self._growth: float | None = None  # known, and who it is is looked for
        self._grew: dict[str, int] = {}
        self._left = ATTRIBUTED_STEPS

    @property
    def attributes(self) -> bool:
        """Return whether ``by`` should surround everything that runs."""
        return self._growth is not None and self._left > 0

    def held(self) -> int:
        if self._on_device:
            return torch.cuda.memory_allocated()
        if self._statm is None:
            return resident_bytes()
        # As psutil does, but for opening the file: 10 microseconds instead of 60 between the products of a step.
        return int(os.pread(self._statm.fileno(), 128, 0).split()[1]) * PAGE_BYTES

    @contextmanager
    def fetching(self) -> Iterator[None]:
        start = time.perf_counter()
        before = self.held() if self.attributes else 0
        yield
        self._waited += time.perf_counter() - start
        if self.attributes:
            self._grew["the data loader"] = self._grew.get("the data loader", 0) + self.held() - before

    @contextmanager
    def by(self, name: str) -> Iterator[None]:
        before = self.held()
        yield
        self._grew[name] = self._grew.get(name, 0) + self.held() - before

    def begin(self) -> float:
        """Note that a step begins, and the one before it is over. Return the time now."""
        now = time.perf_counter()
        if self._start is not None:
            step = Step(now - self._start, self._waited, count_compiled_frames(), self.held())
            for finding in self._signs.add(step):
                why = recompile_reason() if finding.subject == "recompiles" else None
                self._say(finding if why is None else finding.changed(evidence=f"{finding.evidence}; torch says: {why}"))
            self._look_for_leak()
        self._start = now
        self._waited = 0.0
        return now

    def _look_for_leak(self) -> None:
        if self._growth is None:
            self._growth = self._signs.growth()
        elif self._left > 0:
            self._left -= 1
            if self._left == 0:
                free = torch.cuda.mem_get_info()[0] if self._on_device else psutil.virtual_memory().available
                grew = {name: size / ATTRIBUTED_STEPS for name, size in self._grew.items()}
                self._say(leak(self._growth, grew=grew, free=free))

    def _say(self, finding: Finding) -> None:
        self._found.append(finding)
        self._tell(finding)
        with suppress(OSError):  # a full disk: it was told
            leave_findings(self._output, self._rank, self._found)


def warnings_before_start(model: nn.Module, plan: Plan) -> Iterator[str]:
    """Yield warnings before the first step: what will probably go wrong, and what to do instead."""
    found = examine_fp16(model) if plan.precision == "fp16" else None
    if found is not None:
        yield f"{found.what} ({found.cause}); upshift train ... --set precision=bf16, or --set precision=fp32"


@contextmanager
def reporting_death(output: Path, step: Callable[[], int], *, rank: int, ranks: int) -> Iterator[None]:
    """Leave a report for `upshift doctor` if the run dies. Remove the report of an earlier run first."""
    forget(output, rank)
    try:
        yield
    except (Interrupted, RequestError):
        raise
    except BaseException as error:
        words = " ".join(f"{type(error).__name__}: {error}".split())
        report = report_of(error, rank=rank, ranks=ranks, kind="died", step=step(), words=words, versions=library_versions())
        with suppress(OSError):  # the disk may be what failed
            report.write(output)
        raise


@contextmanager
def explaining_out_of_memory(output: Path, *, rank: int, ranks: int) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        refusal = find_out_of_memory(error)
        if refusal is None:
            raise
        who = f"rank {rank} of {ranks} ran out of memory" if ranks > 1 else "out of memory"
        raise JobFailed(
            f"{who} ({' '.join(str(refusal).split())[:160]}); {still_loadable(output)}; "
            "let `upshift plan` choose again for the memory that is free"
        ) from error
