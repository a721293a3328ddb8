"""Convert the few torch values that stand among plain ones (a dtype, a size, a tensor learning rate) to JSON and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def encode(value: Any) -> Any:
    """Return the value as plain JSON data. Raise TypeError for a value that would not come back as it was.

    Tuples come back as lists.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.dtype):
        return {"torch.dtype": _dtype_name(value)}
    if isinstance(value, torch.Size):
        return {"torch.Size": list(value)}
    if type(value) is Tensor and value.ndim == 0:
        return {"torch.Tensor": value.item(), "dtype": _dtype_name(value.dtype)}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r:.80}")


def decode(value: Any) -> Any:
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "torch.dtype" in value:
        return getattr(torch, value["torch.dtype"])
    if "torch.Size" in value:
        return torch.Size(value["torch.Size"])
    if "torch.Tensor" in value:
        return torch.tensor(value["torch.Tensor"], dtype=getattr(torch, value["dtype"]))
    return {key: decode(item) for key, item in value.items()}


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
