"""Watch the Trainer's numbers: run ``debug="underflow_overflow"``, and warn before the first step of fp16."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from upshift.debugging.half_precision import examine_fp16
from upshift.debugging.numerics import DebugUnderflowOverflow
from upshift.planning.plan import Plan
from upshift.training.trainer.asked import Ours
from upshift.training.trainer.report import tell

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
