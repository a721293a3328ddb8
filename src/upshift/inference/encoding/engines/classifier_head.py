"""Compute a classifier's head with transformers' own modules, from the token states of another engine."""

from __future__ import annotations

import numpy as np
import torch
from transformers.modeling_outputs import BaseModelOutputWithPooling

from upshift.inference.encoding.engines.base import Batch, EncoderBuild, load_forward
from upshift.inference.torch_settings import inference_settings


class ClassifierHead:
    """A classifier without its encoder."""

    def __init__(self, build: EncoderBuild) -> None:
        self.setup = build.setup
        self.forward = load_forward(build.source, build.config)
        model = self.forward.model
        self.encoder = _GivenStates(getattr(model.base_model, "pooler", None))
        setattr(model, model.base_model_prefix, self.encoder)

    def __call__(self, batch: Batch, states: np.ndarray) -> np.ndarray:
        """Return class scores [B, C], or logits of tokens [B, S, L], from states [B, S, H]."""
        self.encoder.states = torch.from_numpy(states)
        with inference_settings(self.setup):
            output: np.ndarray = self.forward(*map(torch.from_numpy, batch.arrays())).numpy()
        return output


class _GivenStates(torch.nn.Module):
    """A module in place of the encoder. It returns given token states, and pools them as the encoder does."""

    def __init__(self, pooler: torch.nn.Module | None) -> None:
        super().__init__()
        self.pooler = pooler
        self.states = torch.empty(0)

    def forward(self, *_: object, **__: object) -> BaseModelOutputWithPooling:
        pooled = None if self.pooler is None else self.pooler(self.states)
        return BaseModelOutputWithPooling(last_hidden_state=self.states, pooler_output=pooled)
