"""Keep weights equal that the first and the last pipeline stage both have, such as an embedding that is the head too.

Both stages get the same gradient, the sum of the two, so both weights stay the same. In the norm of all gradients it counts
once. An update that rounds at random draws other numbers in each stage, so the last stage then takes the first one's weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from upshift.training.parallel.gradients import local
from upshift.training.parallel.stage import Stage, modules_of


def copies_in(model: nn.Module) -> set[nn.Parameter]:
    """Return weights of the last stage that the first has too."""
    return {weight for stage, weight in _shared(model) if stage.is_last}


def sum_tied(model: nn.Module, gradient_of: Callable[[nn.Parameter], torch.Tensor | None]) -> None:
    """Sum each gradient from ``gradient_of`` in place between the first stage and the last: this rank's part of it."""
    for stage, weight in _shared(model):
        own = gradient_of(weight)
        if own is None or not own.numel():
            continue
        peer = _peer(stage)
        sent, received = own.contiguous(), torch.empty_like(own, memory_format=torch.contiguous_format)
        exchanged = [dist.P2POp(dist.isend, sent, peer, stage.group), dist.P2POp(dist.irecv, received, peer, stage.group)]
        for work in dist.batch_isend_irecv(exchanged):
            work.wait()
        own.add_(received)


@torch.no_grad()
def agree_on_tied(model: nn.Module) -> None:
    """Copy the first stage's weights to the last, after an update that rounds at random."""
    for stage, weight in _shared(model):
        own = local(weight)
        whole = own.contiguous()
        if stage.is_last:
            dist.recv(whole, _peer(stage), stage.group)
            own.copy_(whole)
        else:
            dist.send(whole, _peer(stage), stage.group)


def _peer(stage: Stage) -> int:
    """Return the rank of the other stage."""
    return dist.get_global_rank(stage.group, 0 if stage.is_last else dist.get_world_size(stage.group) - 1)


def _shared(model: nn.Module) -> list[tuple[Stage, nn.Parameter]]:
    """Return trained weights that both stages have, in an order that is the same in both."""
    modules = [module for module in modules_of(model) if hasattr(module, "pipeline_stage")]
    stages: list[tuple[nn.Module, Any]] = [(module, module.pipeline_stage) for module in modules]
    found = [(stage, module.get_parameter(name)) for module, stage in stages for name in stage.shared]
    return [(stage, weight) for stage, weight in found if weight.requires_grad]
