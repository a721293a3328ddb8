# needs torch
"""Place a model on several devices and the disk, fill it, and register the hooks that run it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from upshift.errors import RequestError
from upshift.internals.transformers_names import SET_TENSOR
from upshift.loading.files.checkpoint import Checkpoint
from upshift.loading.files.mapped_file import MappedFiles
from upshift.loading.fill_model import Filling, Progress
from upshift.loading.offload.disk_store import check_groups_undivided, find_or_convert
from upshift.loading.offload.gpu_copy import CudaCopyStream
from upshift.loading.offload.hooks import register_offload_hooks
from upshift.loading.placement.modules import place_model
from upshift.loading.placement.place import CPU, DISK, Placement

DeviceMap = str | int | Mapping[str, str | int]


@dataclass(frozen=True)
class PlacementOptions:
    """A user's choice of devices, and the workload that needs memory besides the weights."""

    device_map: DeviceMap
    max_memory: Mapping[str | int, str | int] | None = None
    offload_folder: Path | None = None
    batch: int = 1
    sequence_length: int | None = None  # None: the default for the model


def fill_and_dispatch(
    filling: Filling,
    checkpoint: Checkpoint,
    options: PlacementOptions,
    finish: Callable[[dict[str, str]], None],
    progress: Progress | None,
) -> None:
    """Fill a model on several devices, and register its hooks.

    ``finish`` is called with the device of each module when all weights are loaded."""
    model = filling.model
    placement = plan_placement(model, checkpoint, options)
    check_loose_parameters(placement)
    check_groups_undivided(filling, placement)
    stored = find_or_convert(filling, placement, options.offload_folder)
    filling.run(lambda name: _torch_device(placement, name), progress)
    mapped_files = MappedFiles()
    for name, tensor in stored.items():
        SET_TENSOR.get()(model, name, mapped_files.tensor(tensor), filling.info, None)
    finish({"": placement.main} | {name: device for name, device in placement.device_map.items() if device not in (CPU, DISK)})
    if placement.main == CPU:
        register_offload_hooks(model, placement, stored)
    elif set(placement.device_map.values()) != {placement.main}:
        register_offload_hooks(model, placement, stored, copy_stream=CudaCopyStream(torch.device(placement.main)))


def plan_placement(
    model: PreTrainedModel, checkpoint: Checkpoint | None, options: PlacementOptions, memory_bytes_per_second: float | None = None
) -> Placement:
    return place_model(
        model,
        device_map=options.device_map,
        max_memory=options.max_memory,
        checkpoint=checkpoint,
        batch=options.batch,
        sequence_length=options.sequence_length,
        memory_bytes_per_second=memory_bytes_per_second,
    )


def check_loose_parameters(placement: Placement) -> None:
    """Raise RequestError if a parameter that is used by code between modules is not on the main device.

    It has no module whose hooks could load it."""
    misplaced = [
        placed_module
        for placed_module in placement.modules
        if not placed_module.streams and placed_module.device != placement.main
    ]
    if placement.main != CPU and misplaced:
        raise RequestError(
            f"{misplaced[0].name} is used by code between modules, which runs on {placement.main}, and device_map has it on "
            f"{misplaced[0].device}; give it to {placement.main}"
        )


def _torch_device(placement: Placement, name: str) -> torch.device | None:
    device = placement.device_of(name)
    return None if device == DISK else torch.device(device)
