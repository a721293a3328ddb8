"""Convert the state of schedulers of any class to JSON and back: the containers of Python and numbers, no objects."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

KIND = "is"  # the key that marks a type that JSON does not have
CONTAINERS: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset}
MAPPINGS: dict[str, type] = {"dict": dict, "Counter": Counter, "OrderedDict": OrderedDict}


class NotPlain(Exception):
    """An object that cannot be written, and its place in the state."""


def to_json(value: Any, where: str) -> Any:
    """Return the value as plain JSON data. Raise NotPlain, which names the place from `where` on."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [to_json(item, f"{where}[{number}]") for number, item in enumerate(value)]
    if type(value) in MAPPINGS.values():
        return _mapping(value, where)
    if type(value) in CONTAINERS.values():
        return {KIND: type(value).__name__, "of": [to_json(item, f"{where}[{n}]") for n, item in enumerate(value)]}
    if type(value) is deque:
        return {KIND: "deque", "of": to_json(list(value), where), "maxlen": value.maxlen}
    if type(value) is torch.dtype:
        return {KIND: "torch.dtype", "of": str(value).removeprefix("torch.")}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biuf":
        return {KIND: "numpy", "dtype": value.dtype.str, "scalar": isinstance(value, np.generic), "of": value.tolist()}
    if type(value) is Tensor and not value.is_complex():
        return {KIND: "tensor", "dtype": str(value.dtype).removeprefix("torch."), "of": value.detach().cpu().tolist()}
    raise NotPlain(f"{where}, a {type(value).__module__}.{type(value).__qualname__}")


def _mapping(value: dict[Any, Any], where: str) -> Any:
    if type(value) is dict and all(type(key) is str and key != KIND for key in value):
        return {key: to_json(item, f"{where}.{key}") for key, item in value.items()}
    pairs = [[to_json(key, f"{where}'s key"), to_json(item, f"{where}[{key!r}]")] for key, item in value.items()]
    return {KIND: type(value).__name__, "of": pairs}


def from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(KIND)
    if kind is None:
        return {key: from_json(item) for key, item in value.items()}
    if kind in MAPPINGS:
        return MAPPINGS[kind]({from_json(key): from_json(item) for key, item in value["of"]})
    if kind in CONTAINERS:
        return CONTAINERS[kind](from_json(value["of"]))
    if kind == "deque":
        return deque(from_json(value["of"]), maxlen=value["maxlen"])
    if kind == "torch.dtype":
        return getattr(torch, value["of"])
    if kind == "numpy":
        array = np.array(value["of"], dtype=np.dtype(value["dtype"]))
        return array[()] if value["scalar"] else array
    return torch.tensor(value["of"], dtype=getattr(torch, value["dtype"]))
