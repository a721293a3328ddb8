"""Which layouts cannot run, in words, with what to use instead: of any model, and of this one."""

from __future__ import annotations

from torch import nn

from upshift.planning.plan import ALONE, Plan
from upshift.training.parallel.context import reason_not_context
from upshift.training.parallel.experts import reason_not_experts
from upshift.training.parallel.stage import reason_not_pipeline
from upshift.training.parallel.tensor import reason_not_tensor


def cannot_run(plan: Plan, model: nn.Module | None = None) -> str | None:
    """Why, or None. Without ``model``, before it is loaded: what no model could run."""
    if plan.layout == ALONE:
        return None
    if model is None:
        return None
    reasons = (reason_not_pipeline, reason_not_tensor, reason_not_experts, reason_not_context)
    return next(filter(None, (reason(model, plan) for reason in reasons)), None)
