"""Choose the device that runs models in inference, and check that a model fits into its memory."""

from __future__ import annotations

from collections.abc import Mapping

from upshift.errors import NothingFits, RequestError
from upshift.hardware import detect
from upshift.hardware.spec import Host
from upshift.hardware.torch_build import check_torch_uses_gpus
from upshift.inference.registry import EngineName, Precision
from upshift.inference.weights import needed_memory
from upshift.loading.placement.memory_limits import memory_limits
from upshift.models.source import ModelSource
from upshift.units import format_bytes


def computing_host(stored: EngineName | None = None) -> Host:
    """Return this machine with the device that runs models: one GPU if torch uses it, or else the CPU.

    ``stored`` is the only engine that loads the weights. Other engines than torch use the CPU. Raise RequestError if torch should
    use a GPU and cannot."""
    import torch

    host = detect()
    if stored not in (None, "torch"):
        return host.cpu_alone()
    check_torch_uses_gpus(host)
    if host.device != "cuda":
        return host.cpu_alone()
    if not torch.cuda.is_available():
        raise RequestError(
            "this machine has a GPU, and torch cannot start CUDA on it; upshift doctor looks for the reason; or leave the GPU "
            "out: set CUDA_VISIBLE_DEVICES to nothing"
        )
    return host.one_device()


def free_memory(host: Host) -> int | None:
    """Return the free bytes on the device that runs the model."""
    device = host.gpu or host.cpu
    return None if device is None else device.free_memory_bytes


def available_memory(host: Host, max_memory: Mapping[str | int, str | int] | None) -> int | None:
    """Return the bytes of memory for the model and its work: the user's limit of the CPU, or what is free. None: unknown."""
    return free_memory(host) if max_memory is None else memory_limits(host, max_memory)["cpu"]


def reference_precision(source: ModelSource, host: Host, tensor_parallel: int = 1) -> Precision:
    """Return the precision of transformers at the start of a race: fp32, or 16 bits on GPUs that are too small for fp32.

    ``tensor_parallel`` GPUs share the model."""
    free_bytes = _free_for_model(host, tensor_parallel)
    if host.gpu is None or free_bytes is None or needed_memory(source, "fp32") <= free_bytes:
        return "fp32"
    return "fp16" if host.supports("bf16") is False else "bf16"


def _free_for_model(host: Host, tensor_parallel: int) -> int | None:
    """Return the free bytes of the devices that share a model. Ranks on a CPU share its memory."""
    free_bytes = free_memory(host)
    return free_bytes if free_bytes is None or host.gpu is None else free_bytes * tensor_parallel


def check_room(source: ModelSource, host: Host, reference: Precision, tensor_parallel: int = 1) -> None:
    """Raise NothingFits if the reference, with which every race begins, does not fit into the free memory of the devices."""
    free_bytes = _free_for_model(host, tensor_parallel)
    needed_bytes = needed_memory(source, reference)
    if free_bytes is not None and needed_bytes > free_bytes:
        raise NothingFits(
            f"running {source.reference!r} takes {format_bytes(needed_bytes)}, as a race begins with transformers in "
            f"{reference}, and {format_bytes(free_bytes)} of memory is free; free some, or look what fits where: upshift plan "
            "MODEL --generate"
        )
