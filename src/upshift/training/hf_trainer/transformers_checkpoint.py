"""Read and write the files from which transformers.Trainer resumes: optimizer.pt, scheduler.pt, scaler.pt and rng_state.pth.

Upshift and transformers both write and read these files, so either can continue a run of the other. They are in torch's format
and hold tensors, numbers and containers. torch reads them with ``weights_only=True``, which runs no code that a file names.
If Upshift wrote optimizer.pt, optimizer_parameters.json beside it has the parameter name of each number in it.

The state of a schedule or scaler that torch cannot read in this way is also written as JSON, in a form that keeps containers of
Python and numbers, and no objects.
"""

from __future__ import annotations

import json
import pickle
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from upshift.errors import RequestError
from upshift.internals.transformers_names import SAFE_GLOBALS
from upshift.text import one_line
from upshift.training.checkpoint.async_save import HostCopies
from upshift.training.checkpoint.optimizer import (
    IMPLEMENTATION_OPTIONS,
    cannot_divide,
    check_same_optimizer,
    class_name,
    encode,
    place_state,
    updated_parameter_names,
)
from upshift.training.checkpoint.rng import HostRng, host_rng, restore_host_rng
from upshift.training.checkpoint.state import SavedGroup, SavedOptimizer
from upshift.value import Value, first_problem

OPTIMIZER_FILE = "optimizer.pt"
OPTIMIZER_NAMES_FILE = "optimizer_parameters.json"
SCHEDULER_FILE = "scheduler.pt"
SCALER_FILE = "scaler.pt"
BEFORE_BATCH_KEY = "upshift_before_next_batch"  # the generators before the batch was made that is not yet trained on
PARAMETER_SHAPED_STATES = (  # these have the shape of their parameter
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "momentum_buffer",
    "square_avg",
    "sum",
)
PLAIN_STATE_FIX = "keep only numbers, strings, containers and tensors there, or set save_only_model=True or save_strategy='no'"
RESUME_SAME_SETTINGS = "resume with the model and the optimizer settings that the run was started with"
TYPE_KEY = "is"  # marks a type that JSON does not have
CONTAINER_TYPES: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset}
MAPPING_TYPES: dict[str, type] = {"dict": dict, "Counter": Counter, "OrderedDict": OrderedDict}


class OptimizerNames(Value):
    """The class of an optimizer, and the names of its parameters."""

    optimizer_class: str
    groups: tuple[tuple[str, ...], ...]  # the parameter names of each group, in the order of the numbers in optimizer.pt


@dataclass(frozen=True)
class OptimizerCopy:
    """The parts of an optimizer that a checkpoint holds: its state_dict, and the names of its parameters."""

    state: dict[str, Any]
    names: OptimizerNames


def optimizer_names(optimizer: torch.optim.Optimizer, model: nn.Module) -> OptimizerNames:
    names = updated_parameter_names(optimizer, model)
    groups = tuple(tuple(names[parameter] for parameter in group["params"]) for group in optimizer.param_groups)
    return OptimizerNames(optimizer_class=class_name(optimizer), groups=groups)


def copy_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, *, to_host: bool) -> OptimizerCopy:
    """Return the optimizer's state and names. ``to_host`` copies the tensors, for training that goes on during the write."""
    state = optimizer.state_dict()
    return OptimizerCopy(_copy_tensors(state, HostCopies()) if to_host else state, optimizer_names(optimizer, model))


def _copy_tensors(value: Any, copies: HostCopies) -> Any:
    if isinstance(value, Tensor):
        return copies.copy(value)
    if type(value) in (dict, list, tuple):
        if isinstance(value, dict):
            return {key: _copy_tensors(item, copies) for key, item in value.items()}
        return type(value)(_copy_tensors(item, copies) for item in value)
    return value


def write_optimizer(directory: Path, optimizer: OptimizerCopy) -> None:
    """Write the optimizer's state and names. Raise RequestError if the state has objects that torch would have to unpickle."""
    path = directory / OPTIMIZER_FILE
    write_file(path, optimizer.state)
    (directory / OPTIMIZER_NAMES_FILE).write_text(optimizer.names.to_json(), encoding="utf-8")
    unsafe_names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    if unsafe_names:
        raise RequestError(
            f"the state of optimizer {optimizer.names.optimizer_class} has a {unsafe_names[0]}, which cannot be read again "
            "without running code; use another optimizer, or set save_only_model=True or save_strategy='no'"
        )


@dataclass(frozen=True)
class _Match:
    """One parameter group of the running optimizer, and the saved group."""

    group: dict[str, Any]
    saved: dict[str, Any]
    parameters: tuple[Tensor, ...]  # in the order of the numbers in the file


def read_optimizer(directory: Path, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Restore state and options in place. Raise RequestError if they belong to another optimizer or another model."""
    path = directory / OPTIMIZER_FILE
    saved = read_file(path)
    groups = saved.get("param_groups") if isinstance(saved, Mapping) else None
    if not isinstance(groups, list) or not isinstance(saved.get("state"), Mapping):
        raise RequestError(f"{path} is no state of an optimizer; resume from another checkpoint")
    matches = _match_groups(directory, groups, optimizer, model)
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        optimizer.load_state_dict(saved)  # the class restores its state in its own way
        return
    for match in matches:
        _restore_options(directory, match, class_name(optimizer))
    parameter_and_group = {
        number: (parameter, match.group)
        for match in matches
        for number, parameter in zip(match.saved["params"], match.parameters, strict=True)
    }
    optimizer.state.clear()
    for number, state in saved["state"].items():
        if number not in parameter_and_group:
            raise RequestError(f"{path} has a state of parameter {number}, which is in no group; resume from another checkpoint")
        parameter, group = parameter_and_group[number]
        _check_shapes(path, parameter, state)
        for key, value in state.items():
            optimizer.state[parameter][key] = place_state(value, key, parameter, group) if isinstance(value, Tensor) else value


def _match_groups(directory: Path, groups: list[Any], optimizer: torch.optim.Optimizer, model: nn.Module) -> list[_Match]:
    """Match groups by parameter names, or by their order if there are no names, as in checkpoints of transformers."""
    names = _read_names(directory)
    if names is None:
        sizes = [len(group["params"]) for group in groups]
        running_sizes = [len(group["params"]) for group in optimizer.param_groups]
        if sizes != running_sizes:
            raise RequestError(
                f"{directory} has an optimizer with groups of {sizes} parameters, this run has {running_sizes}; "
                f"{RESUME_SAME_SETTINGS}"
            )
        pairs = zip(optimizer.param_groups, groups, strict=True)
        return [_Match(group, saved, tuple(group["params"])) for group, saved in pairs]
    check_same_optimizer(directory, names.optimizer_class, optimizer)
    name_of = updated_parameter_names(optimizer, model)
    saved_sets = [frozenset(group) for group in names.groups]
    running_sets = [frozenset(name_of[parameter] for parameter in group["params"]) for group in optimizer.param_groups]
    if sorted(map(sorted, saved_sets)) != sorted(map(sorted, running_sets)):
        raise RequestError(f"{directory} has other parameter groups than this run's optimizer; {RESUME_SAME_SETTINGS}")
    parameter_of = {name: parameter for parameter, name in name_of.items()}
    matches = []
    for group, members in zip(optimizer.param_groups, running_sets, strict=True):
        index = saved_sets.index(members)
        parameters = tuple(parameter_of[name] for name in names.groups[index])
        matches.append(_Match(group, groups[index], parameters))
    return matches


def _read_names(directory: Path) -> OptimizerNames | None:
    path = directory / OPTIMIZER_NAMES_FILE
    if not path.is_file():
        return None
    try:
        return OptimizerNames.model_validate_json(path.read_bytes())
    except ValidationError as error:
        problem = first_problem(OptimizerNames, error)
        raise RequestError(f"{path} is no list of parameters ({problem}); resume from another checkpoint") from None


def _restore_options(directory: Path, match: _Match, optimizer_class: str) -> None:
    """Restore the learning rate, betas and other options, except those that only say how a step is computed."""
    ignored = {"params", *IMPLEMENTATION_OPTIONS}
    saved = {key: value for key, value in match.saved.items() if key not in ignored}
    missing = match.group.keys() - saved.keys() - ignored
    unknown = saved.keys() - match.group.keys() - {"initial_lr"}
    if missing and unknown:  # a newer version of the same optimizer would only add options
        raise RequestError(
            f"{directory} was trained with another optimizer than {optimizer_class}: it has the option {min(unknown)} and no "
            f"{min(missing)}; resume with the optim that the run was started with"
        )
    for key, value in saved.items():
        if isinstance(match.group.get(key), Tensor):
            match.group[key].fill_(value)  # in place, because compiled steps use this tensor
        else:
            match.group[key] = tuple(value) if isinstance(match.group.get(key), tuple) else value


def _check_shapes(path: Path, parameter: Tensor, state: Mapping[str, Any]) -> None:
    """Raise RequestError if a state has another shape than its parameter.

    Without names, parameters are matched only by their order. This check finds most wrong matches.
    """
    for key, value in state.items():
        if key not in PARAMETER_SHAPED_STATES or type(value) is not Tensor:
            continue
        if value.ndim == parameter.ndim > 0 and value.shape != parameter.shape:
            raise RequestError(
                f"{path} has {key} of shape {tuple(value.shape)} for a parameter of shape {tuple(parameter.shape)}; "
                f"{RESUME_SAME_SETTINGS}"
            )


def optimizer_by_names(
    directory: Path, groups: tuple[tuple[str, ...], ...], optimizer_class: str
) -> tuple[SavedOptimizer, dict[str, Tensor]]:
    """Return the optimizer's state by parameter names, in the form of sharded checkpoints: its description and its tensors.

    ``groups`` has the parameter names of the running optimizer, in the order of a file of transformers.
    """
    saved = read_file(directory / OPTIMIZER_FILE)
    names = _read_names(directory) or OptimizerNames(optimizer_class=optimizer_class, groups=groups)
    if [len(group["params"]) for group in saved["param_groups"]] != [len(group) for group in names.groups]:
        raise RequestError(f"{directory} has other parameter groups than this run's optimizer; {RESUME_SAME_SETTINGS}")
    pairs = list(zip(saved["param_groups"], names.groups, strict=True))
    name_of = {number: name for group, members in pairs for number, name in zip(group["params"], members, strict=True)}
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for number, state in saved["state"].items():
        for key, value in state.items():
            if type(value) is Tensor:
                tensors[f"{name_of[number]}.{key}"] = value.clone()
            elif isinstance(value, Tensor):
                raise cannot_divide(directory)
            else:
                numbers.setdefault(name_of[number], {})[key] = encode(value)
    skipped = {"params", *IMPLEMENTATION_OPTIONS}
    saved_groups = tuple(
        SavedGroup(parameters=members, options={key: encode(value) for key, value in group.items() if key not in skipped})
        for group, members in pairs
    )
    description = SavedOptimizer(optimizer_class=names.optimizer_class, groups=saved_groups, numbers=numbers, subclasses={})
    return description, tensors


def check_plain(holder: Any) -> None:
    """Raise RequestError if the state_dict of a schedule or a scaler has values other than numbers, strings, containers and
    tensors. The message names the first such value."""
    try:
        to_json(holder.state_dict(), type(holder).__name__)
    except NotPlain as error:
        raise RequestError(f"{error}, cannot be written to a checkpoint without pickle; {PLAIN_STATE_FIX}") from None


def write_state(path: Path, holder: Any) -> None:
    """Write the state_dict of a schedule or a scaler. Write JSON beside the file if torch cannot read it as plain data."""
    check_plain(holder)
    state = holder.state_dict()
    write_file(path, state)
    try:
        torch.load(path, weights_only=True)
    except pickle.UnpicklingError:
        document = json.dumps(to_json(state, type(holder).__name__))
        path.with_suffix(".json").write_text(document, encoding="utf-8")


def read_state(path: Path, holder: Any) -> None:
    """Load the state into a schedule or a scaler, if there is such a file."""
    json_path = path.with_suffix(".json")
    if json_path.is_file():
        holder.load_state_dict(from_json(json.loads(json_path.read_bytes())))
    elif path.is_file():
        holder.load_state_dict(read_file(path))


def rng_file(directory: Path, rank: int, world_size: int) -> Path:
    return directory / ("rng_state.pth" if world_size == 1 else f"rng_state_{rank}.pth")


def capture_rng(device: torch.device, before_batch: HostRng | None) -> dict[str, Any]:
    """Return the state of all generators in the form of transformers.

    ``before_batch`` is the state before the batch was made that is not yet trained on.
    """
    state: dict[str, Any] = _rng_to_dict(host_rng())
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    if before_batch is not None:
        state[BEFORE_BATCH_KEY] = _rng_to_dict(before_batch)
    return state


def _rng_to_dict(rng: HostRng) -> dict[str, Any]:
    return {"python": rng.python, "numpy": rng.numpy, "cpu": rng.cpu}


@dataclass(frozen=True)
class SavedRng:
    """The random number generators of one process in a checkpoint."""

    now: HostRng
    cuda: Tensor | list[Tensor] | None  # a list: one for each device of the host
    before_batch: HostRng | None

    def restore(self, device: torch.device) -> None:
        restore_host_rng(self.now)
        if device.type != "cuda" or self.cuda is None:
            return
        if isinstance(self.cuda, Tensor):
            torch.cuda.set_rng_state(self.cuda, device)
        else:
            torch.cuda.set_rng_state_all(self.cuda)


def read_rng(directory: Path, *, rank: int, world_size: int) -> SavedRng | None:
    """Return the saved random numbers, or None if the checkpoint has none for this rank."""
    paths = [rng_file(directory, rank, world_size)]
    if rank == 0:  # the other name: of several processes, or of one
        paths.append(rng_file(directory, rank, 1 if world_size > 1 else 2))
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        return None
    with SAFE_GLOBALS.get()():
        saved = read_file(path)
    try:
        before_batch = saved.get(BEFORE_BATCH_KEY)
        return SavedRng(
            now=_rng_from_dict(saved),
            cuda=saved.get("cuda"),
            before_batch=None if before_batch is None else _rng_from_dict(before_batch),
        )
    except (AttributeError, KeyError, TypeError):
        raise RequestError(f"{path} holds no states of random numbers; resume from another checkpoint") from None


def _rng_from_dict(saved: Mapping[str, Any]) -> HostRng:
    return HostRng(saved["cpu"], saved["python"], saved["numpy"])


def write_file(path: Path, value: Any) -> None:
    """Write a value with torch. Raise OSError instead of torch's RuntimeError if the file cannot be written."""
    try:
        with path.open("wb") as file:
            torch.save(value, file)
    except RuntimeError as error:
        cause = error.__context__
        raise (cause if isinstance(cause, OSError) else OSError(str(error))) from None


def read_file(path: Path) -> Any:
    """Return the value in a file. Raise RequestError if the file is damaged, or names code that would have to run."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = one_line(error, limit=160)
        raise RequestError(
            f"{path} does not hold plain tensors and numbers, and nothing else is ever loaded ({reason}); resume from another "
            f"checkpoint, or start a new run from its weights with from_pretrained({str(path.parent)!r})"
        ) from None


class NotPlain(Exception):
    """An error: a value cannot be written as JSON. The message has its path in the state, and its class."""


def to_json(value: Any, path: str) -> Any:
    """Return the value as plain JSON data. Raise NotPlain for a value that has no such form. `path` names the value."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [to_json(item, f"{path}[{number}]") for number, item in enumerate(value)]
    if type(value) in MAPPING_TYPES.values():
        return _mapping_to_json(value, path)
    if type(value) in CONTAINER_TYPES.values():
        return {TYPE_KEY: type(value).__name__, "of": [to_json(item, f"{path}[{n}]") for n, item in enumerate(value)]}
    if type(value) is deque:
        return {TYPE_KEY: "deque", "of": to_json(list(value), path), "maxlen": value.maxlen}
    if type(value) is torch.dtype:
        return {TYPE_KEY: "torch.dtype", "of": str(value).removeprefix("torch.")}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biuf":
        return {TYPE_KEY: "numpy", "dtype": value.dtype.str, "scalar": isinstance(value, np.generic), "of": value.tolist()}
    if type(value) is Tensor and not value.is_complex():
        return {TYPE_KEY: "tensor", "dtype": str(value.dtype).removeprefix("torch."), "of": value.detach().cpu().tolist()}
    raise NotPlain(f"{path}, a {type(value).__module__}.{type(value).__qualname__}")


def _mapping_to_json(value: dict[Any, Any], path: str) -> Any:
    if type(value) is dict and all(type(key) is str and key != TYPE_KEY for key in value):
        return {key: to_json(item, f"{path}.{key}") for key, item in value.items()}
    pairs = [[to_json(key, f"{path}'s key"), to_json(item, f"{path}[{key!r}]")] for key, item in value.items()]
    return {TYPE_KEY: type(value).__name__, "of": pairs}


def from_json(value: Any) -> Any:
    """Return the value that `to_json` turned into JSON data."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(TYPE_KEY)
    if kind is None:
        return {key: from_json(item) for key, item in value.items()}
    if kind in MAPPING_TYPES:
        return MAPPING_TYPES[kind]({from_json(key): from_json(item) for key, item in value["of"]})
    if kind in CONTAINER_TYPES:
        return CONTAINER_TYPES[kind](from_json(value["of"]))
    if kind == "deque":
        return deque(from_json(value["of"]), maxlen=value["maxlen"])
    if kind == "torch.dtype":
        return getattr(torch, value["of"])
    if kind == "numpy":
        array = np.array(value["of"], dtype=np.dtype(value["dtype"]))
        return array[()] if value["scalar"] else array
    return torch.tensor(value["of"], dtype=getattr(torch, value["dtype"]))
