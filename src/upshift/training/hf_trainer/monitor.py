"""Note in the steps of ``upshift.Trainer`` the wait for batches, recompiled graphs, and memory that callbacks keep.

Watch the Trainer's numbers: run ``debug="underflow_overflow"``, and warn before the first step of fp16.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from upshift.debugging.finding import Finding
from upshift.debugging.half_precision import examine_fp16
from upshift.debugging.numerics import DebugUnderflowOverflow
from upshift.debugging.run_report import forget
from upshift.debugging.step_signs import TRAINER_DATA_FIX
from upshift.planning.plan import Plan
from upshift.planning.trials.select import Tried
from upshift.training.hf_trainer.arguments import (
    Ours,
)
from upshift.training.hf_trainer.choose_plan import Choice
from upshift.training.hf_trainer.patching import LibraryTrainer
from upshift.training.loop.monitor import RunMonitor
from upshift.units import gib


class Fetched:
    """The Trainer's iterator over batches, which notes the wait for each batch."""

    def __init__(self, batches: Iterator[Any], signs: RunMonitor) -> None:
        self.batches, self._signs = batches, signs

    def __iter__(self) -> Fetched:
        return self

    def __next__(self) -> Any:
        with self._signs.fetching_batch():
            return next(self.batches)


class NotedSteps(LibraryTrainer):
    """A mix-in of transformers' Trainer classes that notes signs of trouble in steps."""

    args: Any
    callback_handler: Any
    _upshift_signs: RunMonitor | None = None
    _upshift_batch_iterator: Fetched | None = None  # one for each of the loader's iterators, which BatchRng tells apart
    _upshift_timed_callbacks: tuple[Any, ...] = ()  # callbacks whose methods are timed, while it is looked for who keeps memory

    @contextmanager
    def _upshift_watch_steps(self) -> Iterator[None]:
        output, rank = Path(self.args.output_dir), self.args.process_index
        forget(output, rank)
        device = torch.device(self.args.device).type
        self._upshift_signs = RunMonitor(
            output, rank=rank, device=device, data_fix=TRAINER_DATA_FIX, on_finding=self._upshift_tell_finding
        )
        try:
            yield
        finally:
            self._upshift_untime_callbacks()
            self._upshift_signs = self._upshift_batch_iterator = None

    def _upshift_tell_finding(self, finding: Finding) -> None:
        if self.args.should_log:
            tell(f"{finding.subject}: {finding.what} ({finding.evidence}); {finding.fix}")

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        if self._upshift_signs is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        self._upshift_signs.begin_step()
        if self._upshift_signs.attributes_memory and not self._upshift_timed_callbacks:
            self._upshift_time_callbacks(self._upshift_signs)
        elif self._upshift_timed_callbacks and not self._upshift_signs.attributes_memory:
            self._upshift_untime_callbacks()
        if self._upshift_batch_iterator is None or self._upshift_batch_iterator.batches is not epoch_iterator:
            self._upshift_batch_iterator = Fetched(epoch_iterator, self._upshift_signs)
        return super().get_batch_samples(self._upshift_batch_iterator, num_batches, device)

    def _upshift_time_callbacks(self, signs: RunMonitor) -> None:
        self._upshift_timed_callbacks = tuple(self.callback_handler.callbacks)
        for callback in self._upshift_timed_callbacks:
            for event in (name for name in dir(type(callback)) if name.startswith("on_") and name not in vars(callback)):
                setattr(callback, event, _noted(getattr(callback, event), signs, type(callback).__name__))

    def _upshift_untime_callbacks(self) -> None:
        """Remove the timed methods from each callback instance, so that the methods of its class are used again."""
        for callback in self._upshift_timed_callbacks:
            for event in [name for name, value in vars(callback).items() if getattr(value, "notes_memory", False)]:
                delattr(callback, event)
        self._upshift_timed_callbacks = ()


def _noted(method: Callable[..., Any], signs: RunMonitor, name: str) -> Callable[..., Any]:
    def noted(*arguments: Any, **named: Any) -> Any:
        with signs.attributing_to(name):
            return method(*arguments, **named)

    noted.notes_memory = True  # type: ignore[attr-defined]
    return noted


OPTION = "underflow_overflow"


@contextmanager
def without_their_own(arguments: Any) -> Iterator[None]:
    """Hide the option underflow_overflow while open.

    transformers' ``train`` would attach its own class by this option, before there is a plan.
    """
    asked = arguments.debug
    arguments.debug = Ours(option for option in asked if option != OPTION) if OPTION in asked else asked
    try:
        yield
    finally:
        arguments.debug = asked


@contextmanager
def numbers_watched(arguments: Any, model: nn.Module, plan: Plan) -> Iterator[None]:
    doubt = examine_fp16(model) if plan.precision == "fp16" else None
    if doubt is not None:
        tell(f"{doubt.what} ({doubt.cause}); {doubt.fix}")
    if not isinstance(arguments.debug, Ours):
        yield
        return
    debugger = DebugUnderflowOverflow(model, tell=tell)
    try:
        yield
    finally:
        debugger.remove()


def report(choice: Choice) -> list[str]:
    """Return lines that show the plan, its expected speed beside the plain default, and the reasons."""
    if choice.planning is None or choice.candidate is None:
        return [f"your own settings run: {choice.reason}"]
    planning, candidate = choice.planning, choice.candidate
    plain = choice.proof.default.best.tokens_per_second if choice.proof else planning.default.tokens_per_second
    known = "measured" if choice.proof else "predicted"
    lines = [
        f"plan: {choice.plan.label()}",
        f"{known}: {candidate.tokens_per_second:,.0f} tokens/s, plain Trainer {plain or 0.0:,.0f}; "
        f"peak {gib(candidate.memory.peak):.2f} GiB, held {gib(candidate.resident):.2f} GiB",
    ]
    if choice.proof is not None:
        lines += [f"  {note}" for note in choice.proof.notes]
    for reason in planning.reasons_for(choice.plan):
        lines.append(f"  {reason.choice}={reason.value}: {reason.why} ({reason.runner_up}: {reason.runner_up_cost})")
    lines.append(f"  dataloader_num_workers={choice.num_workers}: {choice.loading}")
    return lines


def trial_line(tried: Tried) -> str:
    speed = tried.best.tokens_per_second
    return f"tried {tried.candidate.plan.label()}: {tried.failure or f'{speed or 0.0:,.0f} tokens/s'}"


def tell(line: str) -> None:
    sys.stderr.write(f"upshift: {line}\n")
    sys.stderr.flush()
