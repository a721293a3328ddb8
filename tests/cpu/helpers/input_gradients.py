"""The gradient that reaches a model's input through all its layers."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel


def input_gradient(model: PreTrainedModel) -> torch.Tensor:
    """Return the gradient of the loss of two drawn rows of 6 tokens and width 64."""
    torch.manual_seed(1)
    states = torch.randn(2, 6, 64, requires_grad=True)
    model(inputs_embeds=states, labels=torch.ones(2, 6, dtype=torch.long)).loss.backward()
    assert states.grad is not None
    return states.grad
