"""Which layouts cannot run, in words, with what to use instead: of any model, and of this one."""

from __future__ import annotations

from torch import nn

from upshift.planning.plan import ALONE, Plan


def cannot_run(plan: Plan, model: nn.Module | None = None) -> str | None:
    """Why, or None. Without ``model``, before it is loaded: what no model could run."""
    if plan.layout == ALONE:
        return None
    return _not_yet(plan)


def _not_yet(plan: Plan) -> str | None:
    layout = plan.layout
    shared = {
        "tensor_parallel": layout.tensor_parallel, "context_parallel": layout.context_parallel,
        "pipeline_parallel": layout.pipeline_parallel, "expert_parallel": layout.expert_parallel,
    }  # fmt: skip
    for name, degree in shared.items():
        if degree > 1:
            return f"this version plans for {name}={degree} and does not train so yet; use {name}=1, and fully_shard=weights"
    return None
