"""Divide a model's layers among the devices of this machine, by the tensor parallelism of transformers.

The model declares which of its matrices are divided, and along which dimension. Each device has its own process."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from math import gcd
from typing import Any

import torch
from transformers import PreTrainedModel

from upshift.errors import RequestError
from upshift.hardware.detect import detect
from upshift.hardware.spec import Host
from upshift.inference.registry import KINDS_OF_TASK, Device, Task
from upshift.inference.weights import stored_for
from upshift.internals.transformers_names import DIVISION
from upshift.models.config import heads_of
from upshift.models.source import ModelSource
from upshift.models.tensor_parallel_plan import declared_plan, describe_tensor_parallel, divided_dimension

OPTION = "--tensor-parallel"


def check_divides(
    degree: int, source: ModelSource, task: Task, engine: str | None, host: Host, build_empty: Callable[[], PreTrainedModel]
) -> None:
    """Raise RequestError if a model cannot be divided among ``degree`` devices.

    ``engine``: the only engine to use. ``host``: with the device that computes. ``build_empty``: builds the model without
    weights."""
    _check_request(degree, source, task, engine)
    _check_layers(degree, source, build_empty())
    _check_devices(degree, "cpu" if host.gpu is None else "cuda")


def _check_request(degree: int, source: ModelSource, task: Task, engine: str | None) -> None:
    """Raise RequestError if the engine, the task or the weights do not allow to divide a model."""
    given = f"{OPTION} {degree}"
    if degree < 1:
        raise RequestError(f"{given} is not possible; give the number of devices that share the model, at least 1")
    if engine not in (None, "torch"):
        own = f" (vLLM has its own: --engine-set tensor_parallel_size={degree})" if engine == "vllm" else ""
        raise RequestError(f"{given} is for the engine torch, and --engine is {engine}{own}; leave one of them out")
    if task not in ("generate", "encode"):
        kind = KINDS_OF_TASK.get(task, "encoder-decoders")
        raise RequestError(
            f"{given} divides decoders and encoders of texts, and {source.reference!r} is one of the {kind}; leave it out"
        )
    if stored_for(source) is not None:
        raise RequestError(
            f"{given} divides weights in 16 or 32 bits, and those of {source.reference!r} are quantized; leave it out, or give "
            "the model that they were made from"
        )


def _check_layers(degree: int, source: ModelSource, model: PreTrainedModel) -> None:
    """Raise RequestError unless the model declares how it is divided, and ``degree`` divides its heads and its layers.

    ``model`` may be on the meta device."""
    described = describe_tensor_parallel(model)
    if isinstance(described, str):
        raise RequestError(
            f"{OPTION} {degree} is not possible with {source.reference!r} ({type(model).__name__}): {described}; leave it out, "
            "or use --replicas for copies of the whole model"
        )
    divisor = _layer_divisor(model)
    if divisor % degree:
        degrees = ", ".join(str(number) for number in range(2, divisor + 1) if divisor % number == 0)
        heads = heads_of(model.config.get_text_config())
        shown = "" if heads is None else f"; it has {heads.queries} heads of queries and {heads.keys} of keys and values"
        remedy = f"use one of {degrees}" if degrees else "leave it out, or use --replicas for copies of the whole model"
        raise RequestError(f"{OPTION} {degree} does not divide the layers of {source.reference!r}{shown}; {remedy}")


def _check_devices(degree: int, device: Device) -> None:
    """Raise RequestError if this machine, or torch, has not ``degree`` devices for the ranks."""
    given = f"{OPTION} {degree}"
    host = detect()
    cores = host.cpu.usable_cores if host.cpu is not None else 1
    available = max(host.gpus_per_node, 1) if device == "cuda" else cores
    if degree > available:
        unit = "GPUs" if device == "cuda" else "cores"
        raise RequestError(f"{given} is more than the {available} {unit} that are here; ask for at most {available}")
    built_for = torch.accelerator.current_accelerator()
    if built_for is not None and built_for.type != device:
        raise RequestError(
            f"{given} on a {device.upper()}: transformers divides a model on the devices that torch was built for, and this "
            f"torch was built for {built_for.type.upper()}; install torch for CPUs, or leave it out"
        )


def _layer_divisor(model: PreTrainedModel) -> int:
    """Return the greatest number that divides the heads and each divided dimension of the layers.

    Vocabularies are not counted, because their parts may differ in size."""
    plan = declared_plan(model)
    heads = heads_of(model.config.get_text_config())
    divisor = 0 if heads is None else gcd(heads.queries, heads.keys)
    for name, parameter in model.named_parameters():
        divided = divided_dimension(name, parameter, plan)
        if divided is not None and re.search(r"\.\d+\.", name):
            dimension, has_halves = divided
            size = parameter.shape[dimension]
            divisor = gcd(divisor, size // 2 if has_halves else size)
    return divisor


def load_part(source: ModelSource, model_class: Any, dtype: torch.dtype) -> Any:
    """Return the model with this rank's part of the weights. Only that part is read from the files.

    The ranks are those of torch's default process group."""
    import torch.distributed as dist

    model = model_class.from_pretrained(
        source.directory,
        config=copy.deepcopy(source.hf_config),
        dtype=dtype,
        distributed_config=DIVISION.get()(tp_size=dist.get_world_size()),
    )
    return model.eval()
