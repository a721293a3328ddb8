# needs torch
"""Avoid failures of half precision: keep a block in fp32, and detect weights of bf16 training before fp16 training starts."""

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
    """Make a block compute in fp32 from now on, while other blocks stay in half precision.

    Outside autocast its fp32 outputs are converted back to the half precision of its inputs, and limited to that type's range.
    Raise RequestError if the model has no such block.
    """
    try:
        block = model.get_submodule(name)
    except AttributeError:
        similar = [other_name for other_name, _ in model.named_modules() if other_name.endswith(name.rpartition(".")[2])][:3]
        raise RequestError(
            f"the model has no module {name!r}; it has {', '.join(similar) or 'others: model.named_modules()'}"
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
    """Return whether all numbers of the model's matrices are bf16 numbers.

    Stored in fp32, their lower bits are zero. Training in fp32 does not produce such weights.
    """
    fp32_matrices = []
    for parameter in model.parameters():
        if parameter.dim() < 2:
            continue
        local = local_part(parameter)
        if local is None or local.numel() < ENOUGH_NUMBERS:
            continue
        if parameter.dtype == torch.bfloat16:
            return True
        if parameter.dtype == torch.float32 and local.any():
            fp32_matrices.append(local)
    return bool(fp32_matrices) and not any(_uses_lower_bits(matrix) for matrix in fp32_matrices)


def _uses_lower_bits(matrix: Tensor) -> bool:
    """Return whether an fp32 matrix has numbers that are no bf16 numbers."""
    return bool((matrix.contiguous().view(torch.int32) & BF16_MANTISSA).any())


def examine_fp16(model: nn.Module) -> Finding | None:
    """Return a warning if the weights come from training in bf16. Call it before the first step in fp16."""
    if not stored_in_bf16(model):
        return None
    return warning(
        "fp16",
        what="the weights come from training in bf16, and fp16 is asked for",
        evidence="all its matrices hold numbers of bf16 alone",
        cause="bf16 goes to 3e38 and fp16 ends at 65,504: such models overflow in fp16, often within the first steps",
        fix="bf16=True instead of fp16=True; to see where it overflows: debug='underflow_overflow'",
    )
