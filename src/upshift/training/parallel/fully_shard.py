"""Run ZeRO 2 and 3 by torch's fully_shard: data-parallel ranks divide weights, gradients and optimizer state, layer by layer.

Gradients are summed, not averaged: each rank has its share of the mean loss of the global batch. fp32 weights are gathered in
the precision that the plan computes in, so that nothing is cast in the layers. Gradients are summed in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from upshift.models.build import find_stacks
from upshift.planning.plan import Plan
from upshift.training.parallel.experts import expert_modules
from upshift.training.parallel.place import Place

COMPUTED_IN = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}


def shard_weights(model: nn.Module, place: Place) -> None:
    """Shard the weights in place, and move them onto the plan's device.

    Weights become DTensors. Outside of a pass each rank has its rows of them.
    """
    plan = place.plan
    mesh, policy = place.sharing, policy_of(plan)
    keeps = plan.layout.fully_shard == "gradients"
    for experts in expert_modules(model, place):
        assert place.experts is not None
        fully_shard(experts, reshard_after_forward=not keeps, mesh=place.experts["replicas"], mp_policy=policy)
    for _, stack in find_stacks(model):
        for layer in stack:
            fully_shard(layer, reshard_after_forward=not keeps, mesh=mesh, mp_policy=policy)
    root = fully_shard(model, reshard_after_forward=False, mesh=mesh, mp_policy=policy)  # the backward pass begins there at once
    for module in sharded_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    root.set_reduce_scatter_unused_params(True)  # ranks' micro-batches may use different ones


def policy_of(plan: Plan) -> MixedPrecisionPolicy:
    dtype = COMPUTED_IN.get(plan.precision)
    return MixedPrecisionPolicy() if dtype is None else MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)


def sharded_modules(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def announce(model: nn.Module, plan: Plan, *, last: bool) -> None:
    """Tell fully_shard before a micro-batch whether it is the last one of the step.

    Only then are gradients summed over replicas. Only then do ranks that keep whole weights through the backward pass let go
    of them.
    """
    if not isinstance(model, FSDPModule):
        return
    model.set_requires_all_reduce(last)
    if plan.layout.fully_shard == "gradients":
        model.set_reshard_after_backward(last)


def let_go(model: nn.Module) -> None:
    """Drop weights that are whole after a pass without a backward pass."""
    for module in sharded_modules(model):
        module.reshard()
