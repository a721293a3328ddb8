"""Watch a run for signs of trouble, and leave the findings in the output folder for `upshift doctor RUN_DIR`.

Report failures of a run in messages that a user can act on.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import nn

from upshift.benchmarking.environment import library_versions
from upshift.benchmarking.meters import resident_bytes
from upshift.debugging.finding import Finding
from upshift.debugging.half_precision import examine_fp16
from upshift.debugging.run_report import delete_reports, leave_findings, report_of
from upshift.debugging.step_faults import Signs, Step, leak_finding
from upshift.errors import Interrupted, JobFailed, RequestError
from upshift.hardware.host_memory import free_memory_bytes
from upshift.planning.plan import Plan
from upshift.training.checkpoint.directory import still_loadable
from upshift.training.out_of_memory import find_out_of_memory

STATM = Path("/proc/self/statm")  # on Linux: total size, resident size, ... in pages
PAGE_BYTES = mmap.PAGESIZE
ATTRIBUTED_STEPS = 8  # in which memory is read before and after each callback and each fetch of a batch

OnFinding = Callable[[Finding], None]


def count_compiled_frames() -> int:
    """Return the number of frames that torch.compile has compiled in this process, and 0 if it was not imported."""
    utils = sys.modules.get("torch._dynamo.utils")
    return int(utils.counters["frames"]["ok"]) if utils is not None else 0


def recompile_reason() -> str | None:
    """Return torch's own reason for the newest recompilation, or None."""
    utils = sys.modules.get("torch._dynamo.utils")
    metrics = utils.get_compilation_metrics() if utils is not None else []
    reasons = [metric.recompile_reason for metric in metrics if metric.recompile_reason]
    return " ".join(reasons[-1].split())[:160] if reasons else None


class RunMonitor:
    """Watch the steps of one rank.

    Call ``begin_step`` when a step begins, open ``fetching_batch`` around the wait for its batch, and name the sizes of its
    micro-batches with ``note_sizes``.
    """

    def __init__(self, output: Path, *, rank: int, device: str, data_fix: str, on_finding: OnFinding) -> None:
        self._output = output
        self._rank = rank
        self._on_finding = on_finding
        self._on_device = device == "cuda"
        self._statm = STATM.open("rb", buffering=0) if STATM.exists() else None
        self._signs = Signs(data_fix=data_fix)
        self._findings: list[Finding] = []
        self._step_start: float | None = None
        self._waited_seconds = 0.0
        self._sizes: set[Hashable] = set()  # of the micro-batches of all steps
        self._has_new_size = False
        self._growth: float | None = None  # of memory, in each step; once it shows, its cause is looked for
        self._growth_bytes: dict[str, int] = {}  # by what ran meanwhile
        self._attributed_steps_left = ATTRIBUTED_STEPS

    @property
    def attributes_memory(self) -> bool:
        """Return whether ``attributing_to`` should surround each callback, to find the one whose memory grows."""
        return self._growth is not None and self._attributed_steps_left > 0

    def held_bytes(self) -> int:
        if self._on_device:
            return torch.cuda.memory_allocated()
        if self._statm is None:
            return resident_bytes()
        # As psutil reads it, but without opening the file: 10 microseconds a step instead of 60.
        return int(os.pread(self._statm.fileno(), 128, 0).split()[1]) * PAGE_BYTES

    @contextmanager
    def fetching_batch(self) -> Iterator[None]:
        start = time.perf_counter()
        bytes_before = self.held_bytes() if self.attributes_memory else 0
        yield
        self._waited_seconds += time.perf_counter() - start
        if self.attributes_memory:
            self._add_growth("the data loader", bytes_before)

    @contextmanager
    def attributing_to(self, name: str) -> Iterator[None]:
        bytes_before = self.held_bytes()
        yield
        self._add_growth(name, bytes_before)

    def note_sizes(self, sizes: Iterable[Hashable]) -> None:
        """Note the sizes of the step's micro-batches."""
        for size in sizes:
            self._has_new_size = self._has_new_size or size not in self._sizes
            self._sizes.add(size)

    def _add_growth(self, name: str, bytes_before: int) -> None:
        self._growth_bytes[name] = self._growth_bytes.get(name, 0) + self.held_bytes() - bytes_before

    def begin_step(self) -> float:
        """Note that the previous step is over and the next one begins. Return the time on the clock."""
        time_now = time.perf_counter()
        if self._step_start is not None:
            compiled = count_compiled_frames()
            has_new_size = self._has_new_size and not self._on_device
            step = Step(time_now - self._step_start, self._waited_seconds, compiled, self.held_bytes(), has_new_size)
            for finding in self._signs.add(step):
                reason = recompile_reason() if finding.subject == "recompiles" else None
                if reason is not None:
                    finding = finding.changed(evidence=f"{finding.evidence}; torch says: {reason}")
                self._report(finding)
            self._look_for_leak()
        self._step_start = time_now
        self._waited_seconds = 0.0
        self._has_new_size = False
        return time_now

    def _look_for_leak(self) -> None:
        if self._growth is None:
            self._growth = self._signs.growth(self._free_bytes)
        elif self._attributed_steps_left > 0:
            self._attributed_steps_left -= 1
            if self._attributed_steps_left == 0:
                growth_per_step = {name: size / ATTRIBUTED_STEPS for name, size in self._growth_bytes.items()}
                self._report(leak_finding(self._growth, grew=growth_per_step, free=self._free_bytes()))

    def _free_bytes(self) -> float | None:
        """Return the bytes that the run may still use. On a device, those are free that torch holds and no tensor has."""
        if not self._on_device:
            return free_memory_bytes()
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return torch.cuda.mem_get_info()[0] + unused

    def _report(self, finding: Finding) -> None:
        self._findings.append(finding)
        self._on_finding(finding)
        with suppress(OSError):  # the disk may be full; the callback has the finding already
            leave_findings(self._output, self._rank, self._findings)


def warnings_before_start(model: nn.Module, plan: Plan) -> Iterator[str]:
    """Yield warnings before the first step: what will probably go wrong, and what to do instead."""
    finding = examine_fp16(model) if plan.precision == "fp16" else None
    if finding is not None:
        yield f"{finding.what} ({finding.cause}); upshift train ... --set precision=bf16, or --set precision=fp32"


@contextmanager
def reporting_death(output: Path, step: Callable[[], int], *, rank: int, ranks: int) -> Iterator[None]:
    """Leave a report for `upshift doctor` if the run dies. Remove the report of an earlier run first."""
    delete_reports(output, rank=rank, ranks=ranks)
    try:
        yield
    except (Interrupted, RequestError):
        raise
    except BaseException as error:
        message = " ".join(f"{type(error).__name__}: {error}".split())
        report = report_of(error, rank=rank, ranks=ranks, kind="died", step=step(), words=message, versions=library_versions())
        with suppress(OSError):  # the disk may be what failed
            report.write(output)
        raise


@contextmanager
def explaining_out_of_memory(output: Path, *, rank: int, ranks: int) -> Iterator[None]:
    """Raise JobFailed, with what to do next, in place of the error that says that memory ran out."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        refusal = find_out_of_memory(error)
        if refusal is None:
            raise
        problem = f"rank {rank} of {ranks} ran out of memory" if ranks > 1 else "out of memory"
        raise JobFailed(
            f"{problem} ({' '.join(str(refusal).split())[:160]}); {still_loadable(output)}; "
            "let `upshift plan` choose again for the memory that is free"
        ) from error
