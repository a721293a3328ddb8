"""Keep an optimizer's state on the host and update there: gradients go to the host, updated weights come back.

torchao's CPUOffloadOptimizer copies each gradient as soon as it exists, so it cannot clip, and it gives every parameter its own
group. This optimizer moves the gradients in its step. Its state is saved like that of the optimizer inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from upshift.internals.torch_names import VERSION
from upshift.training.optimizers.closure import Closure, evaluate_closure


class HostOptimizer(torch.optim.Optimizer):
    """Update parameters on the host.

    ``groups`` hold the parameters on the device. ``build`` makes the optimizer of their copies on the host.
    """

    def __init__(self, groups: list[dict[str, Any]], build: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]) -> None:
        super().__init__(groups, {})
        self.copies: dict[Tensor, Tensor] = {}  # copy on the host -> its parameter
        self._versions: dict[Tensor, int] = {}  # version of each parameter when its copy was last equal to it
        copied_groups = [{**group, "params": [self._copy(p) for p in group["params"]]} for group in self.param_groups]
        self.inner = build(copied_groups)
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state

    def _copy(self, parameter: Tensor) -> Tensor:
        pinned = parameter.device.type == "cuda"
        copy = torch.empty_like(parameter, device="cpu", pin_memory=pinned)
        copy.grad = torch.empty_like(copy, pin_memory=pinned)
        self.copies[copy] = parameter
        return copy

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        loss = evaluate_closure(closure)
        self.inner.state = self.state
        self.inner.param_groups = self.param_groups
        buffers = {copy: copy.grad for copy in self.copies}
        for copy, parameter in self.copies.items():
            if parameter.grad is None:
                copy.grad = None
            else:
                assert copy.grad is not None  # _copy sets it, and every step puts it back
                copy.grad.copy_(parameter.grad, non_blocking=True)
            if self._versions.get(copy) != VERSION.of(parameter):  # the parameter was loaded, or changed by other code
                copy.copy_(parameter, non_blocking=True)
        if any(parameter.device.type == "cuda" for parameter in self.copies.values()):
            torch.cuda.synchronize()
        self.inner.step()
        for copy, parameter in self.copies.items():
            parameter.copy_(copy, non_blocking=True)
            self._versions[copy] = VERSION.of(parameter)
            copy.grad = buffers[copy]
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.copies.values():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()
