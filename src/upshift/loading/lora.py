# needs torch
"""Merge a LoRA adapter of peft with weights that are read one at a time, with peft's own arithmetic.

peft adds its layers to the empty model and reads the adapter into them. Then each layer gets its base weight, in blocks of rows
if rows are independent, and its ``merge`` is called. Rank and alpha patterns, rsLoRA, DoRA, transposed weights and biases
therefore give the same results as in peft.
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
from upshift.text import one_line
from upshift.units import MIB

ADAPTER = "default"  # the adapter's name in the peft model
BLOCK_BYTES = 32 * MIB  # in fp32; a merge holds up to four blocks
ROUND_ROWS = 64  # rows of a block are a multiple of this: products of a few rows would be computed in another order

Layers = defaultdict[int, list[Any]]
Rows = Callable[[int, int], Tensor]  # returns the rows of a base weight, from the first to the last (exclusive)


@dataclass(frozen=True)
class MergedWeight:
    """One weight of the merged model."""

    key: int  # equal for weights that are tied in the merged model
    origin: int  # equal for weights that are tied in the base model
    shape: tuple[int, ...]
    replacement: Tensor | None = None  # the adapter's weight; None: the base model's
    layers: tuple[Any, ...] = ()  # peft layers that change it, in the order of merging
    biases: tuple[Any, ...] = ()  # peft layers whose bias is added to it

    @property
    def is_base(self) -> bool:
        return self.replacement is None and not self.layers and not self.biases


class AdaptedModel:
    """A model with an adapter. ``model`` is on the meta device, and its tied weights are tied.

    The constructor raises RequestError if the adapter is not made for the model."""

    def __init__(self, model: PreTrainedModel, config: LoraConfig, folder: Path) -> None:
        base_weights = dict(model.state_dict(keep_vars=True))
        weight_ids = {
            (module, name): id(weight) for module in model.modules() for name, weight in module.named_parameters(recurse=False)
        }
        self._model = model
        self._attach(config, folder)
        layers, biases = self._layers_by_weight(weight_ids, folder)
        current = {name: self._current_weight(name) for name in base_weights}
        replacements = {  # weights of the adapter that replace the base model's
            id(base_weights[name]): weight
            for name, (weight, is_copy) in current.items()
            if not is_copy and weight.device.type != "meta"
        }
        # By the weight's name in the base model. Tied weights are there under each of their names.
        self.weights: dict[str, MergedWeight] = {}
        for name, (weight, is_copy) in current.items():
            origin = id(base_weights[name])
            shape = tuple(base_weights[name].shape)
            if is_copy:
                self.weights[name] = MergedWeight(id(weight), origin, tuple(weight.shape), weight)
            else:
                self.weights[name] = MergedWeight(
                    origin, origin, shape, replacements.get(origin), tuple(layers[origin]), tuple(biases[origin])
                )

    def _attach(self, config: LoraConfig, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft's warnings are for training
            try:
                model = PeftModel(self._model, config, ADAPTER, low_cpu_mem_usage=True)
                model.register_load_state_dict_pre_hook(_allocate_weights)
                result = model.load_adapter(str(folder), ADAPTER, torch_device="cpu")
            except (ValueError, RuntimeError, KeyError, TypeError, AttributeError, NotImplementedError) as error:
                raise _not_for_model(config, folder, one_line(error)) from error
        not_read = [name for name, weight in model.named_parameters() if f".{ADAPTER}" in name and weight.device.type == "meta"]
        if result.unexpected_keys:
            raise _not_for_model(config, folder, f"the adapter has {result.unexpected_keys[0]}, and the model no place for it")
        if not_read:
            raise _not_for_model(config, folder, f"the adapter lacks {not_read[0]}")

    def _layers_by_weight(self, weight_ids: dict[tuple[nn.Module, str], int], folder: Path) -> tuple[Layers, Layers]:
        """Return peft's layers by the id of the weight, and of the bias, that they change."""
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
            layers[weight_ids[base, getattr(layer, "parameter_name", "weight")]].append(layer)
            if layer.lora_bias.get(ADAPTER):
                if (base, "bias") not in weight_ids:
                    raise RequestError(f"{folder} has a bias for {name}, and the model has none, so it cannot be merged")
                biases[weight_ids[base, "bias"]].append(layer)
        return layers, biases

    def _current_weight(self, name: str) -> tuple[Tensor, bool]:
        """Return the adapted model's weight for this name, and whether it belongs to a copy that the adapter has trained."""
        module: Any = self._model
        is_copy = False
        *path, attribute = name.split(".")
        for step in path:
            module = getattr(module, step)
            while isinstance(module, ModulesToSaveWrapper | LAYER.get()):
                copies = getattr(module, "modules_to_save", None)
                is_copy |= copies is not None
                module = getattr(module, "base_layer", None) if copies is None else copies[ADAPTER]
        return getattr(module, attribute), is_copy


def _allocate_weights(model: nn.Module, state_dict: dict[str, Tensor], *_: Any) -> None:
    """Allocate memory for weights that are about to be read. peft would leave them on the meta device."""
    for name in state_dict:
        path, last = name.rpartition(".")[::2]
        try:
            module = model.get_submodule(path)
        except AttributeError:
            continue  # peft reports it
        weight = PARAMETERS.of(module).get(last)
        if weight is not None and weight.device.type == "meta":
            setattr(module, last, nn.Parameter(torch.empty_like(weight, device="cpu"), requires_grad=False))


def merged_rows(merged_weight: MergedWeight, rows: Rows) -> Iterator[Tensor]:
    """Yield the weight with its changes, in blocks of rows. ``rows`` reads the base weight."""
    row_parameters = [_parameters_of_rows(layer) for layer in merged_weight.layers]
    if all(row_parameters):
        blocks = _row_blocks(merged_weight.shape)
    else:
        blocks = [(0, merged_weight.shape[0] if merged_weight.shape else 1)]
    for start, stop in blocks:
        if merged_weight.replacement is None:
            weight = rows(start, stop)
        else:
            weight = merged_weight.replacement[start:stop].detach().clone()
        for layer, parameters in zip(merged_weight.layers, row_parameters, strict=True):
            with _narrowed_parameters(parameters if len(blocks) > 1 else [], start, stop):
                weight = _merge_layer(layer, weight)
        for layer in merged_weight.biases:
            weight += layer.lora_B[ADAPTER].bias.detach() * layer.scaling[ADAPTER]
        yield weight


def _parameters_of_rows(layer: Any) -> list[tuple[Any, str, int]]:
    """Return the parameters of a layer, each with the dimension that follows the rows of the weight.

    Return an empty list if rows depend on each other."""
    variant = layer.lora_variant.get(ADAPTER)
    if isinstance(layer, EMBEDDING.get()) and variant is None:
        return [(layer.lora_embedding_A, ADAPTER, 1)]
    if not isinstance(layer, LINEAR.get()):
        return []
    if layer.fan_in_fan_out:
        return [(layer.lora_A[ADAPTER], "weight", 1)] if variant is None else []
    magnitude = [(layer.lora_magnitude_vector[ADAPTER], "weight", 0)] if isinstance(variant, DORA.get()) else []
    return [(layer.lora_B[ADAPTER], "weight", 0), *magnitude] if variant is None or magnitude else []


def _row_blocks(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the first and last row (exclusive) of blocks of nearly equal size."""
    count = -(-4 * prod(shape) // BLOCK_BYTES)
    size = -(-shape[0] // max(count, 1))
    size += -size % ROUND_ROWS
    return [(start, min(start + size, shape[0])) for start in range(0, shape[0], max(size, 1))]


@contextmanager
def _narrowed_parameters(parameters: list[tuple[Any, str, int]], start: int, stop: int) -> Iterator[None]:
    originals = [getattr(owner, name) for owner, name, _ in parameters]
    for (owner, name, dim), parameter in zip(parameters, originals, strict=True):
        setattr(owner, name, nn.Parameter(parameter.detach().narrow(dim, start, stop - start), requires_grad=False))
    try:
        yield
    finally:
        for (owner, name, _), parameter in zip(parameters, originals, strict=True):
            setattr(owner, name, parameter)


def _merge_layer(layer: Any, weight: Tensor) -> Tensor:
    base = layer.get_base_layer()
    name = getattr(layer, "parameter_name", "weight")
    placeholder = getattr(base, name)
    has_bias = layer.lora_bias.get(ADAPTER)
    setattr(base, name, nn.Parameter(weight, requires_grad=False))
    layer.lora_bias[ADAPTER] = False  # the bias is merged separately
    try:
        with torch.no_grad():
            layer.merge(adapter_names=[ADAPTER])
        merged: Tensor = getattr(base, name).detach()
        return merged
    finally:
        setattr(base, name, placeholder)
        layer.lora_bias[ADAPTER] = has_bias
        layer.merged_adapters.clear()
        CACHES.of(layer).clear()


def _not_for_model(config: LoraConfig, folder: Path, reason: str) -> RequestError:
    return RequestError(f"{folder} is not an adapter for {config.base_model_name_or_path!r}: {reason}")
