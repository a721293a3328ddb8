"""Measure a job's first steps in its process, plainly and then under torch's profiler. Nothing is saved."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from upshift.benchmarking.environment import environment
from upshift.benchmarking.meters import MemoryRecorder
from upshift.hardware.detect import detect
from upshift.models.adapter import base_of
from upshift.record import Record
from upshift.training.batches.sampler import GlobalBatch
from upshift.training.data.dataset import TrainingData
from upshift.training.distributed.mesh import largest_seconds
from upshift.training.held_memory import held_peak_bytes
from upshift.training.job.processes import main
from upshift.training.job.request import Job
from upshift.training.loop.events import OnEvent, Started
from upshift.training.loop.loop import TrainingLoop
from upshift.training.loop.monitor import count_compiled_frames, recompile_reason
from upshift.training.loop.signals import StopRequest
from upshift.training.prepare import in_memory_bytes
from upshift.training.process_group import rank_environment
from upshift.training.profiling.breakdown import (
    DATA_RANGE,
    HEAD_RANGE,
    STEP_RANGE,
    UPDATE_RANGE,
    Account,
    HostTime,
    Span,
    device_time,
    kind_of,
    kind_of_kernel,
    phases_of,
    recording_seconds,
    without_recording,
)
from upshift.training.profiling.report import RANK_FILE, TRACE_FILE, Operator, RankProfile
from upshift.units import FLOP_CONVENTION, gib

SETTLING = 2  # steps before the measured ones: they allocate and compile
PROFILED = 3  # steps under the profiler
NUM_OPERATORS = 12


class ProfiledLoop(TrainingLoop):
    """A loop whose steps are the training loop's own, from the same batches."""

    def profile(self) -> RankProfile:
        self._tell(Started(self.progress.step, self.arguments.max_steps, 0, self.num_parameters, self.plan.label(), None))
        batches = self.source.batches(self.progress.position)
        plain: list[float] = []
        compiled = 0
        on_device = self.plan.device == "cuda"
        for number in range(max(self.arguments.max_steps, SETTLING + 1)):
            if number == SETTLING:
                compiled = count_compiled_frames()
            seconds = self._plain_step(batches)
            plain.append(largest_seconds(seconds, self.plan) if self.plan.num_processes > 1 else seconds)
        resident = held_peak_bytes(self.plan)
        with _marked_head(self.stepper.model, self._marks_head()):
            memory = self._memory(batches)
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])]
            with profile(activities=activities) as recorded:
                for _ in range(PROFILED):
                    self._marked_step(batches)
        folder = Path(self.output)
        trace = folder / TRACE_FILE.format(self.rank)
        recorded.export_chrome_trace(str(trace))
        account = _account(recorded, on_device=on_device)
        step = median(plain[SETTLING:])
        seconds = sum(account.seconds.values())
        each = recording_seconds(account, profiled=seconds, plain=step * PROFILED)
        kinds = without_recording(account, profiled=seconds, plain=step * PROFILED)
        return RankProfile(
            rank=self.rank, step_ms=1000 * step, recorded_ms=1000 * seconds / PROFILED, num_steps=PROFILED,
            kinds_ms={kind: 1000 * value / PROFILED for kind, value in kinds.items()}, head_ms=_head(account, kinds),
            operators=_operators(account, each, on_device=on_device), memory_gib=memory,
            resident_gib=gib(resident), first_step_seconds=plain[0], compiled=count_compiled_frames() - compiled,
            why_compiled=recompile_reason(), trace=trace.name,
        )  # fmt: skip

    def _plain_step(self, batches: Iterator[GlobalBatch]) -> float:
        start = time.perf_counter()
        self.stepper.step(next(batches))
        if self.plan.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def _marked_step(self, batches: Iterator[GlobalBatch]) -> None:
        opened = iter((nullcontext, lambda: record_function(UPDATE_RANGE)))

        def watch() -> AbstractContextManager[object]:  # around the first micro-batches, then around the update
            return next(opened, nullcontext)()

        with record_function(STEP_RANGE):
            with record_function(DATA_RANGE):
                batch = next(batches)
            self.stepper.step(batch, watch=watch)
            if self.plan.device == "cuda":
                torch.cuda.synchronize()

    def _memory(self, batches: Iterator[GlobalBatch]) -> dict[str, float]:
        """Run one step under the allocator's meter, which is slow: this step is not among those that are timed."""
        before = in_memory_bytes(self.stepper.model, self.stepper.optimizer)
        if self.plan.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self._marked_step(batches)
            return {"step": gib(torch.cuda.max_memory_allocated())}
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            self._marked_step(batches)
        return {name: gib(before + size) for name, size in phases_of(_events(profiler)).items()}

    def _marks_head(self) -> bool:
        """Return whether the head can be marked.

        A stage of a pipeline has no whole forward pass, and a compiled one has no hooks inside.
        """
        return self.plan.layout.pipeline_parallel == 1 and self.plan.torch_compile != "model"


def _account(profiler: profile, *, on_device: bool) -> Account:
    events = _events(profiler)
    if on_device:
        there = [event for event in events if event.device_type() != torch.profiler.DeviceType.CPU]
        ranges = {name: [_span(event) for event in there if event.name() == name] for name in (STEP_RANGE, UPDATE_RANGE)}
        kernels = [_span(event) for event in there if not event.name().startswith("upshift.") and not event.is_user_annotation()]
        return device_time(kernels, ranges[UPDATE_RANGE], ranges[STEP_RANGE])
    here = next(event.start_thread_id() for event in events if event.name() == STEP_RANGE)
    own = [_span(event) for event in events if event.start_thread_id() == here and not event.is_async()]
    exchanges = [_span(event) for event in events if event.name().startswith(("gloo:", "nccl:"))]
    return HostTime([span for span in own if not span.name.startswith("gloo:")], exchanges).account()


def _events(profiler: profile) -> list[Any]:
    return list(profiler.profiler.kineto_results.events())  # type: ignore[union-attr]


def _span(event: Any) -> Span:
    return Span(event.name(), event.start_ns(), event.start_ns() + event.duration_ns(), event.sequence_nr())


def _head(account: Account, kinds: dict[str, float]) -> dict[str, float]:
    """Return the head's ms of a step by kind, in proportion to what was recorded."""
    whole = sum(account.head.values())
    corrected = kinds.get("head and loss", 0.0)
    return {kind: 1000 * seconds / whole * corrected / PROFILED for kind, seconds in account.head.items()} if whole else {}


def _operators(account: Account, each: float, *, on_device: bool) -> tuple[Operator, ...]:
    """Return the operators that take most. ``each`` is the seconds that recording one takes."""
    kind = kind_of_kernel if on_device else kind_of
    own = {name: (max(seconds - each * calls, 0.0), calls) for name, (seconds, calls) in account.operators.items()}
    largest = sorted(own.items(), key=lambda item: -item[1][0])[:NUM_OPERATORS]
    return tuple(
        Operator(name=name[:120], kind=kind(name), ms=1000 * seconds / PROFILED, calls=calls / PROFILED)
        for name, (seconds, calls) in largest
    )


@contextmanager
def _marked_head(model: nn.Module, marks: bool) -> Iterator[None]:
    """Mark the time from the end of the model without its head to the end of the whole."""
    whole = base_of(model)
    body = getattr(whole, "base_model", whole)
    if not marks or body is whole:
        yield
        return
    ranges = ExitStack()

    def begin(*_: Any) -> None:
        ranges.enter_context(record_function(HEAD_RANGE))

    def end(*_: Any) -> None:
        ranges.close()

    handles = [body.register_forward_hook(begin), whole.register_forward_hook(end, always_call=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def profile_rank(job: Job, data: TrainingData, on_event: OnEvent, stop: StopRequest) -> Record:
    rank, _ = rank_environment()
    loop = ProfiledLoop(job, data, rank=rank, on_event=on_event, stop=stop, recorder=MemoryRecorder())
    found = loop.profile()
    (Path(job.output) / RANK_FILE.format(rank)).write_text(found.to_json(), encoding="utf-8")
    return Record(
        kind="trial", name=str(job.source().config["model_type"]), plan=job.plan.model_dump(), predicted=job.predicted,
        measured=None, flop_convention=f"model FLOPs: {FLOP_CONVENTION}", environment=environment(detect()),
    )  # fmt: skip


def run_folder(folder: Path) -> None:
    """Profile the job that is written in ``folder``, in the process that was started for it."""
    main(folder, profile_rank)
