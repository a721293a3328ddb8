"""Run transformers and PyTorch on a GPU. A step is replayed as one CUDA graph: its kernels are queued once, not in
every step.

Keys and values have their places before they are needed, and what a step reads lies where it lay when the graph was
captured. Prompts run kernel by kernel: their products are large, and hide what queueing takes.

transformers and PyTorch on a GPU with weights rounded by torchao as the model is loaded, a step replayed as one CUDA graph.

Matrices of all linear layers, the head included, are rounded; what they are multiplied with is bf16.
int8-weights: scaled by output; PyTorch has no kernel that reads them, so each is made bf16 first, which saves memory, not time
int4-weights: groups of 128, in the tiles of PyTorch's own kernel (tinygemm)
fp8:          weights scaled by output and activations by token, for the 8-bit products of compute capability 8.9 and above
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, StaticLayer

from upshift.inference.generation.engines.base import DecoderBuild
from upshift.inference.generation.engines.torch_decoder import TorchDecoder
from upshift.inference.generation.model import load_model
from upshift.inference.registry import Precision
from upshift.inference.torch_settings import inference_settings

LEAST_PLACES = 256
WARM_UPS = 3  # steps before one is captured: libraries choose their kernels and take their workspaces in them


class TorchGraphsDecoder(TorchDecoder):
    extends = False

    def __init__(self, build: DecoderBuild) -> None:
        super().__init__(build)
        self._rows = _power_of_two(build.setup.batch)
        self._room: StaticKvCache | None = None

    def step(self, tokens: np.ndarray) -> np.ndarray:
        positions = self.padding.step()
        mask = self.padding.mask
        rows, length = mask.shape
        if self._room is None or length > self._room.places or rows > self._room.rows:
            self._rows = max(self._rows, _power_of_two(rows))
            self._room = None  # its memory goes before there is more
            self._room = StaticKvCache(self.cache, self._rows, max(_power_of_two(length), LEAST_PLACES))
        self._room.take(self.cache, mask)
        given = self._room.given(_power_of_two(rows))
        given.write(tokens[:, None], positions, length - 1)
        with inference_settings(self.setup):
            logits = given.run(lambda: self._replayed(given))
        self._room.give(self.cache, rows, length)
        return self._told(logits[:rows])

    def _replayed(self, given: GraphStep) -> torch.Tensor:
        return self._logits(given.ids, given.mask, given.positions, given.cache)[:, -1]


class StaticKvCache:
    """Places of all layers' keys and values, [rows, heads, places, width]. A step is captured for each power of two
    of rows."""

    def __init__(self, cache: Any, rows: int, places: int) -> None:
        self.rows, self.places = rows, places
        self.layers = [
            tuple(states.new_zeros((rows, states.shape[1], places, states.shape[3])) for states in (layer.keys, layer.values))
            for layer in cache.layers
        ]
        self.mask = torch.zeros((rows, places), dtype=torch.long, device=cache.layers[0].keys.device)
        self._given: dict[int, GraphStep] = {}
        self._told: list[torch.Tensor] = []  # keys of each layer as the cache was told of them

    def take(self, cache: Any, mask: np.ndarray) -> None:
        """Copy the cache if rows came or went since the last step, and mark which of its places are padding."""
        rows, length = mask.shape
        if self._told and all(layer.keys is told for layer, told in zip(cache.layers, self._told, strict=True)):
            self.mask[:, length - 1] = 1
            return
        for layer, wholes in zip(cache.layers, self.layers, strict=True):
            for states, whole in zip((layer.keys, layer.values), wholes, strict=True):
                whole[:rows, :, : length - 1] = states
        self.mask.zero_()
        self.mask[:rows, :length] = torch.from_numpy(mask).to(self.mask.device)
        self.mask[rows:, length - 1] = 1  # of no row: attention to nothing is not a number

    def give(self, cache: Any, rows: int, length: int) -> None:
        for layer, (keys, values) in zip(cache.layers, self.layers, strict=True):
            layer.keys, layer.values = keys[:rows, :, :length], values[:rows, :, :length]
        self._told = [layer.keys for layer in cache.layers]

    def given(self, rows: int) -> GraphStep:
        if rows not in self._given:
            self._given[rows] = GraphStep(self, rows)
        return self._given[rows]


class GraphStep:
    """The inputs of a step of so many rows, always at the same addresses, and the step as it was captured."""

    def __init__(self, room: StaticKvCache, rows: int) -> None:
        device = room.mask.device
        self.ids = torch.zeros((rows, 1), dtype=torch.long, device=device)
        self.positions = torch.zeros_like(self.ids)
        self.mask = room.mask[:rows]
        self.place = torch.zeros(1, dtype=torch.long, device=device)
        self.cache = Cache(layers=[MovingLayer(keys[:rows], values[:rows], self.place) for keys, values in room.layers])
        self._graph: Any = None
        self._logits: torch.Tensor | None = None

    def write(self, tokens: np.ndarray, positions: np.ndarray, place: int) -> None:
        rows = len(tokens)
        self.ids[:rows] = torch.from_numpy(tokens).to(self.ids.device)
        self.positions[:rows] = torch.from_numpy(positions).to(self.ids.device)
        self.place.fill_(place)

    def run(self, step: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return logits [rows, V]. A CPU has no graphs: it runs kernel by kernel."""
        if self.ids.device.type != "cuda":
            return step()
        if self._graph is None:
            self._capture(step)
        self._graph.replay()
        assert self._logits is not None
        return self._logits

    def _capture(self, step: Callable[[], torch.Tensor]) -> None:
        """Capture the step as torch.cuda.CUDAGraph's notes say, after a few runs on a stream of their own. These runs
        write the same place."""
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(WARM_UPS):
                step()
        torch.cuda.current_stream().wait_stream(beside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._logits = step()


class MovingLayer(StaticLayer):
    """A layer of transformers' cache whose next place is a tensor, so that it can move under a captured step. The
    layer looks back to the first place. Masks limit that, for sliding windows, too."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, place: torch.Tensor) -> None:
        super().__init__(max_cache_len=keys.shape[2])
        self.keys, self.values, self._place = keys, values, place
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.keys is not None and self.values is not None
        self.keys.index_copy_(2, self._place, key_states)
        self.values.index_copy_(2, self._place, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> Any:
        return self._place[0]


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


BYTES: dict[Precision, float] = {"int8-weights": 1.0, "int4-weights": 0.5, "fp8": 1.0}  # of a weight, without its scales


class TorchaoDecoder(TorchGraphsDecoder):
    def __init__(self, build: DecoderBuild) -> None:
        self.rounded_bytes = 0
        super().__init__(build)
        self.weight_bytes = self.rounded_bytes

    def load(self, build: DecoderBuild) -> Any:
        from torchao.quantization import quantize_

        model = load_model(build.source, "bf16", build.setup.device)
        linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
        rounded = sum(prod(module.weight.shape) for module in linear)
        head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        others = sum(prod(weight.shape) for weight in model.parameters()) - rounded
        others += head.numel() if head is embedding else 0  # which stays as it is
        self.rounded_bytes = round(BYTES[build.setup.precision] * rounded + 2 * others)
        quantize_(model, _config(build.setup.precision))
        return model


def _config(precision: Precision) -> Any:
    from torchao.quantization import (
        Float8DynamicActivationFloat8WeightConfig,
        Int4WeightOnlyConfig,
        Int8WeightOnlyConfig,
        PerRow,
    )

    if precision == "int8-weights":
        return Int8WeightOnlyConfig(set_inductor_config=False)
    if precision == "int4-weights":
        return Int4WeightOnlyConfig(group_size=128, int4_packing_format="tile_packed_to_4d", set_inductor_config=False)
    return Float8DynamicActivationFloat8WeightConfig(granularity=PerRow(), set_inductor_config=False)
