"""Give each rank its own tokens between the matrices that ranks of tensor parallelism share (sequence parallelism).

The unmodified model sees whole sequences. From its first layer on each rank has its part of the tokens, which a part of a
layer gathers (layer_parts.py). After the last layer all ranks have all tokens again (Korthikanti et al. 2022, section 4.2).
Modules that read every token by itself (norms, sums, dropout) work on the rank's own tokens, so their weights get a part of
their gradient.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from upshift.planning.plan import Plan
from upshift.training.parallel.exchanged import Exchanged, gathered, own
from upshift.training.parallel.layer_parts import Part, enter, leaving
from upshift.training.parallel.partial import mark_partial

Stacks = list[nn.ModuleList]


def reason_not_sequence(model: nn.Module, plan: Plan, parts: dict[str, Part]) -> str | None:
    """Return why the tokens cannot be shared between the matrices of this model, and the next best, or None."""
    degree, instead = plan.layout.tensor_parallel, "use sequence_parallel=False"
    tokens = plan.sequence_length // plan.layout.context_parallel
    if tokens % degree or plan.pad_multiple % degree:
        return (
            f"sequence_parallel shares micro-batches that are multiples of {plan.pad_multiple} tokens, at most {tokens}, among "
            f"tensor_parallel={degree} ranks, which does not divide them; use a sequence length and a degree that do, or "
            "sequence_parallel=False"
        )
    for layer in (layer for stack in stacks_of(model, parts) for layer in stack):
        for name, child in layer.named_children():
            if isinstance(child, nn.ModuleList | nn.ModuleDict) and any(True for _ in child.parameters()):
                return f"sequence_parallel: the model's layers have a list of modules ({name}), not one with one input; {instead}"
    return None


def stacks_of(model: nn.Module, parts: dict[str, Part]) -> Stacks:
    """Return every list of layers that holds the layer of a part."""
    names = dict.fromkeys(part.layer.rpartition(".")[0] for part in parts.values())
    return [stack for stack in map(model.get_submodule, names) if isinstance(stack, nn.ModuleList)]


def share_tokens(model: nn.Module, parts: dict[str, Part], group: dist.ProcessGroup) -> None:
    """Add hooks to the first and the last layer of every stack, and around modules of a layer that do not work token by token."""
    known = {id(part.module) for part in parts.values()}
    for stack in stacks_of(model, parts):
        for layer in stack:
            mark_partial(layer)
            for child in layer.children():
                if id(child) in known:
                    continue
                if _by_token(child):
                    for module in child.modules():
                        mark_partial(module)
                else:
                    enter(child, group, plain=False, sequence=True)
        stack[0].register_forward_pre_hook(_sharing(group), with_kwargs=True)
        stack[-1].register_forward_hook(leaving(group, gathered, own))


def _by_token(child: nn.Module) -> bool:
    """Return whether a module works token by token.

    Norms and scales have a number for every feature. Modules that mix tokens, or have matrices, have more.
    """
    return all(parameter.ndim <= 1 for parameter in child.parameters())


def _sharing(group: dist.ProcessGroup) -> Any:
    def share(layer: nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            return (Exchanged.apply(args[0], group, own, gathered), *args[1:]), kwargs  # type: ignore[no-untyped-call]
        shared = Exchanged.apply(kwargs["hidden_states"], group, own, gathered)  # type: ignore[no-untyped-call]
        return args, kwargs | {"hidden_states": shared}

    return share
