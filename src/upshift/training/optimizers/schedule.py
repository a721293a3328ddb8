"""Compute the learning-rate schedules of transformers, by their names there: the same factors without its imports.

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

FINAL_RATE = 1e-7  # at the end of polynomial decay, whose power is 1
DEFAULT_TIMESCALE = 10_000  # steps, for inverse_sqrt without warm-up


def build_schedule(optimizer: torch.optim.Optimizer, arguments: Arguments) -> LambdaLR:
    """Return the schedule of a run. Raise RequestError for a learning rate below the last one of its schedule."""
    check_schedule(arguments)
    name = arguments.lr_scheduler_type
    # The state of a partial is empty, so a checkpoint keeps only the step of a schedule.
    return LambdaLR(optimizer, partial(learning_rate_factor, name=name, arguments=arguments))


def check_schedule(arguments: Arguments) -> None:
    """Raise RequestError for a learning rate below the last one of its schedule."""
    if arguments.lr_scheduler_type == "polynomial" and arguments.learning_rate <= FINAL_RATE:
        raise RequestError(
            f"learning_rate={arguments.learning_rate:g} is not above {FINAL_RATE:g}, where polynomial ends; use another schedule"
        )


def learning_rate_factor(step: int, *, name: LearningRateSchedule, arguments: Arguments) -> float:
    """Return the factor of the learning rate at a step that is counted from 0."""
    if arguments.range_test_from is not None:
        share_left = 1.0 - step / max(arguments.max_steps - 3, 1)  # the last two steps are beyond the test
        return math.pow(arguments.range_test_from / arguments.learning_rate, share_left)
    warmup = 0 if name == "constant" else arguments.num_warmup_steps
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
    progress = (step - warmup) / steps
    if name == "polynomial":
        return _polynomial(progress, arguments.learning_rate)
    if name == "cosine":
        return _cosine(progress)
    return _cosine_with_restarts(progress)


def _cosine(progress: float) -> float:
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * 0.5 * 2.0 * progress)))


def _cosine_with_restarts(progress: float) -> float:
    """Return the factor for a schedule of one cycle."""
    if progress >= 1.0:
        return 0.0
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * (progress % 1.0))))


def _polynomial(progress: float, learning_rate: float) -> float:
    if progress > 1.0:
        return FINAL_RATE / learning_rate
    return ((learning_rate - FINAL_RATE) * (1 - progress) + FINAL_RATE) / learning_rate
