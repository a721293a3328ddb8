"""Decide from a test of the model whether texts may share a row, a batch may be split, and ranks may share layers."""

from __future__ import annotations

from collections.abc import Sequence

from upshift.models.profile import Isolation, ModelProfile
from upshift.planning.plan import Plan


def why_not_isolated(isolation: Isolation, plan: Plan, *, longest: int | None = None) -> str | None:
    """Return why this plan would not train as one process trains on each text alone, or None if it would.

    ``longest``: the tokens of the longest text; None: any up to the plan's ``sequence_length``."""
    too_long = isolation.why_too_long(plan.sequence_length if longest is None else longest)
    if plan.packing:
        reason = isolation.why_not_packed(plan.attention) or too_long
        if reason is not None:
            return f"packing=True with attention={plan.attention} would change what is learned: {reason}; use packing=False"
    if too_long is not None and plan.layout.context_parallel > 1:
        degree = plan.layout.context_parallel
        return f"with context_parallel={degree} no rank has all positions of a text: {too_long}; use context_parallel=1"
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


def warning_about_splits(isolation: Isolation, longest: int) -> str | None:
    """Return a warning that the loss of a batch depends on its micro-batches, or None for a longest text with which it does not.

    transformers' Trainer depends on them, too, so Upshift trains all the same."""
    reason = isolation.why_too_long(longest)
    if reason is None:
        return None
    return (
        f"{reason}; so the loss depends on which texts share a micro-batch, as it does in transformers.Trainer. "
        f"--sequence-length {isolation.exact_tokens} avoids it"
    )


def can_pack(profile: ModelProfile, kernels: Sequence[str], *, longest: int) -> bool:
    """Return whether texts of up to ``longest`` tokens may share a row with any of these attention kernels."""
    if profile.isolation.why_too_long(longest) is not None:
        return False
    return any(profile.isolation.why_not_packed(kernel) is None for kernel in kernels)


def why_never_packed(profile: ModelProfile, kernels: Sequence[str], *, longest: int) -> str | None:
    """Return why texts may not share a row with any of these attention kernels; None where they may with some."""
    if profile.objective != "causal-lm":
        return f"packing is for causal-lm, and the model trains on {profile.objective}"
    if can_pack(profile, kernels, longest=longest):
        return None
    isolation = profile.isolation
    return next((reason for kernel in kernels if (reason := isolation.why_not_packed(kernel))), isolation.why_too_long(longest))
