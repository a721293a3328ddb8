"""Handle the parts of a layer whose matrices ranks share: its attention, and its feed-forward network.

A part with plain styles alone is entered once, however many matrices read its input, and left where its last matrix ends.
transformers would sum the gradient of the input for every matrix. Other parts run as transformers has them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from upshift.internals.torch_names import tree_map
from upshift.training.parallel.exchanged import Exchanged, Way, gathered, own, same, sum_shared, summed
from upshift.training.parallel.regathered import Regathered

PLAIN = ("colwise", "rowwise", "replicated_with_grad_allreduce")
_IN_PART = re.compile(r"((.*?\.\d+)\.[^.]+)\.")  # the name of the part in its layer, which has a number


@dataclass(frozen=True)
class Part:
    """A part of a layer. ``plain`` says that every weight in it belongs to a module with a plain style."""

    layer: str
    module: nn.Module
    plain: bool


def find_parts(model: nn.Module, styles: dict[str, str]) -> dict[str, Part]:
    modules = dict(model.named_modules())
    found = {match[1]: match[2] for match in map(_IN_PART.match, styles) if match}
    return {name: Part(layer, modules[name], _is_plain(name, modules[name], styles)) for name, layer in found.items()}


def part_of(name: str, parts: dict[str, Part]) -> Part | None:
    """Return the part that contains a module or weight, or None."""
    match = _IN_PART.match(name)
    return parts.get(match[1]) if match else None


def _is_plain(name: str, part: nn.Module, styles: dict[str, str]) -> bool:
    owners = {path.rpartition(".")[0] for path, _ in part.named_parameters()}
    inside = [style for path, style in styles.items() if path.startswith(f"{name}.")]
    return all(styles.get(f"{name}.{owner}") in PLAIN for owner in owners) and all(style in PLAIN for style in inside)


def enter(part: nn.Module, group: dist.ProcessGroup, *, plain: bool, sequence: bool) -> None:
    """Exchange the input of a part.

    The input of a plain part enters as it is, and its gradient is summed. If ranks share tokens, the tokens are gathered, and
    their gradient is summed and shared. Any other part gives each rank the whole gradient, and a result that is whole.
    """
    there: Way = gathered if sequence else same
    back: Way = (sum_shared if sequence else summed) if plain else own

    def arrive(module: nn.Module, args: Any, kwargs: Any) -> Any:
        hidden = _hidden(args, kwargs)
        entered = Exchanged.apply(_as_read(hidden) if plain else hidden, group, there, back)  # type: ignore[no-untyped-call]
        return _given(args, kwargs, {hidden: entered}, group, plain=plain)

    if plain or sequence:
        part.register_forward_pre_hook(arrive, with_kwargs=True)
    if sequence and not plain:
        part.register_forward_hook(_share_result(group), with_kwargs=True)


def _share_result(group: dist.ProcessGroup) -> Callable[..., Any]:
    """Return a hook that keeps this rank's tokens of a result. Some feed-forward networks return [batch x tokens, hidden]."""

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        result = output[0] if isinstance(output, tuple) else output
        tokens = result.reshape(*_hidden(args, kwargs).shape[:-1], result.shape[-1])
        shared = Exchanged.apply(tokens, group, own, gathered)  # type: ignore[no-untyped-call]
        shared = shared.flatten(0, 1) if result.ndim == 2 else shared
        return (shared, *output[1:]) if isinstance(output, tuple) else shared

    return leave


def enter_and_let_go(layer: nn.Module, part: nn.Module, group: dist.ProcessGroup) -> None:
    """Exchange the input of a plain part with shared tokens as ``enter`` does, but keep only the rank's own tokens of it.

    A recomputed layer keeps nothing anyway.
    """
    run = part.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = _hidden(args, kwargs)
        own_tokens = _as_read(hidden)
        whole = Exchanged.apply(own_tokens, group, gathered, sum_shared)  # type: ignore[no-untyped-call]
        args, kwargs = _given(args, kwargs, {hidden: whole}, group, plain=True)
        if getattr(layer, "gradient_checkpointing", False) or not torch.is_grad_enabled():
            return run(*args, **kwargs)
        kept = Regathered(own_tokens, whole, group)
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
            return run(*args, **kwargs)

    part.forward = forward


def _hidden(args: Any, kwargs: Any) -> torch.Tensor:
    hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden


def _given(
    args: Any, kwargs: Any, instead: dict[torch.Tensor, torch.Tensor], group: dist.ProcessGroup, *, plain: bool
) -> tuple[Any, Any]:
    """Return the arguments with replaced tensors. Each rank of a plain part has a term of the gradient of every tensor that
    enters it."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if tensor in instead:
            return instead[tensor]
        if not (plain and tensor.requires_grad):
            return tensor
        return Exchanged.apply(tensor, group, same, summed)  # type: ignore[no-any-return,no-untyped-call]

    args, kwargs = tree_map(torch.Tensor, moved, (args, kwargs))
    return args, kwargs


def _as_read(hidden: torch.Tensor) -> torch.Tensor:
    """Return the input in the dtype that autocast gives every matrix of a plain part: fewer bytes are exchanged, and kept
    once."""
    device = hidden.device.type
    return hidden.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else hidden


def leaving(group: dist.ProcessGroup, there: Way, back: Way) -> Callable[..., Any]:
    """Return a hook on the output of a layer or a part: hidden states, or several values with the hidden states first."""

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (Exchanged.apply(output[0], group, there, back), *output[1:])  # type: ignore[no-untyped-call]
        return Exchanged.apply(output, group, there, back)  # type: ignore[no-untyped-call]

    return leave
