"""Compute learning-rate schedules by their names in transformers: the same factors, without the imports of its Trainer.

transformers.get_scheduler imports peft and bitsandbytes if they are installed: 0.75 s and 74 MiB of every training process.
test_optimizers checks every step of each schedule against it.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch.optim.lr_scheduler import LambdaLR

from upshift.errors import RequestError
from upshift.training.arguments import Arguments, LearningRateSchedule

FINAL_RATE = 1e-7  # of polynomial decay, whose power is 1
DEFAULT_TIMESCALE = 10_000  # steps, of inverse_sqrt without warm-up


def build_schedule(optimizer: torch.optim.Optimizer, arguments: Arguments) -> LambdaLR:
    """Return the schedule of a run. Raise RequestError for a learning rate below the last one of its schedule."""
    check_schedule(arguments)
    name = arguments.lr_scheduler_type
    # A partial's state is empty: what a checkpoint keeps of a schedule is its step.
    return LambdaLR(optimizer, partial(learning_rate_factor, name=name, arguments=arguments))


def check_schedule(arguments: Arguments) -> None:
    """Raise RequestError for a learning rate below the last one of its schedule."""
    if arguments.lr_scheduler_type == "polynomial" and arguments.learning_rate <= FINAL_RATE:
        raise RequestError(
            f"learning_rate={arguments.learning_rate:g} is not above {FINAL_RATE:g}, where polynomial ends; use another schedule"
        )


def learning_rate_factor(step: int, *, name: LearningRateSchedule, arguments: Arguments) -> float:
    """Return the factor of the learning rate at a step that is counted from 0."""
    warmup = 0 if name == "constant" else arguments.warmup_steps
    if step < warmup:
        return step / warmup
    if name in ("constant", "constant_with_warmup"):
        return 1.0
    if name == "inverse_sqrt":
        timescale = warmup or DEFAULT_TIMESCALE
        return 1.0 / math.sqrt((step + timescale - warmup) / timescale)
    steps = max(1, arguments.max_steps - warmup)
    if name == "linear":
        return max(0.0, (arguments.max_steps - step) / steps)
    done = (step - warmup) / steps
    if name == "polynomial":
        return _polynomial(done, arguments.learning_rate)
    return _cosine(done) if name == "cosine" else _cosine_with_restarts(done)


def _cosine(done: float) -> float:
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * 0.5 * 2.0 * done)))


def _cosine_with_restarts(done: float) -> float:
    """Return the factor for a schedule of one cycle."""
    return 0.0 if done >= 1.0 else max(0.0, 0.5 * (1.0 + math.cos(math.pi * (done % 1.0))))


def _polynomial(done: float, rate: float) -> float:
    return FINAL_RATE / rate if done > 1.0 else ((rate - FINAL_RATE) * (1 - done) + FINAL_RATE) / rate
