"""Send the events of a run that transformers' Trainer runs: its steps, losses and evaluations. Stop it when the user asks."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import EarlyStoppingCallback, TrainerCallback

from upshift.benchmarking.meters import resident_bytes
from upshift.errors import Interrupted, JobFailed
from upshift.training.arguments import LOSS
from upshift.training.learning_rate_finder import RangeTest
from upshift.training.loop.events import Evaluated, OnEvent, StepDone
from upshift.training.loop.signals import StopRequest
from upshift.training.tasks.ranks import any_rank

RECENT_STEPS = 10
EVALUATED = "eval_"  # begins the names of an evaluation's numbers in transformers
EVALUATED_LOSS = f"{EVALUATED}{LOSS}"
TIMES = ("_runtime", "_per_second", "_preparation_time")


class RunEvents(TrainerCallback):
    """Sends an event for each step and each evaluation, and keeps their numbers. Rows are counted, because images have no
    tokens."""

    def __init__(self, on_event: OnEvent, stop: StopRequest, *, global_batch: int, logging_steps: int) -> None:
        self._on_event = on_event
        self._stop = stop
        self._global_batch = global_batch
        self._logging_steps = logging_steps
        self._step_start = 0.0
        self.is_stopped = False  # because the user asked, on any rank
        self.steps: list[int] = []
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.evaluations: list[Evaluated] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Take over the losses and evaluations before the checkpoint of a run that resumes."""
        for logs in state.log_history:
            if LOSS in logs:
                self.steps.append(logs["step"])
                self.losses.append(float(logs[LOSS]))
            elif EVALUATED_LOSS in logs:
                self.evaluations.append(self._evaluated(logs["step"], logs))

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._step_start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.seconds.append(time.perf_counter() - self._step_start)
        if any_rank(self._stop.requested, args.device):
            self.is_stopped = True
            control.should_save = True
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **others: Any) -> None:
        """Send the event of a step. Raise JobFailed if its loss is no number."""
        if logs is None or "loss" not in logs:
            return
        loss = float(logs["loss"])
        step = state.global_step
        if not math.isfinite(loss):
            raise JobFailed(f"step {step}: the loss is {loss}; use a smaller --learning-rate, or look for a wrong row")
        self.steps.append(step)
        self.losses.append(loss)
        recent = self.seconds[-RECENT_STEPS:]
        is_logged = self._logging_steps and step % self._logging_steps == 0
        logged = self.losses[-self._logging_steps :] if is_logged else []
        norm = logs.get("grad_norm")
        self._on_event(
            StepDone(
                step=step,
                max_steps=state.max_steps,
                tokens=step * self._global_batch,
                loss=loss,
                learning_rate=logs["learning_rate"],
                gradient_norm=None if norm is None else float(norm),
                tokens_per_second=len(recent) * self._global_batch / sum(recent),
                seconds_left=(state.max_steps - step) * sum(recent) / len(recent),
                resident_bytes=resident_bytes(),
                logged_loss=sum(logged) / len(logged) if logged else None,
                unit="rows",
            )
        )

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **others: Any) -> None:
        event = self._evaluated(state.global_step, metrics)
        self.evaluations.append(event)
        self._on_event(event)

    def _evaluated(self, step: int, metrics: Mapping[str, Any]) -> Evaluated:
        numbers = measured_numbers(metrics)
        return Evaluated(step, step * self._global_batch, numbers.pop(LOSS), unit="rows", metrics=numbers)


class RisingRate(TrainerCallback):
    """Sets the learning rate of each step of a range test, notes its loss, and ends the test."""

    def __init__(self, test: RangeTest, stop: StopRequest) -> None:
        self._test = test
        self._stop = stop

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **others: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = self._test.rate_at(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **others: Any) -> None:
        if logs is None or LOSS not in logs:
            return
        if self._stop.requested:
            raise Interrupted("interrupted while a learning rate was sought; nothing is saved, start again")
        if self._test.add(self._test.rate_at(state.global_step - 1), float(logs[LOSS])):
            control.should_training_stop = True


class EarlyStopping(EarlyStoppingCallback):
    """transformers' callback, with the evaluations counted that a run had before it resumes.

    transformers would restore the patience too, which a run may change, and the request to stop of an interrupted run."""

    was_over = False  # the run had no patience left before it resumed

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        super().on_train_begin(args, state, control, **others)  # type: ignore[no-untyped-call]
        self.early_stopping_patience_counter = _evaluations_since_best(
            state.log_history, args.metric_for_best_model, larger_is_better=args.greater_is_better
        )
        self.was_over = self.early_stopping_patience_counter >= self.early_stopping_patience


def _evaluations_since_best(log_history: Sequence[Mapping[str, Any]], metric: str, *, larger_is_better: bool) -> int:
    """Return the number of evaluations after the one with the best value of ``metric``, or 0 without an evaluation.

    transformers keeps the step of the best one only in a run that saves checkpoints at steps."""
    best, since_best = -math.inf if larger_is_better else math.inf, 0
    for logs in log_history:
        if metric not in logs:
            continue
        is_better = logs[metric] > best if larger_is_better else logs[metric] < best
        best, since_best = (logs[metric], 0) if is_better else (best, since_best + 1)
    return since_best


def measured_numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return the loss and the metrics of an evaluation of transformers' Trainer, without its times."""
    names = [name for name in logs if name.startswith(EVALUATED) and not name.endswith(TIMES)]
    return {name.removeprefix(EVALUATED): float(logs[name]) for name in names}
