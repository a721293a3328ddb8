"""Update bf16 weights by AdamW without an fp32 copy: compute in fp32, and round stochastically to bf16.

A value is rounded up or down with probabilities that follow from its distance to both neighbours. Rounding to the nearest bf16
value would lose every update below 1/512 of its weight, and the second moment, which changes by 1/1000 a step, would never
fall. Rounded stochastically, both follow fp32 in expectation. See Zamirai et al., Revisiting BFloat16 Training, 2020. The first
moment changes by a tenth a step and is rounded to the nearest.

The random bits depend only on the seed, the step and the parameter. So every process rounds alike, a resumed run continues bit
for bit, and dropout's random numbers do not change.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from upshift.planning.cost.optimizer import STOCHASTIC_CHUNK
from upshift.training.optimizers.closure import Closure, evaluate_closure

LOW_HALF = 0xFFFF  # the bits of an fp32 number that bf16 drops
HIGH_HALF = -0x10000  # the bits that bf16 keeps


class StochasticAdamW(torch.optim.Optimizer):
    """AdamW with stochastic rounding of bf16 parameters. Other parameters are updated in place, without rounding."""

    def __init__(self, params: Any, *, lr: float, betas: tuple[float, float], eps: float, seed: int) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.seed = seed
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self._number = {parameter: number for number, parameter in enumerate(parameters)}

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        loss = evaluate_closure(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = 0  # a plain number: reading it must not wait for the device
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        tensors = [tensor.view(-1) for tensor in (parameter, gradient.contiguous(), state["exp_avg"], state["exp_avg_sq"])]
        if parameter.dtype != torch.bfloat16:
            _adamw(tensors, state["step"], group)
            return
        generator = torch.Generator(parameter.device)
        generator.manual_seed(zlib.crc32(f"{self.seed} {state['step']} {self._number[parameter]}".encode()))
        for chunk in zip(*(tensor.split(STOCHASTIC_CHUNK[parameter.device.type]) for tensor in tensors), strict=True):
            weight, _, first, second = chunk
            full = [tensor.float() for tensor in chunk]
            _adamw(full, state["step"], group)
            bits = _random_bits(weight, generator)
            weight.copy_(_rounded(full[0], bits))
            first.copy_(full[2])
            second.copy_(_rounded(full[3], bits.bitwise_right_shift_(16)))


def _adamw(tensors: list[Tensor], step: int, group: dict[str, Any]) -> None:
    """Run torch's fused kernel on one parameter, gradient, first and second moment."""
    previous_step = torch.full(
        (), float(step - 1), device=tensors[0].device
    )  # filled on the device: a copy would make the host wait
    weights, gradients, firsts, seconds = ([tensor] for tensor in tensors)
    beta1, beta2 = group["betas"]
    adamw(
        weights,
        gradients,
        firsts,
        seconds,
        [],
        [previous_step],
        foreach=False,
        fused=True,
        amsgrad=False,
        maximize=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
    )


def _random_bits(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Return 32 random bits for each element: the halves round two numbers."""
    pairs = torch.empty((tensor.numel() + 1) // 2, dtype=torch.int64, device=tensor.device)
    return pairs.random_(-(2**63), None, generator=generator).view(torch.int32)[: tensor.numel()]


def _rounded(full: Tensor, bits: Tensor) -> Tensor:
    """Round ``full`` in place to values that bf16 holds, with the low 16 of ``bits``, and return it.

    Adding random bits to the half that bf16 drops carries into the other half with the right probability.
    """
    as_bits = full.view(torch.int32)
    as_bits.add_(bits & LOW_HALF).bitwise_and_(HIGH_HALF)
    return full
