"""Which layouts cannot run, in words, with what to use instead: of any model, and of this one."""

from __future__ import annotations

from torch import nn

from upshift.models.adapter import base_of
from upshift.planning.plan import ALONE, Plan
from upshift.training.parallel.context import reason_not_context


def cannot_run(plan: Plan, model: nn.Module | None = None) -> str | None:
    """Why, or None. Without ``model``, before it is loaded: what no model could run."""
    if plan.layout == ALONE:
        return None
    problem = _not_yet(plan)
    if problem is None and model is not None:
        problem = reason_not_context(base_of(model), plan)
    return problem


def _not_yet(plan: Plan) -> str | None:
    layout = plan.layout
    shared = {
        "tensor_parallel": layout.tensor_parallel,
        "pipeline_parallel": layout.pipeline_parallel, "expert_parallel": layout.expert_parallel,
    }  # fmt: skip
    for name, degree in shared.items():
        if degree > 1:
            return f"this version plans for {name}={degree} and does not train so yet; use {name}=1, and fully_shard=weights"
    return None
