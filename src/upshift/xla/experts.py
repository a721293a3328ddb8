"""Compute a mixture of experts without shapes that depend on data: every expert computes every token, and those not
chosen weigh nothing.

This costs experts / experts_per_token times the FLOPs of the chosen ones, and no memory for copies of weights. For a
few tokens, as in a step of generation, weights of the chosen ones are gathered (transformers' batched_mm), which
reads less."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from upshift.internals.transformers_names import BATCHED_EXPERTS, EXPERTS_FUNCTIONS

STATIC_EXPERTS = "upshift_static"


def static_experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    tokens, chosen = top_k_index.shape
    if tokens * chosen <= self.num_experts:
        batched: Tensor = BATCHED_EXPERTS.get()(self, hidden_states, top_k_index, top_k_weights)
        return batched

    def linear(value: Tensor, weight: Tensor, name: str) -> Tensor:
        made = torch.matmul(value, weight if self.is_transposed else weight.transpose(-1, -2))
        return made + getattr(self, name)[:, None] if self.has_bias else made

    spread = hidden_states.expand(self.num_experts, *hidden_states.shape)
    if self.has_gate:
        made = self._apply_gate(linear(spread, self.gate_up_proj, "gate_up_proj_bias"))
    else:
        made = self.act_fn(linear(spread, self.up_proj, "up_proj_bias"))
    made = linear(made, self.down_proj, "down_proj_bias")
    if self.has_post_expert_norm:
        made = self.post_expert_norm(made)
    is_chosen = top_k_index[..., None] == torch.arange(self.num_experts, device=top_k_index.device)
    share = (is_chosen * top_k_weights[..., None]).sum(1)  # [tokens, experts]
    return torch.einsum("te,eth->th", share.to(made.dtype), made).to(hidden_states.dtype)


def register() -> str:
    EXPERTS_FUNCTIONS.get().register(STATIC_EXPERTS, static_experts_forward)
    return STATIC_EXPERTS
