"""Apply a setup's settings to torch while a model runs forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from upshift.errors import RequestError
from upshift.inference.registry import Device, EngineSetup, Precision
from upshift.models.build import find_stacks

TF32_MATMUL: dict[Device, str] = {  # torch's float32_matmul_precision under "tf32"
    "cpu": "medium",  # oneDNN's matrix products instead of MKL's; on CPUs without AMX they have the precision of fp32
    "cuda": "high",
}
DTYPES: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
# Rows and tokens to compile with. Sizes that are equal at that time, also numbers of heads, are taken as always equal by torch.
COMPILE_SHAPE = (11, 13)


@contextmanager
def inference_settings(setup: EngineSetup) -> Iterator[None]:
    """Compute without gradients, with the setup's number of threads and its precision of fp32 products.

    Restore the settings at the end."""
    saved_precision = torch.get_float32_matmul_precision()
    saved_threads = torch.get_num_threads()
    torch.set_num_threads(setup.threads)
    torch.set_float32_matmul_precision(TF32_MATMUL[setup.device] if setup.precision == "tf32" else "highest")
    try:
        with torch.inference_mode():
            yield
    finally:
        torch.set_float32_matmul_precision(saved_precision)
        torch.set_num_threads(saved_threads)


def layers_to_compile(model: nn.Module) -> list[nn.Module]:
    """Return the layers to compile. Drop the compiled code of other models in this process, because torch stops to compile
    a function after a few times. Raise RequestError for a model without a list of layers."""
    layers = [layer for _, stack in find_stacks(model) for layer in stack]
    if not layers:
        raise RequestError(f"{type(model).__name__} has no list of two layers or more to compile; use --engine torch")
    torch.compiler.reset()
    return layers
