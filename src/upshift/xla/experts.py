"""Compute a mixture of experts without shapes that depend on data.

Every expert computes every token, and experts that a token did not choose get the weight 0. This costs
num_experts / experts_per_token times the FLOPs of the chosen experts, and no memory for copies of weights. For a few tokens, as
in a step of generation, the weights of the chosen experts are gathered instead (transformers' batched_mm), which reads less."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from upshift.internals.transformers_names import BATCHED_EXPERTS, EXPERTS_FUNCTIONS

STATIC_EXPERTS = "upshift_static"


def static_experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute the experts of a layer, ``self``, as transformers' experts functions do.

    ``hidden_states`` are [tokens, hidden], ``top_k_index`` and ``top_k_weights`` [tokens, experts per token]."""
    tokens, experts_per_token = top_k_index.shape
    if tokens * experts_per_token <= self.num_experts:
        batched: Tensor = BATCHED_EXPERTS.get()(self, hidden_states, top_k_index, top_k_weights)
        return batched

    def linear(value: Tensor, weight: Tensor, name: str) -> Tensor:
        matrix = weight if self.is_transposed else weight.transpose(-1, -2)
        output = torch.matmul(value, matrix)
        if self.has_bias:
            output = output + getattr(self, name)[:, None]
        return output

    repeated = hidden_states.expand(self.num_experts, *hidden_states.shape)
    if self.has_gate:
        output = self._apply_gate(linear(repeated, self.gate_up_proj, "gate_up_proj_bias"))
    else:
        output = self.act_fn(linear(repeated, self.up_proj, "up_proj_bias"))
    output = linear(output, self.down_proj, "down_proj_bias")
    if self.has_post_expert_norm:
        output = self.post_expert_norm(output)
    is_chosen = top_k_index[..., None] == torch.arange(self.num_experts, device=top_k_index.device)
    weights = (is_chosen * top_k_weights[..., None]).sum(1)  # [tokens, experts]
    return torch.einsum("te,eth->th", weights.to(output.dtype), output).to(hidden_states.dtype)


def register() -> str:
    """Register the function with transformers, and return its name."""
    EXPERTS_FUNCTIONS.get().register(STATIC_EXPERTS, static_experts_forward)
    return STATIC_EXPERTS
