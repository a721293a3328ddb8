"""Run transformers in PyTorch on a GPU with steps that are replayed as one CUDA graph, in 16 or 32 bits or with weights
rounded by torchao.

The kernels of a captured step are queued once, not in every step. Keys and values have reserved memory, and a step reads them at
the addresses where they were when the graph was captured. Prompts run kernel by kernel: their matrix products are large, and
hide the time to queue kernels."""

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

MIN_CAPACITY = 256  # positions
WARMUP_STEPS = 3  # before a capture: libraries choose their kernels and reserve their workspaces in them


class TorchGraphsDecoder(TorchDecoder):
    """A causal language model of transformers whose steps are CUDA graphs."""

    extends = False

    def __init__(self, build: DecoderBuild) -> None:
        super().__init__(build)
        self._max_rows = _next_power_of_two(build.setup.batch)
        self._static_cache: StaticKvCache | None = None

    def step(self, tokens: np.ndarray) -> np.ndarray:
        positions = self.padding.step()
        mask = self.padding.mask
        rows, length = mask.shape
        if self._static_cache is None or length > self._static_cache.capacity or rows > self._static_cache.rows:
            self._max_rows = max(self._max_rows, _next_power_of_two(rows))
            self._static_cache = None  # free its memory before a larger one is reserved
            capacity = max(_next_power_of_two(length), MIN_CAPACITY)
            self._static_cache = StaticKvCache(self.cache, self._max_rows, capacity)
        self._static_cache.load(self.cache, mask)
        step = self._static_cache.step_for(_next_power_of_two(rows))
        step.write_inputs(tokens[:, None], positions, length - 1)
        with inference_settings(self.setup):
            logits = step.run(lambda: self._graph_logits(step))
        self._static_cache.store(self.cache, rows, length)
        return self._to_numpy(logits[:rows])

    def _graph_logits(self, step: GraphStep) -> torch.Tensor:
        return self._logits(step.ids, step.mask, step.positions, step.cache)[:, -1]


class StaticKvCache:
    """Reserved memory for all layers' keys and values, [rows, heads, capacity, width]. A step is captured for each number of
    rows that is a power of two."""

    def __init__(self, cache: Any, rows: int, capacity: int) -> None:
        self.rows = rows
        self.capacity = capacity
        self.layers = [
            tuple(states.new_zeros((rows, states.shape[1], capacity, states.shape[3])) for states in (layer.keys, layer.values))
            for layer in cache.layers
        ]
        self.mask = torch.zeros((rows, capacity), dtype=torch.long, device=cache.layers[0].keys.device)
        self._steps: dict[int, GraphStep] = {}  # by rows
        self._stored_keys: list[torch.Tensor] = []  # the keys of each layer, as ``store`` has set them in the decoder's cache

    def load(self, cache: Any, mask: np.ndarray) -> None:
        """Copy the decoder's cache if rows were added or removed since the last step, and mark the padding."""
        rows, length = mask.shape
        if self._stored_keys and all(layer.keys is stored for layer, stored in zip(cache.layers, self._stored_keys, strict=True)):
            self.mask[:, length - 1] = 1
            return
        for layer, static_states in zip(cache.layers, self.layers, strict=True):
            for states, static in zip((layer.keys, layer.values), static_states, strict=True):
                static[:rows, :, : length - 1] = states
        self.mask.zero_()
        self.mask[:rows, :length] = torch.from_numpy(mask).to(self.mask.device)
        self.mask[rows:, length - 1] = 1  # unused rows need one position: attention to nothing gives NaN

    def store(self, cache: Any, rows: int, length: int) -> None:
        """Set the decoder's cache to views of this memory."""
        for layer, (keys, values) in zip(cache.layers, self.layers, strict=True):
            layer.keys = keys[:rows, :, :length]
            layer.values = values[:rows, :, :length]
        self._stored_keys = [layer.keys for layer in cache.layers]

    def step_for(self, rows: int) -> GraphStep:
        if rows not in self._steps:
            self._steps[rows] = GraphStep(self, rows)
        return self._steps[rows]


class GraphStep:
    """A captured step of ``rows`` rows, with its inputs at fixed addresses."""

    def __init__(self, static_cache: StaticKvCache, rows: int) -> None:
        device = static_cache.mask.device
        self.ids = torch.zeros((rows, 1), dtype=torch.long, device=device)
        self.positions = torch.zeros_like(self.ids)
        self.mask = static_cache.mask[:rows]
        self.cache_position = torch.zeros(1, dtype=torch.long, device=device)
        layers: list[Any] = [MovingLayer(keys[:rows], values[:rows], self.cache_position) for keys, values in static_cache.layers]
        self.cache = Cache(layers=layers)
        self._graph: Any = None
        self._logits: torch.Tensor | None = None

    def write_inputs(self, tokens: np.ndarray, positions: np.ndarray, cache_position: int) -> None:
        """Write the inputs of the next step: tokens and positions [R, 1], and where its keys and values go."""
        rows = len(tokens)
        self.ids[:rows] = torch.from_numpy(tokens).to(self.ids.device)
        self.positions[:rows] = torch.from_numpy(positions).to(self.ids.device)
        self.cache_position.fill_(cache_position)

    def run(self, step: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return logits [rows, V]. A CPU has no graphs, so it runs ``step`` itself."""
        if self.ids.device.type != "cuda":
            return step()
        if self._graph is None:
            self._capture(step)
        self._graph.replay()
        assert self._logits is not None
        return self._logits

    def _capture(self, step: Callable[[], torch.Tensor]) -> None:
        """Capture the step as the notes of torch.cuda.CUDAGraph describe it, after some runs on another stream.

        All these runs write the same position of the cache."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMUP_STEPS):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._logits = step()


class MovingLayer(StaticLayer):
    """A layer of transformers' cache whose next position is a tensor, so that a captured step can move it.

    The layer keeps all positions. Masks limit how far it looks back, also for sliding windows."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, position: torch.Tensor) -> None:
        super().__init__(max_cache_len=keys.shape[2])
        self.keys = keys
        self.values = values
        self._position = position
        self.dtype = keys.dtype
        self.device = keys.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.keys is not None and self.values is not None
        self.keys.index_copy_(2, self._position, key_states)
        self.values.index_copy_(2, self._position, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> Any:
        return self._position[0]


def _next_power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


# A token of zeros, as padding can become, is scaled by this in place of its largest number: 0 / 0 is NaN in torchao.
SMALLEST_ACTIVATION = 1e-12
WEIGHT_BYTES: dict[Precision, float] = {"int8-weights": 1.0, "int4-weights": 0.5, "fp8": 1.0}  # per weight, without scales


class TorchaoDecoder(TorchGraphsDecoder):
    """A model whose linear layers, the head included, are rounded by torchao when it is loaded.

    int8-weights: scaled by output channel. PyTorch has no kernel that reads them, so each matrix is converted to bf16 first.
                  That saves memory, not time.
    int4-weights: groups of 128, in the tiles of PyTorch's own kernel (tinygemm).
    fp8:          weights scaled by output channel and activations by token, for the 8-bit products of compute capability 8.9
                  and above.

    Activations of the first two are bf16."""

    def __init__(self, build: DecoderBuild) -> None:
        self.rounded_bytes = 0
        super().__init__(build)
        self.weight_bytes = self.rounded_bytes

    def load(self, build: DecoderBuild) -> Any:
        from torchao.quantization import quantize_

        model = load_model(build.source, "bf16", build.setup.device)
        linear_layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
        rounded_weights = sum(prod(module.weight.shape) for module in linear_layers)
        other_weights = sum(prod(weight.shape) for weight in model.parameters()) - rounded_weights
        head = model.get_output_embeddings().weight
        embedding = model.get_input_embeddings().weight
        if head is embedding:  # the head is rounded, and the embedding stays in bf16
            other_weights += head.numel()
        self.rounded_bytes = round(WEIGHT_BYTES[build.setup.precision] * rounded_weights + 2 * other_weights)
        quantize_(model, _torchao_config(build.setup.precision))
        return model


def _torchao_config(precision: Precision) -> Any:
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
    return Float8DynamicActivationFloat8WeightConfig(
        granularity=PerRow(), set_inductor_config=False, activation_value_lb=SMALLEST_ACTIVATION
    )
