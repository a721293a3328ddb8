"""Run an optimizer on this rank's shards of parameters, as plain tensors.

An elementwise update of a shard is the same as of the whole parameter. Plain tensors avoid the dispatch of DTensors, which also
rejects lists of tensors that are divided in different ways. The optimizer state belongs to the shards, and ``shards`` maps each
shard to its parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from upshift.training.optimizers.closure import Closure, evaluate_closure


class UpdateSharding(Protocol):
    """Describe how ranks divide the parameters to update them."""

    def shard(self, parameter: Tensor) -> Tensor:
        """Return the shard of the parameter that this rank updates: the same memory, or an fp32 copy. It may be empty.

        It is called once for each parameter.
        """

    def rows(self, parameter: Tensor) -> tuple[int, int] | None:
        """Return which rows of this rank's tensor the shard has, as (first, end), or None for all rows."""

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Return the gradient of the shard, summed over ranks."""

    def is_used(self, parameter: Any) -> bool:
        """Return whether this rank's backward passes gave the parameter a gradient, before gradients are summed over ranks."""

    def drop_gradient(self, parameter: Any) -> None:
        """Drop the summed gradient of a parameter that no rank used, so that the optimizer leaves its shard alone."""

    def sharded_along(self, parameter: Tensor) -> Any:
        """Return the mesh dimensions along which ranks have different shards of the parameter."""

    def publish(self, shards: dict[Tensor, Tensor]) -> None:
        """Send the updated shards, by parameter, to all ranks that compute with the parameter."""

    def forget(self) -> None:
        """Forget all gradients."""


class ShardedOptimizer(torch.optim.Optimizer):
    """Update shards. ``groups`` hold the parameters; ``build`` makes the optimizer of their shards."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        build: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        sharding: UpdateSharding,
    ) -> None:
        super().__init__(groups, {})
        self.sharding = sharding
        self.shards: dict[Tensor, Tensor] = {}  # shard -> its parameter
        shard_groups = [{**group, "params": [self._make_shard(p) for p in group["params"]]} for group in self.param_groups]
        self.inner = build(shard_groups)
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state

    def _make_shard(self, parameter: Tensor) -> Tensor:
        shard = self.sharding.shard(parameter)
        self.shards[shard] = parameter
        return shard

    def take_gradients(self) -> None:
        """Set the gradients of the shards, before they are unscaled, clipped and used."""
        for shard, parameter in self.shards.items():
            shard.grad = self.sharding.gradient(parameter)

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        loss = evaluate_closure(closure)
        self.inner.state = self.state
        self.inner.param_groups = self.param_groups
        self.inner.step()
        self.sharding.publish({parameter: shard for shard, parameter in self.shards.items()})
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for shard, parameter in self.shards.items():
            shard.grad = None
            parameter.grad = None
        self.sharding.forget()
