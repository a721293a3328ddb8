"""Say in words which layouts cannot run, for any model and for this one, with what to use instead."""

from __future__ import annotations

from torch import nn

from upshift.errors import MissingInternal
from upshift.internals.torch_names import EXCHANGES
from upshift.planning.layout import divisors
from upshift.planning.optimizers import optimizers
from upshift.planning.plan import ALONE, Plan
from upshift.training.parallel.context import reason_not_context
from upshift.training.parallel.experts import reason_not_experts
from upshift.training.parallel.stage import reason_not_pipeline
from upshift.training.parallel.tensor import reason_not_tensor

WHOLE_MATRICES = ("muon", "adafactor")  # an update looks at rows and columns together


def cannot_run(plan: Plan, model: nn.Module | None = None) -> str | None:
    """Return why a plan cannot run, or None. Without ``model``, before it is loaded, check what no model could run."""
    if plan.layout == ALONE:
        return None
    problem = _impossible(plan) or _missing_exchange()
    if problem is None and model is not None:
        reasons = (
            reason_not_pipeline, reason_not_tensor, reason_not_experts, reason_not_context, reason_not_sharded,
        )  # fmt: skip
        problem = next(filter(None, (reason(model, plan) for reason in reasons)), None)
    return problem


def _missing_exchange() -> str | None:
    """Return which operator for exchanges torch's version lacks, or None."""
    try:
        for operation in EXCHANGES:
            operation.get()
    except MissingInternal as missing:
        return str(missing)
    return None


def _impossible(plan: Plan) -> str | None:
    layout = plan.layout
    if plan.num_processes % layout.ranks_per_replica:
        return (
            f"num_processes={plan.num_processes} is no multiple of the {layout.ranks_per_replica} ranks that work on the same "
            "sequences (tensor_parallel x context_parallel x pipeline_parallel); use degrees whose product divides it"
        )
    sharing = plan.data_parallel * layout.context_parallel
    if layout.fully_shard != "no" and (layout.shard_size == 1 or sharing % layout.shard_size):
        valid = ", ".join(map(str, divisors(sharing)[1:]))
        instead = f"use one of {valid}" if valid else "use fully_shard=no"
        return (
            f"fully_shard={layout.fully_shard} divides among shard_size={layout.shard_size} of {sharing} ranks with the same "
            f"weights; {instead}"
        )
    if layout.master_weights and layout.fully_shard != "optimizer":
        return f"master_weights are divided with the optimizer's state, not with fully_shard={layout.fully_shard}; use optimizer"
    if layout.gathers and not layout.overlap:
        return "torch's fully_shard exchanges while it computes and cannot be told not to; leave overlap=True"
    divides = layout.fully_shard != "no" or layout.tensor_parallel > 1 or layout.expert_parallel > 1
    added = optimizers()[plan.optim].added
    if divides and (plan.optim in WHOLE_MATRICES or (added is not None and not added.elementwise)):
        return (
            f"optim={plan.optim} looks at whole matrices, and each rank updates its part of them; "
            "use optim=adamw_torch_fused, or ranks that divide nothing"
        )
    if divides and optimizers()[plan.optim].library is not None:
        return (
            f"the quantized state of optim={plan.optim} cannot be saved in parts; "
            "use optim=adamw_torch_fused, whose state the ranks divide, or ranks that divide nothing"
        )
    return None


def reason_not_sharded(model: nn.Module, plan: Plan) -> str | None:
    """Return why ranks cannot divide this model's weights, or None."""
    if plan.layout.gathers and any(not parameter.is_floating_point() for parameter in model.parameters()):
        return (
            f"fully_shard={plan.layout.fully_shard} gathers weights to compute with, and some of this model are quantized; "
            "use fully_shard=optimizer"
        )
    return None
