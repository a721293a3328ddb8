"""Compute a classifier's head by transformers' own modules, from token states that an engine has computed."""

from __future__ import annotations

import numpy as np
import torch
from transformers.modeling_outputs import BaseModelOutputWithPooling

from upshift.inference.encoding.engines.base import Batch, Build, load_forward
from upshift.inference.torch_settings import computing


class Head:
    """The classifier with its encoder taken out."""

    def __init__(self, build: Build) -> None:
        self.setup = build.setup
        self.forward = load_forward(build.source, build.recipe)
        model = self.forward.model
        self.given = _Given(getattr(model.base_model, "pooler", None))
        setattr(model, model.base_model_prefix, self.given)

    def __call__(self, batch: Batch, states: np.ndarray) -> np.ndarray:
        """Return class scores [B, C], or logits of tokens [B, S, L], from states [B, S, H]."""
        self.given.states = torch.from_numpy(states)
        with computing(self.setup):
            found: np.ndarray = self.forward(torch.from_numpy(batch.ids), torch.from_numpy(batch.mask)).numpy()
        return found


class _Given(torch.nn.Module):
    """A stand-in for the encoder. It gives the states that were computed elsewhere, and pools them as the encoder
    does."""

    def __init__(self, pooler: torch.nn.Module | None) -> None:
        super().__init__()
        self.pooler = pooler
        self.states = torch.empty(0)

    def forward(self, *_: object, **__: object) -> BaseModelOutputWithPooling:
        pooled = None if self.pooler is None else self.pooler(self.states)
        return BaseModelOutputWithPooling(last_hidden_state=self.states, pooler_output=pooled)
