"""Runs an optimizer on this rank's parts of parameters that ranks have divided among them, as plain tensors.

An update that works element by element is the same on a part. Plain tensors spare each update the dispatch of DTensors, which
also refuses lists of tensors that are divided in different ways. The state is of parts: ``parts`` says of what.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from upshift.training.optimizers.closure import Closure, evaluate_closure


class Division(Protocol):
    """How parameters are divided."""

    def part(self, parameter: Tensor) -> Tensor:
        """What this rank updates of it: the same memory, or an fp32 copy; it may be empty. Asked once."""

    def rows(self, parameter: Tensor) -> tuple[int, int] | None:
        """Which rows of what this rank has of the parameter that part is; None: all."""

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Of that part, summed over ranks."""

    def along(self, parameter: Tensor) -> Any:
        """Over which ranks it is divided (parallel/gradients.py)."""

    def publish(self, parts: dict[Tensor, Tensor]) -> None:
        """Updated parts, by their parameter: whoever computes with the parameter gets them."""

    def forget(self) -> None:
        """All gradients."""


class OnParts(torch.optim.Optimizer):
    """``groups`` hold the parameters; ``build`` makes the optimizer of their parts."""

    def __init__(
        self, groups: list[dict[str, Any]], build: Callable[[list[dict[str, Any]]], torch.optim.Optimizer], division: Division
    ) -> None:
        super().__init__(groups, {})
        self.division = division
        self.parts: dict[Tensor, Tensor] = {}  # part -> its parameter
        of_parts = [{**group, "params": [self._part(p) for p in group["params"]]} for group in self.param_groups]
        self.inner = build(of_parts)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def _part(self, parameter: Tensor) -> Tensor:
        part = self.division.part(parameter)
        self.parts[part] = parameter
        return part

    def take_gradients(self) -> None:
        """Of the parts, before they are unscaled, clipped and used."""
        for part, parameter in self.parts.items():
            part.grad = self.division.gradient(parameter)

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        loss = evaluate_closure(closure)
        self.inner.state, self.inner.param_groups = self.state, self.param_groups
        self.inner.step()
        self.division.publish({parameter: part for part, parameter in self.parts.items()})
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part, parameter in self.parts.items():
            part.grad = parameter.grad = None
        self.division.forget()
