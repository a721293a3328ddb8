"""Write and read an optimizer's state as safetensors and JSON, without a pickle.

Tensors have the names `<parameter name>.<state key>`. torch's own state_dict numbers the parameters, and its load_state_dict
casts state to the dtype of the parameter. Here names identify the parameters, and every bit is kept. Options that only say how
a step is computed (fused, foreach ...) stay as in the running optimizer, so a run may resume with another implementation of
the same optimizer.

The few torch values among the plain ones (a dtype, a size, a tensor learning rate) are converted to JSON and back.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    """Return the value as plain JSON data. ``decode`` returns the value again, with lists in place of tuples.

    Raise TypeError for a value that has no such form.
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
MAX_FILE_BYTES = 4 * 10**9  # safetensors needs all tensors of one file in host memory at once
REBUILDABLE_PREFIX = "torchao."  # the only package whose tensor classes a checkpoint may name


def plain_name(name: str) -> str:
    """Return a name without the prefix that torch.compile adds when it wraps a module instead of compiling it in place."""
    return name.replace("_orig_mod.", "")


def parameter_names(model: nn.Module) -> dict[Tensor, str]:
    return {parameter: plain_name(name) for name, parameter in model.named_parameters()}


def updated_parameter_names(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[Tensor, str]:
    """Return the names of the tensors that the optimizer updates: the model's parameters, or their copies on the host."""
    names = parameter_names(model)
    if isinstance(optimizer, HostOptimizer):
        return {copy: names[parameter] for copy, parameter in optimizer.copies.items()}
    return names


def class_name(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of the class that computes the update: that of shards, and of copies on the host, is inside."""
    while isinstance(optimizer, (HostOptimizer, ShardedOptimizer)):
        optimizer = optimizer.inner
    return type(optimizer).__name__


@dataclass(frozen=True)
class OptimizerContent:
    """The parts of an optimizer that a checkpoint holds."""

    class_name: str
    names: Mapping[Tensor, str]  # the parameter name of each tensor that the optimizer updates
    state: Mapping[Tensor, dict[str, Any]]
    groups: Sequence[dict[str, Any]]


def optimizer_content(optimizer: torch.optim.Optimizer, model: nn.Module) -> OptimizerContent:
    names = updated_parameter_names(optimizer, model)
    return OptimizerContent(class_name(optimizer), names, optimizer.state, optimizer.param_groups)


def check_same_optimizer(directory: Path, saved_class: str, optimizer: torch.optim.Optimizer) -> None:
    """Raise RequestError if a checkpoint is of another optimizer. ``saved_class``: the name of its class."""
    if saved_class != class_name(optimizer):
        raise RequestError(
            f"{directory} was trained with {saved_class}, this run uses {class_name(optimizer)}; "
            "resume with the optim that the run was started with"
        )


def cannot_divide(directory: Path) -> RequestError:
    """Return the error for a state of tensor subclasses, which cannot be read in pieces."""
    return RequestError(f"{directory} has an optimizer of 8 or 4 bits, whose state cannot be divided; resume in one process")


def write_optimizer(directory: Path, content: OptimizerContent) -> SavedOptimizer:
    """Write the tensors of the state. Return the description of everything else."""
    names = content.names
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, dict[str, Any]] = {}
    subclasses: dict[str, SavedSubclass] = {}
    for parameter, state in content.state.items():
        for key, value in state.items():
            full_name = f"{names[parameter]}.{key}"
            if not isinstance(value, Tensor):
                numbers.setdefault(names[parameter], {})[key] = encode(value)
            elif type(value) in (Tensor, nn.Parameter):
                tensors[full_name] = value.detach()
            else:
                subclasses[full_name], components = _flatten_subclass(value, content.class_name)
                tensors |= {f"{full_name}.{component}": tensor for component, tensor in components.items()}
    _write_tensors(directory, tensors)
    return SavedOptimizer(
        optimizer_class=content.class_name,
        groups=tuple(_saved_group(group, names) for group in content.groups),
        numbers=numbers,
        subclasses=subclasses,
    )


def describe_optimizer(optimizer: torch.optim.Optimizer, names: dict[Tensor, str]) -> SavedOptimizer:
    """Return the description of an optimizer without the tensors of its state.

    ``names`` has the name of each tensor that the optimizer updates. A rank whose shard of a parameter is empty does not count
    its steps: a resumed one began again at 0, and ranks with elements have the right count.
    """
    numbers: dict[str, dict[str, Any]] = {}
    for tensor, state in optimizer.state.items():
        values = {key: encode(value) for key, value in state.items() if not isinstance(value, Tensor)}
        if values and tensor.numel():
            numbers[names[tensor]] = values
    return SavedOptimizer(
        optimizer_class=class_name(optimizer),
        groups=tuple(_saved_group(group, names) for group in optimizer.param_groups),
        numbers=numbers,
        subclasses={},
    )


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the size of the optimizer's state in bytes."""
    values = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    tensors = [tensor for value in values for tensor in _plain_tensors(value).values()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _plain_tensors(value: Tensor) -> dict[str, Tensor]:
    """Return the plain tensors inside a tensor of a subclass, by their names, or the tensor itself."""
    if not hasattr(value, "__tensor_flatten__"):
        return {"": value}
    return {name: getattr(value, name) for name in value.__tensor_flatten__()[0]}


def _saved_group(group: dict[str, Any], names: Mapping[Tensor, str]) -> SavedGroup:
    options = {key: encode(value) for key, value in group.items() if key != "params" and key not in IMPLEMENTATION_OPTIONS}
    return SavedGroup(parameters=tuple(names[parameter] for parameter in group["params"]), options=options)


def _write_tensors(directory: Path, tensors: dict[str, Tensor]) -> None:
    """Write the tensors to one file, or to several of limited size."""
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
        contents: dict[str, Tensor] = {}
        storages = set()
        # safetensors does not write one storage under two names, such as the tables of bitsandbytes.
        for name in members:
            storage = STORAGE.of(tensors[name].untyped_storage())
            contents[name] = tensors[name].clone() if storage in storages else tensors[name].contiguous()
            storages.add(storage)
        save_file(contents, directory / f"optimizer{suffix}.safetensors")


def _flatten_subclass(value: Tensor, optimizer_name: str) -> tuple[SavedSubclass, dict[str, Tensor]]:
    """Return the description and the plain tensors of a tensor of a subclass. Raise RequestError for unknown classes."""
    tensor_class = type(value)
    tensor_name = f"{tensor_class.__module__}.{tensor_class.__qualname__}"
    error = RequestError(
        f"the state of optimizer {optimizer_name} is in tensors of {tensor_name}, which cannot be saved; "
        f"use one of {', '.join(optimizers())}"
    )
    if not tensor_name.startswith(REBUILDABLE_PREFIX):
        raise error
    names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
    components = {name: getattr(value, name) for name in names}
    if any(type(component) is not Tensor for component in components.values()):
        raise error
    return SavedSubclass(tensor_class=tensor_name, parts=tuple(names), context=encode(context)), components


def _rebuild_subclass(saved: SavedSubclass, components: dict[str, Tensor]) -> Tensor:
    """Return the tensor of a subclass from its plain tensors. Raise RequestError for unknown classes."""
    module_name, _, name = saved.tensor_class.rpartition(".")
    tensor_class: Any = None
    if module_name.startswith(REBUILDABLE_PREFIX):
        tensor_class = getattr(importlib.import_module(module_name), name, None)
    if not (isinstance(tensor_class, type) and issubclass(tensor_class, Tensor)):
        raise RequestError(f"the checkpoint names tensor class {saved.tensor_class!r}; only those of torchao are known")
    rebuild: Any = tensor_class.__tensor_unflatten__  # type: ignore[attr-defined]
    tensor: Tensor = rebuild(components, decode(saved.context), None, None)
    return tensor


def read_optimizer(directory: Path, saved: SavedOptimizer, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Restore state and options in place. Raise RequestError if another optimizer was saved."""
    check_same_optimizer(directory, saved.optimizer_class, optimizer)
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
    directory: Path,
    saved: SavedOptimizer,
    optimizer: torch.optim.Optimizer,
    names: dict[Tensor, str],
    *,
    allow_subset: bool = False,
) -> None:
    """Restore the options of each parameter group. Raise RequestError if the saved groups are different.

    ``allow_subset`` is for a rank that has only some of the saved parameters.
    """
    matches = []
    for group in optimizer.param_groups:
        group_names = {names[parameter] for parameter in group["params"]}
        for saved_group in saved.groups:
            saved_names = {*saved_group.parameters}
            if group_names == saved_names or (allow_subset and group_names < saved_names):
                matches.append(saved_group)
    if len(matches) != len(optimizer.param_groups) or (len(matches) != len(saved.groups) and not allow_subset):
        raise RequestError(
            f"{directory} has other parameter groups than this run's optimizer; "
            "resume with the model and the optimizer settings that the run was started with"
        )
    for group, saved_group in zip(optimizer.param_groups, matches, strict=True):
        for key, value in decode(saved_group.options).items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)  # in place, because compiled steps use this tensor
            else:
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value


def _read_tensors(directory: Path, saved: SavedOptimizer) -> Iterator[tuple[str, str, Tensor]]:
    """Yield parameter name, state key and tensor, one at a time. Tensors of subclasses are rebuilt from their components."""
    partial: dict[str, dict[str, Tensor]] = {full_name: {} for full_name in saved.subclasses}
    for path in sorted(directory.glob("optimizer*.safetensors")):
        for stored in read_header(path).tensors:
            full_name = stored.name
            tensor = read_tensor(stored)
            owner, _, component = full_name.rpartition(".")
            if owner in partial:
                partial[owner][component] = tensor
                if len(partial[owner]) < len(saved.subclasses[owner].parts):
                    continue
                full_name = owner
                tensor = _rebuild_subclass(saved.subclasses[owner], partial.pop(owner))
            name, _, key = full_name.rpartition(".")
            yield name, key, tensor


def place_state(tensor: Tensor, key: str, parameter: Tensor, group: dict[str, Any]) -> Tensor:
    """Return the state tensor on the device where the optimizer needs it.

    Step counters stay on the host unless a kernel reads them.
    """
    if key == "step" and not (group.get("fused") or group.get("capturable")):
        return tensor
    if type(tensor) is Tensor and tensor.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
    return tensor.to(parameter.device)
