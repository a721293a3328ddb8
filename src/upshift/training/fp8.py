"""Run matrix products of the layers in fp8, by torchao: weights stay as they are, operands are scaled and cast before each
product."""

from __future__ import annotations

from torch import nn

from upshift.models.build import find_stacks
from upshift.planning.optimizers import check_library

FP8_MULTIPLE = 16  # both sides of an fp8 matrix product (torch._scaled_mm)


def convert_to_fp8(model: nn.Module, *, emulate: bool) -> int:
    """Convert in place every linear of the layers that fp8 products can hold. The head stays. Return how many were converted.

    ``emulate`` makes the casts real and the products fp32, for devices without fp8.
    """
    check_library("torchao", purpose="precision=fp8")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(emulate=emulate)
    converted = 0

    def fits(module: nn.Module, _: str) -> bool:
        nonlocal converted
        chosen = isinstance(module, nn.Linear) and not (module.in_features % FP8_MULTIPLE or module.out_features % FP8_MULTIPLE)
        converted += chosen
        return chosen

    for _, stack in find_stacks(model):
        for layer in stack:
            convert_to_float8_training(layer, module_filter_fn=fits, config=config)
    return converted
