"""transformers and PyTorch on a GPU with weights rounded by torchao as the model is loaded, a step replayed as one CUDA graph.

Matrices of all linear layers, the head included, are rounded; what they are multiplied with is bf16.
int8-weights: scaled by output; PyTorch has no kernel that reads them, so each is made bf16 first, which saves memory, not time
int4-weights: groups of 128, in the tiles of PyTorch's own kernel (tinygemm)
fp8:          weights scaled by output and activations by token, for the 8-bit products of compute capability 8.9 and above
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from upshift.inference.generation.engines.decoder import DecoderBuild
from upshift.inference.generation.engines.torch_graphs_decoder import TorchGraphsDecoder
from upshift.inference.generation.model import load_model
from upshift.inference.setup import Precision

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
