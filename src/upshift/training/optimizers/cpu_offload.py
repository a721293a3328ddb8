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
from upshift.loading.offload.gpu_copy import pinned_memory
from upshift.training.optimizers.closure import Closure, evaluate_closure

ALIGNMENT = 64  # bytes; CPU kernels read whole cache lines


def _aligned_bytes(parameter: Tensor) -> int:
    return -(-parameter.nbytes // ALIGNMENT) * ALIGNMENT


class HostOptimizer(torch.optim.Optimizer):
    """Update parameters on the host.

    ``groups`` hold the parameters on the device. ``build`` makes the optimizer of their copies on the host.
    """

    def __init__(self, groups: list[dict[str, Any]], build: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]) -> None:
        super().__init__(groups, {})
        self.copies: dict[Tensor, Tensor] = {}  # copy on the host -> its parameter
        self._versions: dict[Tensor, int] = {}  # version of each parameter when its copy was last equal to it
        self._blocks = self._pin_blocks()
        self._num_used = 0
        copied_groups = [{**group, "params": [self._copy(p) for p in group["params"]]} for group in self.param_groups]
        self.inner = build(copied_groups)
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state

    def _pin_blocks(self) -> list[Tensor]:
        """Return one block of pinned memory for the copies, and one for their gradients; none without a GPU.

        torch would round each tensor up to a power of two.
        """
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        on_gpu = [parameter for parameter in parameters if parameter.device.type == "cuda"]
        if not on_gpu:
            return []
        num_bytes = sum(_aligned_bytes(parameter) for parameter in on_gpu)
        advice = "use optim_offload=False, or leave more memory free on the host"
        return [pinned_memory(num_bytes, on_gpu[0].device, advice=advice) for _ in range(2)]

    def _copy(self, parameter: Tensor) -> Tensor:
        if parameter.device.type == "cuda":
            block, gradients = (block[self._num_used :][: parameter.nbytes] for block in self._blocks)
            copy = block.view(parameter.dtype).view(parameter.shape)
            copy.grad = gradients.view(parameter.dtype).view(parameter.shape)
            self._num_used += _aligned_bytes(parameter)
        else:
            copy = torch.empty_like(parameter, device="cpu")
            copy.grad = torch.empty_like(copy)
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
