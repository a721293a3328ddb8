"""Handle half precision where it fails: keep a block in fp32, and find weights of bf16 training before fp16 ruins them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from upshift.debugging.finding import Finding, warning
from upshift.debugging.numerics import local_part
from upshift.errors import RequestError

BF16_MANTISSA = 0xFFFF  # bits of a float32 that a bfloat16 lacks
ENOUGH_NUMBERS = 1024  # a smaller weight does not show whether it was stored in bf16


def keep_in_fp32(model: nn.Module, name: str) -> None:
    """Make a block compute in fp32 from now on, beside others in half precision.

    Outside autocast its fp32 outputs return to the half precision of its inputs, within that type's limits.
    """
    try:
        block = model.get_submodule(name)
    except AttributeError:
        near = [other for other, _ in model.named_modules() if other.endswith(name.rpartition(".")[2])][:3]
        raise RequestError(
            f"the model has no module {name!r}; it has {', '.join(near) or 'others: model.named_modules()'}"
        ) from None
    block.float()
    forward = block.forward

    def in_fp32(*inputs: Any, **named: Any) -> Any:
        halves: list[torch.dtype] = []

        def widen(value: Any) -> Any:
            if isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16):
                halves.append(value.dtype)
                return value.float()
            return value

        def narrow(value: Any) -> Any:
            if isinstance(value, Tensor) and value.dtype == torch.float32 and halves and not autocasts:
                limit = torch.finfo(halves[0]).max
                return value.clamp(-limit, limit).to(halves[0])
            return value

        device = next((p.device.type for p in block.parameters()), "cpu")
        autocasts = torch.is_autocast_enabled(device)
        with torch.autocast(device, enabled=False):
            output = forward(*(widen(value) for value in inputs), **{key: widen(value) for key, value in named.items()})
        return tuple(map(narrow, output)) if isinstance(output, tuple) else narrow(output)

    block.forward = in_fp32


@torch.no_grad()
def stored_in_bf16(model: nn.Module) -> bool:
    """Return whether the model's matrices hold numbers of bf16 alone.

    In fp32 their lower bits are then zero, which no fp32 training leaves.
    """
    matrices = [
        p for p in model.parameters() if p.dim() > 1 and (local := local_part(p)) is not None and local.numel() >= ENOUGH_NUMBERS
    ]
    if any(p.dtype == torch.bfloat16 for p in matrices):
        return True
    whole = [local for p in matrices if p.dtype == torch.float32 and (local := local_part(p)) is not None and local.any()]
    return bool(whole) and all(not bool((w.contiguous().view(torch.int32) & BF16_MANTISSA).any()) for w in whole)


def examine_fp16(model: nn.Module) -> Finding | None:
    """Return a warning before the first step in fp16, if the weights come from training in bf16."""
    if not stored_in_bf16(model):
        return None
    return warning(
        "fp16",
        what="the weights come from training in bf16, and fp16 is asked for",
        evidence="all its matrices hold numbers of bf16 alone",
        cause="bf16 goes to 3e38 and fp16 ends at 65,504: such models overflow in fp16, often within the first steps",
        fix="bf16=True instead of fp16=True; to see where it overflows: debug='underflow_overflow'",
    )
