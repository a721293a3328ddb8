"""Set how torch computes while a setup runs forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from upshift.errors import RequestError
from upshift.inference.registry import Device, EngineSetup, Precision
from upshift.models.build import find_stacks

MATMUL: dict[Device, str] = {  # of "tf32"
    "cpu": "medium",  # oneDNN's fp32 products in place of MKL's, on CPUs without AMX of the same precision
    "cuda": "high",
}
DTYPES: dict[Precision, torch.dtype] = {
    "fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
}  # fmt: skip
UNLIKE = (11, 13)  # rows and tokens to compile with: torch takes sizes that are equal then, of heads too, to be always equal


@contextmanager
def computing(setup: EngineSetup) -> Iterator[None]:
    """Compute without gradients, by the setup's threads and kind of fp32 products. Afterwards restore the settings."""
    before = torch.get_float32_matmul_precision(), torch.get_num_threads()
    torch.set_num_threads(setup.threads)
    torch.set_float32_matmul_precision(MATMUL[setup.device] if setup.precision == "tf32" else "highest")
    try:
        with torch.inference_mode():
            yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.set_num_threads(before[1])


def layers_to_compile(model: nn.Module) -> list[nn.Module]:
    """Return the layers to compile, and drop what other models of this process had compiled. Torch compiles one
    function a few times only, then no more."""
    layers = [layer for _, stack in find_stacks(model) for layer in stack]
    if not layers:
        raise RequestError(f"{type(model).__name__} has no list of two layers or more to compile; use --engine torch")
    torch.compiler.reset()
    return layers
