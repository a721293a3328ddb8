"""Which layouts cannot run, in words, with what to use instead: of any model, and of this one."""

from __future__ import annotations

from torch import nn

from upshift.planning.plan import ALONE, Plan
from upshift.training.parallel.context import reason_not_context
from upshift.training.parallel.experts import reason_not_experts
from upshift.training.parallel.tensor import reason_not_tensor


def cannot_run(plan: Plan, model: nn.Module | None = None) -> str | None:
    """Why, or None. Without ``model``, before it is loaded: what no model could run."""
    if plan.layout == ALONE:
        return None
    problem = _not_yet(plan)
    if problem is None and model is not None:
        reasons = (reason_not_tensor, reason_not_experts, reason_not_context)
        problem = next(filter(None, (reason(model, plan) for reason in reasons)), None)
    return problem


def _not_yet(plan: Plan) -> str | None:
    layout = plan.layout
    shared = {"pipeline_parallel": layout.pipeline_parallel}
    for name, degree in shared.items():
        if degree > 1:
            return f"this version plans for {name}={degree} and does not train so yet; use {name}=1, and fully_shard=weights"
    return None
