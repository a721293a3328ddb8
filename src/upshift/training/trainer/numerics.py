"""What the Trainer does about numbers: ``debug="underflow_overflow"``, and a word before the first step of fp16."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from upshift.debugging.half_precision import examine_fp16
from upshift.debugging.numerics import DebugUnderflowOverflow
from upshift.planning.plan import Plan
from upshift.training.trainer.report import tell

OPTION = "underflow_overflow"


@contextmanager
def numbers_watched(arguments: Any, model: nn.Module, plan: Plan) -> Iterator[None]:
    """transformers would attach its own class by the same option: it does not see it meanwhile."""
    doubt = examine_fp16(model) if plan.precision == "fp16" else None
    if doubt is not None:
        tell(f"{doubt.what} ({doubt.cause}); {doubt.fix}")
    asked = arguments.debug
    if OPTION not in asked:
        yield
        return
    arguments.debug = [option for option in asked if option != OPTION]
    debugger = DebugUnderflowOverflow(model, tell=tell)
    try:
        yield
    finally:
        debugger.remove()
        arguments.debug = asked
