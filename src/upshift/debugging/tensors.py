"""Find the tensors in a module's inputs and outputs, and the part of each that is here to be measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

FLOATS = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float64: "float64"}


def local_part(tensor: Tensor) -> Tensor | None:
    """Return the part of a tensor that this process has; None where that is nothing that has a range."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return tensor if tensor.dtype in FLOATS and tensor.numel() and tensor.device.type != "meta" else None


def tensors(inputs: Any, named: Any, output: Any) -> Iterator[tuple[str, Tensor]]:
    for place, value in enumerate(inputs):
        yield from inside(value, f"input[{place}]")
    for name, value in named.items():
        yield from inside(value, f"input[{name}]")
    yield from inside(output, "output")


def inside(value: Any, label: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield label, value
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from inside(part, f"{label}[{name}]")
    elif isinstance(value, list | tuple):
        for place, part in enumerate(value):
            yield from inside(part, f"{label}[{place}]")


def numbers(ranges: list[Tensor]) -> list[list[float]]:
    if not ranges:
        return []
    stacked: list[list[float]] = torch.stack([found.to(ranges[0].device, torch.float32) for found in ranges]).tolist()
    return stacked


def holds_bad(tensor: Tensor) -> bool:
    local = local_part(tensor)
    return local is not None and not bool(torch.isfinite(local).all()) and not is_mask(tensor)


def is_mask(tensor: Tensor) -> bool:
    """Return whether a tensor is a mask: zero where attention may look, minus infinity where not."""
    local = local_part(tensor)
    return local is not None and bool(((local == -torch.inf) | (local == 0)).all())
