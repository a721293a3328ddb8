"""Watch the steps of ``upshift.Trainer``, and print its plan and its warnings.

1. A mix-in records the wait for batches, recompiled graphs, and memory that callbacks keep.
2. Two context managers run ``debug="underflow_overflow"`` and warn before the first step of fp16.
3. Lines are printed on standard error, because standard output belongs to the script.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from upshift.debugging.finding import Finding
from upshift.debugging.half_precision import examine_fp16
from upshift.debugging.numerics import DebugUnderflowOverflow
from upshift.debugging.run_report import delete_reports
from upshift.debugging.step_faults import TRAINER_DATA_FIX
from upshift.planning.plan import Plan
from upshift.planning.trials.select import Tried
from upshift.training.hf_trainer.arguments import DebugOptions
from upshift.training.hf_trainer.choose_plan import Choice
from upshift.training.hf_trainer.patching import LibraryTrainer
from upshift.training.loop.monitor import RunMonitor
from upshift.units import gib


class TimedBatches:
    """The Trainer's iterator over batches. It records the wait for each batch."""

    def __init__(self, batches: Iterator[Any], monitor: RunMonitor) -> None:
        self.batches = batches
        self._monitor = monitor

    def __iter__(self) -> TimedBatches:
        return self

    def __next__(self) -> Any:
        with self._monitor.fetching_batch():
            batch = next(self.batches)
        if isinstance(batch, Mapping):
            self._monitor.note_sizes(tuple(value.shape) for value in batch.values() if isinstance(value, torch.Tensor))
        return batch


class StepMonitor(LibraryTrainer):
    """A mix-in of transformers' Trainer classes that watches each step for signs of trouble."""

    args: Any
    callback_handler: Any
    _upshift_monitor: RunMonitor | None = None
    _upshift_batch_iterator: TimedBatches | None = None  # a new one for each iterator of the loader: BatchRng compares them
    _upshift_wrapped_callbacks: tuple[Any, ...] = ()  # while the monitor looks for the callback that keeps memory

    @contextmanager
    def _upshift_watch_steps(self) -> Iterator[None]:
        output_dir = Path(self.args.output_dir)
        rank = self.args.process_index
        delete_reports(output_dir, rank=rank, ranks=self.args.world_size)
        device = torch.device(self.args.device).type
        self._upshift_monitor = RunMonitor(
            output_dir, rank=rank, device=device, data_fix=TRAINER_DATA_FIX, on_finding=self._upshift_print_finding
        )
        try:
            yield
        finally:
            self._upshift_unwrap_callbacks()
            self._upshift_monitor = self._upshift_batch_iterator = None

    def _upshift_print_finding(self, finding: Finding) -> None:
        if self.args.should_log:
            print_line(f"{finding.subject}: {finding.what} ({finding.evidence}); {finding.fix}")

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        if self._upshift_monitor is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        self._upshift_monitor.begin_step()
        if self._upshift_monitor.attributes_memory and not self._upshift_wrapped_callbacks:
            self._upshift_wrap_callbacks(self._upshift_monitor)
        elif self._upshift_wrapped_callbacks and not self._upshift_monitor.attributes_memory:
            self._upshift_unwrap_callbacks()
        if self._upshift_batch_iterator is None or self._upshift_batch_iterator.batches is not epoch_iterator:
            self._upshift_batch_iterator = TimedBatches(epoch_iterator, self._upshift_monitor)
        return super().get_batch_samples(self._upshift_batch_iterator, num_batches, device)

    def _upshift_wrap_callbacks(self, monitor: RunMonitor) -> None:
        self._upshift_wrapped_callbacks = tuple(self.callback_handler.callbacks)
        for callback in self._upshift_wrapped_callbacks:
            events = [name for name in dir(type(callback)) if name.startswith("on_") and name not in vars(callback)]
            for event in events:
                method = getattr(callback, event)
                setattr(callback, event, _record_memory(method, monitor, type(callback).__name__))

    def _upshift_unwrap_callbacks(self) -> None:
        """Remove the wrapped methods from each callback, so that it uses the methods of its class again."""
        for callback in self._upshift_wrapped_callbacks:
            for event in [name for name, value in vars(callback).items() if getattr(value, "notes_memory", False)]:
                delattr(callback, event)
        self._upshift_wrapped_callbacks = ()


def _record_memory(method: Callable[..., Any], monitor: RunMonitor, name: str) -> Callable[..., Any]:
    """Return the method with its use of memory recorded under ``name``."""

    def recorded(*arguments: Any, **named: Any) -> Any:
        with monitor.attributing_to(name):
            return method(*arguments, **named)

    recorded.notes_memory = True  # type: ignore[attr-defined]
    return recorded


UNDERFLOW_OVERFLOW = "underflow_overflow"


@contextmanager
def hidden_debug_option(arguments: Any) -> Iterator[None]:
    """Remove the option underflow_overflow from ``debug`` while open.

    ``train`` of transformers would attach its own class for this option before there is a plan.
    """
    options = arguments.debug
    if UNDERFLOW_OVERFLOW in options:
        arguments.debug = DebugOptions(option for option in options if option != UNDERFLOW_OVERFLOW)
    try:
        yield
    finally:
        arguments.debug = options


@contextmanager
def watched_numerics(arguments: Any, model: nn.Module, plan: Plan) -> Iterator[None]:
    """Warn of fp16 if the plan uses it, and look for values out of range while open if the user asked for that."""
    finding = examine_fp16(model) if plan.precision == "fp16" else None
    if finding is not None:
        print_line(f"{finding.what} ({finding.cause}); {finding.fix}")
    if not isinstance(arguments.debug, DebugOptions):
        yield
        return
    debugger = DebugUnderflowOverflow(model, tell=print_line)
    try:
        yield
    finally:
        debugger.remove()


def plan_lines(choice: Choice) -> list[str]:
    """Return lines that show the plan, its speed and the plain default's, and the reasons for its choices."""
    if choice.is_given:
        return [f"plan: {choice.plan.label()}", f"  {choice.reason}"]
    if choice.planning is None or choice.candidate is None:
        return [f"your own settings run: {choice.reason}"] if choice.reason else []
    planning = choice.planning
    candidate = choice.candidate
    plain = choice.proof.default.best.tokens_per_second if choice.proof else planning.default.tokens_per_second
    source = "measured" if choice.proof else "predicted"
    lines = [
        f"plan: {choice.plan.label()}",
        f"{source}: {candidate.tokens_per_second:,.0f} tokens/s, plain Trainer {plain or 0.0:,.0f}; "
        f"peak {gib(candidate.memory.peak):.2f} GiB, held {gib(candidate.resident):.2f} GiB",
    ]
    if choice.covers:
        lines.append(f"  {choice.covers}")
    if choice.reason:
        lines.append(f"  {choice.reason}")
    if choice.proof is not None:
        lines += [f"  {note}" for note in choice.proof.notes]
    for reason in planning.reasons_for(choice.plan):
        lines.append(f"  {reason.choice}={reason.value}: {reason.why} ({reason.runner_up}: {reason.runner_up_cost})")
    lines.append(f"  dataloader_num_workers={choice.num_workers}: {choice.loading}")
    return lines


def format_trial(trial: Tried) -> str:
    speed = trial.best.tokens_per_second
    return f"tried {trial.candidate.plan.label()}: {trial.failure or f'{speed or 0.0:,.0f} tokens/s'}"


def print_line(line: str) -> None:
    sys.stderr.write(f"upshift: {line}\n")
    sys.stderr.flush()
