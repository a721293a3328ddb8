"""transformers and PyTorch, kernel by kernel: the reference of every other engine."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from upshift.inference.generation.engines.decoder import DecoderBuild, Padding, positions
from upshift.inference.generation.model import load_model, plain_cache, weight_bytes
from upshift.inference.padding import padded_rows
from upshift.inference.torch_computing import computing


class TorchDecoder:
    joins = True

    def __init__(self, build: DecoderBuild) -> None:
        self.setup = build.setup
        self.model = load_model(build.source, build.setup.precision)
        self.weight_bytes = weight_bytes(build.source, self.model)
        self._takes = set(inspect.signature(self.model.forward).parameters)
        self.padding = Padding()
        self.cache = plain_cache()

    def admit(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        ids, mask = padded_rows(prompts, left=True)
        cache = plain_cache()
        logits = self._run(ids, mask, positions(mask), cache)
        if self.padding.rows:
            dropped, before, behind = self.padding.admit(mask)
            for layer, new in zip(self.cache.layers, cache.layers, strict=True):
                layer.keys = torch.cat([_padded(layer.keys[:, :, dropped:], before), _padded(new.keys, behind)])
                layer.values = torch.cat([_padded(layer.values[:, :, dropped:], before), _padded(new.values, behind)])
        else:
            self.padding.admit(mask)
            self.cache = cache
        return logits

    def step(self, tokens: np.ndarray) -> np.ndarray:
        places = self.padding.step()
        return self._run(tokens[:, None], self.padding.mask, places, self.cache)

    def keep(self, rows: list[int]) -> None:
        self.padding.keep(rows)
        if rows:
            self.cache.batch_select_indices(torch.tensor(rows))
        else:
            self.cache = plain_cache()

    def _run(self, ids: np.ndarray, mask: np.ndarray, places: np.ndarray, cache: Any) -> np.ndarray:
        given = {
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.from_numpy(mask),
            "position_ids": torch.from_numpy(places),
            "past_key_values": cache,
            "use_cache": True,
            "logits_to_keep": 1,
        }
        with computing(self.setup):
            logits = self.model(**{name: value for name, value in given.items() if name in self._takes}).logits
        found: np.ndarray = logits[:, -1].float().numpy()
        return found


def _padded(states: torch.Tensor, places: int) -> torch.Tensor:
    """[R, heads, T, width], so many places more on the left."""
    return torch.nn.functional.pad(states, (0, 0, places, 0)) if places else states
