"""Run an optimizer on this rank's parts of parameters that ranks have divided among them, as plain tensors.

An update that works element by element is the same on a part. Plain tensors spare each update the dispatch of DTensors, which
also refuses lists of tensors that are divided in different ways. The optimizer state belongs to parts, and ``parts`` maps each
to its parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from upshift.training.optimizers.closure import Closure, evaluate_closure


class UpdateSharding(Protocol):
    """A description of how parameters are divided."""

    def part(self, parameter: Tensor) -> Tensor:
        """Return the part of the parameter that this rank updates: the same memory, or an fp32 copy. It may be empty. Called
        once."""

    def rows(self, parameter: Tensor) -> tuple[int, int] | None:
        """Return which rows of this rank's tensor of the parameter the part has. None means all."""

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Return the gradient of that part, summed over ranks."""

    def along(self, parameter: Tensor) -> Any:
        """Return over which ranks the parameter is divided (parallel/gradients.py)."""

    def publish(self, parts: dict[Tensor, Tensor]) -> None:
        """Give updated parts, by their parameter, to all ranks that compute with the parameter."""

    def forget(self) -> None:
        """Forget all gradients."""


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer of parts. ``groups`` hold the parameters; ``build`` makes the optimizer of their parts."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        build: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        division: UpdateSharding,
    ) -> None:
        super().__init__(groups, {})
        self.division = division
        self.parts: dict[Tensor, Tensor] = {}  # part -> its parameter
        of_parts = [{**group, "params": [self._part(p) for p in group["params"]]} for group in self.param_groups]
        self.inner = build(of_parts)
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state

    def _part(self, parameter: Tensor) -> Tensor:
        part = self.division.part(parameter)
        self.parts[part] = parameter
        return part

    def take_gradients(self) -> None:
        """Take the gradients of the parts, before they are unscaled, clipped and used."""
        for part, parameter in self.parts.items():
            part.grad = self.division.gradient(parameter)

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        loss = evaluate_closure(closure)
        self.inner.state = self.state
        self.inner.param_groups = self.param_groups
        self.inner.step()
        self.division.publish({parameter: part for part, parameter in self.parts.items()})
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part, parameter in self.parts.items():
            part.grad = parameter.grad = None
        self.division.forget()
