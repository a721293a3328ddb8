"""Merge peft's LoRA into a model without weights: find the weights that it changes, and compute them by peft's own arithmetic.

peft puts its layers on the empty model and reads the adapter into them. A layer is then given its base weight, some rows at a
time where rows do not depend on each other, and peft's own ``merge`` is called. So rank and alpha patterns, rsLoRA, DoRA,
transposed weights and biases come out as peft has them.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from upshift.errors import RequestError
from upshift.internals.peft_names import CACHES, CONVOLUTION, DORA, EMBEDDING, LAYER, LINEAR, PARAMETER
from upshift.internals.torch_names import PARAMETERS
from upshift.units import MIB

ADAPTER = "default"  # its name in the peft model
BLOCK_BYTES = 32 * MIB  # of fp32: a merge holds up to four of them
ROUND_ROWS = 64  # no block has only a few rows: their products would be computed in another order

Layers = defaultdict[int, list[Any]]
Rows = Callable[[int, int], Tensor]  # of a base weight: from, to


@dataclass(frozen=True)
class Part:
    """One weight of the merged model. Tied weights have the same ``key``. Weights tied before have the same ``origin``."""

    key: int
    origin: int
    shape: tuple[int, ...]
    given: Tensor | None = None  # the adapter's own; None: the base model's
    layers: tuple[Any, ...] = ()  # whose changes are merged into it, in this order
    biases: tuple[Any, ...] = ()

    @property
    def is_base(self) -> bool:
        return self.given is None and not self.layers and not self.biases


class Adapted:
    """A model with an adapter attached. ``model``: on the meta device, with its tied weights tied.

    Raise RequestError if the adapter is not made for the model."""

    def __init__(self, model: PreTrainedModel, config: LoraConfig, folder: Path) -> None:
        before = dict(model.state_dict(keep_vars=True))
        slots = {
            (module, name): id(weight) for module in model.modules() for name, weight in module.named_parameters(recurse=False)
        }
        self._model = model
        self._attach(config, folder)
        layers, biases = self._changes(slots, folder)
        now = {name: self._now(name) for name in before}
        given = {  # written over the base model's own
            id(before[name]): weight for name, (weight, is_copy) in now.items() if not is_copy and weight.device.type != "meta"
        }
        self.parts: dict[str, Part] = {}  # by the weight's name without the adapter, tied ones under each of their names
        for name, (weight, is_copy) in now.items():
            origin = id(before[name])
            shape = tuple(before[name].shape)
            if is_copy:
                self.parts[name] = Part(id(weight), origin, tuple(weight.shape), weight)
            else:
                self.parts[name] = Part(origin, origin, shape, given.get(origin), tuple(layers[origin]), tuple(biases[origin]))

    def _attach(self, config: LoraConfig, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft's warnings are for training
            try:
                model = PeftModel(self._model, config, ADAPTER, low_cpu_mem_usage=True)
                model.register_load_state_dict_pre_hook(_make_room)
                result = model.load_adapter(str(folder), ADAPTER, torch_device="cpu")
            except (ValueError, RuntimeError, KeyError, TypeError, AttributeError, NotImplementedError) as error:
                raise _unfit(config, folder, " ".join(str(error).split())[:300]) from error
        left = [name for name, weight in model.named_parameters() if f".{ADAPTER}" in name and weight.device.type == "meta"]
        if result.unexpected_keys:
            raise _unfit(config, folder, f"the adapter has {result.unexpected_keys[0]}, and the model no place for it")
        if left:
            raise _unfit(config, folder, f"the adapter lacks {left[0]}")

    def _changes(self, slots: dict[tuple[nn.Module, str], int], folder: Path) -> tuple[Layers, Layers]:
        """Return peft's layers by the weight, and by the bias, that they change."""
        layers: Layers = defaultdict(list)
        biases: Layers = defaultdict(list)
        for name, layer in self._model.named_modules():
            if not isinstance(layer, LAYER.get()):
                continue
            base: Any = layer.get_base_layer()
            if not isinstance(layer, LINEAR.get() | EMBEDDING.get() | PARAMETER.get() | CONVOLUTION.get()):
                raise RequestError(
                    f"{folder} adapts {name}, a {type(base).__name__}, which upshift merge does not know; merge it with peft"
                )
            layers[slots[base, getattr(layer, "parameter_name", "weight")]].append(layer)
            if layer.lora_bias.get(ADAPTER):
                if (base, "bias") not in slots:
                    raise RequestError(f"{folder} has a bias for {name}, which has none itself; it cannot be merged")
                biases[slots[base, "bias"]].append(layer)
        return layers, biases

    def _now(self, name: str) -> tuple[Tensor, bool]:
        """Return the weight that now has this name, and whether it belongs to a copy that the adapter has trained."""
        module: Any = self._model
        is_copy = False
        *path, last = name.split(".")
        for step in path:
            module = getattr(module, step)
            while isinstance(module, ModulesToSaveWrapper | LAYER.get()):
                copies = getattr(module, "modules_to_save", None)
                is_copy |= copies is not None
                module = getattr(module, "base_layer", None) if copies is None else copies[ADAPTER]
        return getattr(module, last), is_copy


def _make_room(model: nn.Module, state_dict: dict[str, Tensor], *_: Any) -> None:
    """Allocate memory for weights about to be read. peft's own way of reading leaves them on the meta device."""
    for name in state_dict:
        path, last = name.rpartition(".")[::2]
        try:
            module = model.get_submodule(path)
        except AttributeError:
            continue  # it will be reported
        weight = PARAMETERS.of(module).get(last)
        if weight is not None and weight.device.type == "meta":
            setattr(module, last, nn.Parameter(torch.empty_like(weight, device="cpu"), requires_grad=False))


def merged_rows(part: Part, rows: Rows) -> Iterator[Tensor]:
    """Yield the weight with its changes, in blocks of its rows."""
    needed = [_by_rows(layer) for layer in part.layers]
    blocks = _blocks(part.shape) if all(needed) else [(0, part.shape[0] if part.shape else 1)]
    for start, stop in blocks:
        weight = rows(start, stop) if part.given is None else part.given[start:stop].detach().clone()
        for layer, parameters in zip(part.layers, needed, strict=True):
            with _only(parameters if len(blocks) > 1 else [], start, stop):
                weight = _merged(layer, weight)
        for layer in part.biases:
            weight += layer.lora_B[ADAPTER].bias.detach() * layer.scaling[ADAPTER]
        yield weight


def _by_rows(layer: Any) -> list[tuple[Any, str, int]]:
    """Return the parameters, and their dimension, whose parts make rows of the weight; none if rows depend on each other."""
    variant = layer.lora_variant.get(ADAPTER)
    if isinstance(layer, EMBEDDING.get()) and variant is None:
        return [(layer.lora_embedding_A, ADAPTER, 1)]
    if not isinstance(layer, LINEAR.get()):
        return []
    if layer.fan_in_fan_out:
        return [(layer.lora_A[ADAPTER], "weight", 1)] if variant is None else []
    magnitude = [(layer.lora_magnitude_vector[ADAPTER], "weight", 0)] if isinstance(variant, DORA.get()) else []
    return [(layer.lora_B[ADAPTER], "weight", 0), *magnitude] if variant is None or magnitude else []


def _blocks(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the first and last row (exclusive) of blocks of nearly equal size."""
    count = -(-4 * prod(shape) // BLOCK_BYTES)
    size = -(-shape[0] // max(count, 1))
    size += -size % ROUND_ROWS
    return [(start, min(start + size, shape[0])) for start in range(0, shape[0], max(size, 1))]


@contextmanager
def _only(parameters: list[tuple[Any, str, int]], start: int, stop: int) -> Iterator[None]:
    whole = [getattr(owner, name) for owner, name, _ in parameters]
    for (owner, name, dim), parameter in zip(parameters, whole, strict=True):
        setattr(owner, name, nn.Parameter(parameter.detach().narrow(dim, start, stop - start), requires_grad=False))
    try:
        yield
    finally:
        for (owner, name, _), parameter in zip(parameters, whole, strict=True):
            setattr(owner, name, parameter)


def _merged(layer: Any, weight: Tensor) -> Tensor:
    base = layer.get_base_layer()
    name = getattr(layer, "parameter_name", "weight")
    empty = getattr(base, name)
    has_bias = layer.lora_bias.get(ADAPTER)
    setattr(base, name, nn.Parameter(weight, requires_grad=False))
    layer.lora_bias[ADAPTER] = False  # a part of its own
    try:
        with torch.no_grad():
            layer.merge(adapter_names=[ADAPTER])
        merged: Tensor = getattr(base, name).detach()
        return merged
    finally:
        setattr(base, name, empty)
        layer.lora_bias[ADAPTER] = has_bias
        layer.merged_adapters.clear()
        CACHES.of(layer).clear()


def _unfit(config: LoraConfig, folder: Path, reason: str) -> RequestError:
    return RequestError(f"{folder} is not an adapter for {config.base_model_name_or_path!r}: {reason}")
