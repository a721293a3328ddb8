"""Decide whether texts of a batch may share a row or be computed apart: only where a test showed that the model allows it."""

from __future__ import annotations

from collections.abc import Sequence

from upshift.models.profile import Isolation, ModelProfile
from upshift.planning.plan import Plan


def why_not_isolated(isolation: Isolation, plan: Plan) -> str | None:
    """Return why this plan would train on something else than each text alone, or None."""
    if plan.packing:
        reason = isolation.why_not_packed(plan.attention)
        if reason is not None:
            return f"packing=True with attention={plan.attention} would change what is learned: {reason}; use packing=False"
    splits = plan.gradient_accumulation_steps > 1 or plan.data_parallel > 1
    if splits and not isolation.loss_splits:
        return (
            "the model's loss is taken over a whole batch and is no mean over its texts, as a router's loss is "
            "(output_router_logits); use gradient_accumulation_steps=1 and one process, or turn that loss off in the config"
        )
    return None


def packs(profile: ModelProfile, kernels: Sequence[str]) -> bool:
    """Return whether texts may share a row with any of these attention kernels."""
    return any(profile.isolation.why_not_packed(kernel) is None for kernel in kernels)


def why_never_packed(profile: ModelProfile, kernels: Sequence[str]) -> str | None:
    """Return why texts may share a row with none of these attention kernels, or None where they may with some."""
    if profile.objective != "causal-lm":
        return f"packing is for causal-lm, and the model trains on {profile.objective}"
    if packs(profile, kernels):
        return None
    return next((reason for kernel in kernels if (reason := profile.isolation.why_not_packed(kernel))), None)
