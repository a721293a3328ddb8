"""Write and read an optimizer's state as safetensors and JSON: tensors by `<parameter name>.<state key>`, no pickle.

torch's own state_dict numbers the parameters, and its load_state_dict casts state to the parameter's dtype. Here names decide,
and every bit is kept. Options that only say how a step is computed (fused, foreach ...) stay as the running optimizer has
them, so a run may resume with another implementation of the same optimizer.

Convert the few torch values that stand among plain ones (a dtype, a size, a tensor learning rate) to JSON and back.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from upshift.errors import RequestError
from upshift.internals.torch_names import STORAGE
from upshift.loading.files.safetensors_header import read_header
from upshift.loading.files.tensors import read_tensor
from upshift.planning.optimizers import optimizers
from upshift.training.checkpoint.state import SavedGroup, SavedOptimizer, SavedSubclass
from upshift.training.optimizers.cpu_offload import HostOptimizer
from upshift.training.optimizers.sharded import ShardedOptimizer


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


IMPLEMENTATION_OPTIONS = frozenset({"fused", "foreach", "capturable", "differentiable"})
MAX_FILE_BYTES = 4 * 10**9  # safetensors wants every tensor of one file in host memory at once
REBUILDABLE_PREFIX = "torchao."  # the only package whose tensor classes a checkpoint may name


def plain_name(name: str) -> str:
    """Return a name without the prefix that torch.compile adds when it wraps a module instead of compiling it in place."""
    return name.replace("_orig_mod.", "")


def parameter_names(model: nn.Module) -> dict[Tensor, str]:
    return {parameter: plain_name(name) for name, parameter in model.named_parameters()}


def updated_parameter_names(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[Tensor, str]:
    """Return the names of the tensors that the optimizer updates: the model's parameters, or their copies on the host."""
    names = parameter_names(model)
    return (
        {copy: names[parameter] for copy, parameter in optimizer.copies.items()}
        if isinstance(optimizer, HostOptimizer)
        else names
    )


def class_name(optimizer: torch.optim.Optimizer) -> str:
    return type(optimizer.inner if isinstance(optimizer, (HostOptimizer, ShardedOptimizer)) else optimizer).__name__


def write_optimizer(directory: Path, optimizer: torch.optim.Optimizer, model: nn.Module) -> SavedOptimizer:
    names = updated_parameter_names(optimizer, model)
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, dict[str, Any]] = {}
    subclasses: dict[str, SavedSubclass] = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            full_name = f"{names[parameter]}.{key}"
            if not isinstance(value, Tensor):
                numbers.setdefault(names[parameter], {})[key] = encode(value)
            elif type(value) in (Tensor, nn.Parameter):
                tensors[full_name] = value.detach()
            else:
                subclasses[full_name], parts = _flatten_subclass(value, optimizer)
                tensors |= {f"{full_name}.{part}": tensor for part, tensor in parts.items()}
    _write_tensors(directory, tensors)
    return SavedOptimizer(
        optimizer_class=class_name(optimizer),
        groups=tuple(_saved_group(group, names) for group in optimizer.param_groups),
        numbers=numbers,
        subclasses=subclasses,
    )


def describe_optimizer(optimizer: torch.optim.Optimizer, names: dict[Tensor, str]) -> SavedOptimizer:
    """Return the description of an optimizer without the tensors of its state. ``names`` are those of the tensors that it
    updates."""
    numbers = {
        names[part]: {key: encode(value) for key, value in state.items() if not isinstance(value, Tensor)}
        for part, state in optimizer.state.items()
    }
    return SavedOptimizer(
        optimizer_class=class_name(optimizer), subclasses={}, numbers={name: kept for name, kept in numbers.items() if kept},
        groups=tuple(_saved_group(group, names) for group in optimizer.param_groups),
    )  # fmt: skip


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    values = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum(part.numel() * part.element_size() for value in values for part in _plain_tensors(value).values())


def _plain_tensors(value: Tensor) -> dict[str, Tensor]:
    """Return the plain tensors that a state tensor consists of, if its class names them, or the tensor itself."""
    if not hasattr(value, "__tensor_flatten__"):
        return {"": value}
    return {name: getattr(value, name) for name in value.__tensor_flatten__()[0]}


def _saved_group(group: dict[str, Any], names: dict[Tensor, str]) -> SavedGroup:
    options = {key: encode(value) for key, value in group.items() if key != "params" and key not in IMPLEMENTATION_OPTIONS}
    return SavedGroup(parameters=tuple(names[parameter] for parameter in group["params"]), options=options)


def _write_tensors(directory: Path, tensors: dict[str, Tensor]) -> None:
    files: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        num_bytes = tensor.numel() * tensor.element_size()
        if files[-1] and size + num_bytes > MAX_FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(name)
        size += num_bytes
    for number, members in enumerate(files, start=1):
        suffix = "" if len(files) == 1 else f"-{number:05d}-of-{len(files):05d}"
        contents, storages = {}, set()
        for name in members:  # safetensors takes no two names for one storage, such as bitsandbytes' tables
            storage = STORAGE.of(tensors[name].untyped_storage())
            contents[name] = tensors[name].clone() if storage in storages else tensors[name].contiguous()
            storages.add(storage)
        save_file(contents, directory / f"optimizer{suffix}.safetensors")


def _flatten_subclass(value: Tensor, optimizer: torch.optim.Optimizer) -> tuple[SavedSubclass, dict[str, Tensor]]:
    kind = type(value)
    class_name = f"{kind.__module__}.{kind.__qualname__}"
    refusal = RequestError(
        f"the state of optimizer {type(optimizer).__name__} is in tensors of {class_name}, which cannot be saved; "
        f"use one of {', '.join(optimizers())}"
    )
    if not class_name.startswith(REBUILDABLE_PREFIX):
        raise refusal
    part_names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = {name: getattr(value, name) for name in part_names}
    if any(type(part) is not Tensor for part in parts.values()):
        raise refusal
    return SavedSubclass(tensor_class=class_name, parts=tuple(part_names), context=encode(context)), parts


def _rebuild_subclass(saved: SavedSubclass, parts: dict[str, Tensor]) -> Tensor:
    module_name, _, name = saved.tensor_class.rpartition(".")
    kind = getattr(importlib.import_module(module_name), name, None) if module_name.startswith(REBUILDABLE_PREFIX) else None
    if not (isinstance(kind, type) and issubclass(kind, Tensor)):
        raise RequestError(f"the checkpoint names tensor class {saved.tensor_class!r}; only those of torchao are known")
    tensor: Tensor = kind.__tensor_unflatten__(parts, decode(saved.context), None, None)  # type: ignore[attr-defined]
    return tensor


def read_optimizer(directory: Path, saved: SavedOptimizer, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Restore state and options in place. Raise RequestError if the optimizer is not the one that was saved."""
    if saved.optimizer_class != class_name(optimizer):
        raise RequestError(
            f"{directory} was trained with {saved.optimizer_class}, this run uses {class_name(optimizer)}; "
            "resume with the optim that the run was started with"
        )
    names = updated_parameter_names(optimizer, model)
    restore_options(directory, saved, optimizer, names)
    parameters = {name: parameter for parameter, name in names.items()}
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    optimizer.state.clear()
    for name, values in saved.numbers.items():
        optimizer.state[parameters[name]].update(decode(values))
    for name, key, tensor in _read_tensors(directory, saved):
        parameter = parameters[name]
        optimizer.state[parameter][key] = place_state(tensor, key, parameter, groups[parameter])


def restore_options(
    directory: Path, saved: SavedOptimizer, optimizer: torch.optim.Optimizer, names: dict[Tensor, str], *, some: bool = False
) -> None:
    """Restore the options of each parameter group. ``some`` says that this rank has only some of the saved parameters."""
    found = []
    for group in optimizer.param_groups:
        own = {names[parameter] for parameter in group["params"]}
        found += [one for one in saved.groups if own == {*one.parameters} or (some and own < {*one.parameters})]
    if len(found) != len(optimizer.param_groups) or (len(found) != len(saved.groups) and not some):
        raise RequestError(
            f"{directory} has other parameter groups than this run's optimizer; "
            "resume with the model and the optimizer settings that the run was started with"
        )
    for group, known in zip(optimizer.param_groups, found, strict=True):
        for key, value in decode(known.options).items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)  # in place: compiled steps hold this tensor
            else:
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value


def _read_tensors(directory: Path, saved: SavedOptimizer) -> Iterator[tuple[str, str, Tensor]]:
    """Yield parameter name, state key and tensor, one at a time, with subclasses put together again."""
    partial: dict[str, dict[str, Tensor]] = {full_name: {} for full_name in saved.subclasses}
    for path in sorted(directory.glob("optimizer*.safetensors")):
        for stored in read_header(path).tensors:
            full_name, tensor = stored.name, read_tensor(stored)
            owner, _, part = full_name.rpartition(".")
            if owner in partial:
                partial[owner][part] = tensor
                if len(partial[owner]) < len(saved.subclasses[owner].parts):
                    continue
                full_name, tensor = owner, _rebuild_subclass(saved.subclasses[owner], partial.pop(owner))
            name, _, key = full_name.rpartition(".")
            yield name, key, tensor


def place_state(tensor: Tensor, key: str, parameter: Tensor, group: dict[str, Any]) -> Tensor:
    """Return the tensor on the device where the optimizer looks for it.

    Step counters are on the host unless a kernel reads them.
    """
    if key == "step" and not (group.get("fused") or group.get("capturable")):
        return tensor
    if type(tensor) is Tensor and tensor.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
    return tensor.to(parameter.device)
