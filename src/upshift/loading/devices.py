"""Run a model on several devices: move the arguments of each module to the device that computes its weights.

The output of a layer of a stack stays on the layer's device. The output of other modules moves to the main device, where the
code between modules runs. The model's own output moves to the device that its input came from.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from upshift.loading.kinds import is_looked_up
from upshift.loading.place import CPU, DISK, Placement
from upshift.models.build import find_stacks


def move_arguments(model: nn.Module, placement: Placement, main: torch.device) -> None:
    """Register the hooks that move arguments and outputs. ``main``: the GPU that runs the code between modules."""
    modules = dict(model.named_modules())
    layers = {layer for _, stack in find_stacks(model) for layer in stack}
    for place in placement.modules:
        module = modules.get(place.name)
        if module is None or module is model:
            continue
        waits = place.device in (CPU, DISK)
        device = main
        if waits and is_looked_up(module):
            device = torch.device(CPU)
        elif not waits and place.device != placement.main:
            device = torch.device(place.device)
        module.register_forward_pre_hook(partial(_before, device), with_kwargs=True)
        if device != main and module not in layers:
            module.register_forward_hook(partial(_after, main))
    _Whole(main).attach(model)


class _Whole:
    """The hooks of the model itself: input moves to the main device, output to the device that the input came from."""

    def __init__(self, main: torch.device) -> None:
        self._main, self._came_from = main, main

    def attach(self, model: nn.Module) -> None:
        model.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
        model.register_forward_hook(self._leave)

    def _enter(self, module: nn.Module, arguments: Any, named: dict[str, Any]) -> Any:
        self._came_from = next((one.device for one in (*arguments, *named.values()) if isinstance(one, Tensor)), self._main)
        return moved(arguments, self._main), moved(named, self._main)

    def _leave(self, module: nn.Module, arguments: Any, output: Any) -> Any:
        return moved(output, self._came_from)


def _before(device: torch.device, module: nn.Module, arguments: Any, named: dict[str, Any]) -> Any:
    return moved(arguments, device), moved(named, device)


def _after(device: torch.device, module: nn.Module, arguments: Any, output: Any) -> Any:
    return moved(output, device)


def moved(value: Any, device: torch.device) -> Any:
    """Return a value with its tensors on a device, also the tensors in tuples, lists and mappings.

    A cache stays as it is: its layers are on the devices that fill them."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=device.type != CPU)  # what comes to the CPU must be there before it is read
    if isinstance(value, Mapping):
        found = {key: moved(item, device) for key, item in value.items()}
        return type(value)(**found) if type(value) is not dict else found
    if isinstance(value, tuple | list):
        items = [moved(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
