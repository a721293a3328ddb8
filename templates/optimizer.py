"""TOY: whose update it is, with its paper, and what it is for.

Copy to src/upshift/training/optimizers/NAME.py. Nothing else needs to know of it: --allow NAME, --set optim=NAME, optim_args, the
planner's memory and time and checkpoints find it by OPTIMIZER. Here: the sign of a momentum (Lion; Chen et al., Symbolic
Discovery of Optimization Algorithms, 2023, algorithm 2).
"""

from __future__ import annotations

from typing import Any

import torch

from upshift.training.optimizers.closure import Closure, evaluate_closure

OPTIMIZER = {
    "name": "toy",
    "class": "Toy",
    "changes": "the sign of a momentum instead of AdamW's step",
    "state_words": 1,  # the momentum
    "update_words": 8,  # of gradient, weight and momentum: 5 read, 3 written
    "update_copies": 1,
    "options": ("beta1", "beta2"),
    "elementwise": True,
}


class Toy(torch.optim.Optimizer):
    """``weight_decay`` comes with each group, ``lr`` is scheduled."""

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, beta1: float = 0.9, beta2: float = 0.99) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0, "beta1": beta1, "beta2": beta2})

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:
        loss = evaluate_closure(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        momentum = state.setdefault("exp_avg", torch.zeros_like(parameter))
        direction = torch.lerp(parameter.grad, momentum, group["beta1"]).sign_()
        parameter.mul_(1.0 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])
        momentum.lerp_(parameter.grad, 1.0 - group["beta2"])
