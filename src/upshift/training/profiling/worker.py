"""Measure a job's first steps in its own process, first without and then under torch's profiler. Save no model."""

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
from upshift.errors import JobFailed
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
from upshift.training.profiling.breakdown import (
    DATA_RANGE,
    HEAD_RANGE,
    STEP_RANGE,
    UPDATE_RANGE,
    HostBreakdown,
    Span,
    TimeBreakdown,
    break_down_device,
    kind_of_kernel,
    kind_of_operator,
    peak_bytes_by_phase,
    seconds_per_recording,
    subtract_recording,
)
from upshift.training.profiling.report import RANK_FILE, TRACE_FILE, Operator, RankProfile
from upshift.training.rank_processes import rank_environment
from upshift.units import FLOP_CONVENTION, gib

WARMUP_STEPS = 2  # steps before the measured ones, which allocate and compile
PROFILED_STEPS = 3  # steps under the profiler
NUM_OPERATORS = 12
# CUPTI is NVIDIA's library that torch.profiler asks: https://developer.nvidia.com/ERR_NVGPUCTRPERM
NO_KERNELS = (
    "torch.profiler recorded no kernel on the GPU: NVIDIA's library CUPTI is missing, this user may not use it, or another "
    "profiler such as nsys or DCGM holds it; end the other profiler, or allow its use "
    "(https://developer.nvidia.com/ERR_NVGPUCTRPERM)"
)


class ProfiledLoop(TrainingLoop):
    """Run the training loop's own steps, on its own batches, and measure them."""

    def profile(self) -> RankProfile:
        """Return the measurements of this rank."""
        self._send_event(Started(self.progress.step, self.arguments.max_steps, 0, self.num_parameters, self.plan.label(), None))
        batches = self.source.batches(self.progress.position)
        step_seconds: list[float] = []  # without the profiler
        compiled_before = 0
        on_device = self.plan.device == "cuda"
        for number in range(max(self.arguments.max_steps, WARMUP_STEPS + 1)):
            if number == WARMUP_STEPS:
                compiled_before = count_compiled_frames()
            seconds = self._time_step(batches)
            if self.plan.num_processes > 1:
                seconds = largest_seconds(seconds, self.plan)
            step_seconds.append(seconds)
        resident = held_peak_bytes(self.plan)
        with _marking_head(self.train_step.model, self._can_mark_head()):
            memory = self._measure_memory(batches)
            activities = [ProfilerActivity.CPU]
            if on_device:
                activities.append(ProfilerActivity.CUDA)
            with profile(activities=activities) as profiler:
                for _ in range(PROFILED_STEPS):
                    self._run_marked_step(batches)
        trace = Path(self.output) / TRACE_FILE.format(self.rank)
        profiler.export_chrome_trace(str(trace))
        breakdown = _break_down(profiler, on_device=on_device)
        step = median(step_seconds[WARMUP_STEPS:])
        profiled_seconds = sum(breakdown.seconds.values())
        recording = seconds_per_recording(breakdown, profiled=profiled_seconds, plain=step * PROFILED_STEPS)
        kinds = subtract_recording(breakdown, profiled=profiled_seconds, plain=step * PROFILED_STEPS)
        return RankProfile(
            rank=self.rank,
            step_ms=1000 * step,
            recorded_ms=1000 * profiled_seconds / PROFILED_STEPS,
            num_steps=PROFILED_STEPS,
            kinds_ms={kind: 1000 * value / PROFILED_STEPS for kind, value in kinds.items()},
            head_ms=_head_ms(breakdown, kinds),
            operators=_largest_operators(breakdown, recording, on_device=on_device),
            memory_gib=memory,
            resident_gib=gib(resident),
            first_step_seconds=step_seconds[0],
            compiled=count_compiled_frames() - compiled_before,
            why_compiled=recompile_reason(),
            trace=trace.name,
        )

    def _time_step(self, batches: Iterator[GlobalBatch]) -> float:
        """Return the seconds of one step without the profiler."""
        start = time.perf_counter()
        self.train_step.step(next(batches))
        if self.plan.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def _run_marked_step(self, batches: Iterator[GlobalBatch]) -> None:
        """Run one step whose parts the profiler can tell apart."""
        contexts = iter((nullcontext, lambda: record_function(UPDATE_RANGE)))

        def watch() -> AbstractContextManager[object]:  # opened around the first micro-batches, then around the update
            return next(contexts, nullcontext)()

        with record_function(STEP_RANGE):
            with record_function(DATA_RANGE):
                batch = next(batches)
            self.train_step.step(batch, watch=watch)
            if self.plan.device == "cuda":
                torch.cuda.synchronize()

    def _measure_memory(self, batches: Iterator[GlobalBatch]) -> dict[str, float]:
        """Return the peak GiB of each phase of a step. The meter is slow, so this step is not timed."""
        bytes_before = in_memory_bytes(self.train_step.model, self.train_step.optimizer)
        if self.plan.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self._run_marked_step(batches)
            return {"step": gib(torch.cuda.max_memory_allocated())}
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            self._run_marked_step(batches)
        return {name: gib(bytes_before + size) for name, size in peak_bytes_by_phase(_events(profiler)).items()}

    def _can_mark_head(self) -> bool:
        """Return whether the head can be marked.

        A pipeline stage has no whole forward pass, and a compiled model runs no hooks inside.
        """
        return self.plan.layout.pipeline_parallel == 1 and self.plan.torch_compile != "model"


def _break_down(profiler: profile, *, on_device: bool) -> TimeBreakdown:
    events = _events(profiler)
    if on_device:
        device_events = [event for event in events if event.device_type() != torch.profiler.DeviceType.CPU]
        updates = [_span(event) for event in device_events if event.name() == UPDATE_RANGE]
        steps = [_span(event) for event in device_events if event.name() == STEP_RANGE]
        kernels = []
        for event in device_events:
            if not event.name().startswith("upshift.") and not event.is_user_annotation():
                kernels.append(_span(event))
        if not kernels:
            raise JobFailed(NO_KERNELS)
        return break_down_device(kernels, updates, steps)
    main_thread = next(event.start_thread_id() for event in events if event.name() == STEP_RANGE)
    spans = [_span(event) for event in events if event.start_thread_id() == main_thread and not event.is_async()]
    exchanges = [_span(event) for event in events if event.name().startswith(("gloo:", "nccl:"))]
    return HostBreakdown([span for span in spans if not span.name.startswith("gloo:")], exchanges).compute()


def _events(profiler: profile) -> list[Any]:
    return list(profiler.profiler.kineto_results.events())  # type: ignore[union-attr]


def _span(event: Any) -> Span:
    return Span(event.name(), event.start_ns(), event.start_ns() + event.duration_ns(), event.sequence_nr())


def _head_ms(breakdown: TimeBreakdown, kinds: dict[str, float]) -> dict[str, float]:
    """Return the head's ms of a step by kind, in proportion to what was recorded."""
    recorded = sum(breakdown.head.values())
    corrected = kinds.get("head and loss", 0.0)
    if not recorded:
        return {}
    return {kind: 1000 * seconds / recorded * corrected / PROFILED_STEPS for kind, seconds in breakdown.head.items()}


def _largest_operators(breakdown: TimeBreakdown, recording: float, *, on_device: bool) -> tuple[Operator, ...]:
    """Return the operators that take most time. ``recording`` is the seconds that recording one call takes."""
    kind = kind_of_kernel if on_device else kind_of_operator
    corrected = {}
    for name, (seconds, calls) in breakdown.operators.items():
        corrected[name] = (max(seconds - recording * calls, 0.0), calls)
    largest = sorted(corrected.items(), key=lambda item: -item[1][0])[:NUM_OPERATORS]
    return tuple(
        Operator(name=name[:120], kind=kind(name), ms=1000 * seconds / PROFILED_STEPS, calls=calls / PROFILED_STEPS)
        for name, (seconds, calls) in largest
    )


@contextmanager
def _marking_head(model: nn.Module, is_possible: bool) -> Iterator[None]:
    """Mark the time of the head while open: from the end of the model without its head to the end of the whole model."""
    whole = base_of(model)
    body = getattr(whole, "base_model", whole)
    if not is_possible or body is whole:
        yield
        return
    ranges = ExitStack()

    def begin_head(*_: Any) -> None:
        ranges.enter_context(record_function(HEAD_RANGE))

    def end_head(*_: Any) -> None:
        ranges.close()

    handles = [body.register_forward_hook(begin_head), whole.register_forward_hook(end_head, always_call=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def profile_rank(job: Job, data: TrainingData, on_event: OnEvent, stop: StopRequest) -> Record:
    """Profile the job on this rank, and write the measurements beside the trace."""
    rank, _ = rank_environment()
    loop = ProfiledLoop(job, data, rank=rank, on_event=on_event, stop=stop, recorder=MemoryRecorder())
    rank_profile = loop.profile()
    (Path(job.output) / RANK_FILE.format(rank)).write_text(rank_profile.to_json(), encoding="utf-8")
    return Record(
        kind="trial",
        name=str(job.source().config["model_type"]),
        plan=job.plan.model_dump(),
        predicted=job.predicted,
        measured=None,
        flop_convention=f"model FLOPs: {FLOP_CONVENTION}",
        environment=environment(detect()),
    )


def run_folder(folder: Path) -> None:
    """Profile the job in ``folder``. It is called in the process that was started for the job."""
    main(folder, profile_rank)
