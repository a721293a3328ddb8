"""Decide from a test of the model whether texts may share a row, a batch may be split, and ranks may share layers."""

from __future__ import annotations

from collections.abc import Sequence

from upshift.models.profile import Isolation, ModelProfile
from upshift.planning.plan import Plan


def why_not_isolated(isolation: Isolation, plan: Plan) -> str | None:
    """Return why this plan would not train as one process trains on each text alone, or None if it would."""
    if plan.packing:
        reason = isolation.why_not_packed(plan.attention)
        if reason is not None:
            return f"packing=True with attention={plan.attention} would change what is learned: {reason}; use packing=False"
    splits_batch = plan.gradient_accumulation_steps > 1 or plan.data_parallel > 1
    if splits_batch and not isolation.loss_splits:
        return (
            "the model's loss is taken over a whole batch and is no mean over its texts, as with a router's loss "
            "(output_router_logits) or with experts that hold some tokens of a batch (expert_capacity); use "
            "gradient_accumulation_steps=1 and one process, or change the config"
        )
    return why_no_layer_drop(plan) if isolation.drops_layers else None


def why_no_layer_drop(plan: Plan) -> str | None:
    """Return why a model that leaves out layers at random cannot train by this plan, or None if it can."""
    if not plan.layout.exchanges and plan.layout.fully_shard == "no":
        return None
    return (
        f"the model leaves out layers at random (LayerDrop), each rank others, and with {plan.layout.label()} ranks wait for "
        "each other in a layer or its update; use data parallelism alone, or set layerdrop to 0 in the config"
    )


def can_pack(profile: ModelProfile, kernels: Sequence[str]) -> bool:
    """Return whether texts may share a row with any of these attention kernels."""
    return any(profile.isolation.why_not_packed(kernel) is None for kernel in kernels)


def why_never_packed(profile: ModelProfile, kernels: Sequence[str]) -> str | None:
    """Return why texts may not share a row with any of these attention kernels; None where they may with some."""
    if profile.objective != "causal-lm":
        return f"packing is for causal-lm, and the model trains on {profile.objective}"
    if can_pack(profile, kernels):
        return None
    return next((reason for kernel in kernels if (reason := profile.isolation.why_not_packed(kernel))), None)
