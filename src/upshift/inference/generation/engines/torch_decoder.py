"""Run transformers and PyTorch kernel by kernel. This is the reference of every other engine."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from upshift.inference.generation.engines.decoder import DecoderBuild, NoMixing, Padding, Prefix
from upshift.inference.generation.model import load_model, plain_cache, weight_bytes
from upshift.inference.generation.prefill import Remainder, remainder
from upshift.inference.torch_computing import computing
from upshift.models.cache import cache_argument, check_kept


class TorchDecoder(NoMixing):
    joins = True
    extends = True

    def __init__(self, build: DecoderBuild) -> None:
        self.setup = build.setup
        self.model = self.load(build)
        self.weight_bytes = weight_bytes(build.source, self.model)
        self._takes = set(inspect.signature(self.model.forward).parameters)
        self._cache_argument = cache_argument(self.model)
        self.padding = Padding()
        self.cache = plain_cache()

    def load(self, build: DecoderBuild) -> Any:
        return load_model(build.source, build.setup.precision, build.setup.device, where=build.where)

    def compute(self, tokens: Sequence[int]) -> Prefix:
        cache = plain_cache()
        self._compute(remainder([tokens], 0), cache)
        return _prefix(cache, 0, len(tokens))

    def of_row(self, row: int) -> Prefix:
        return _prefix(self.cache, row, int(self.padding.mask[row].sum()))

    def admit(self, prompts: Sequence[Sequence[int]], prefix: Prefix | None = None) -> np.ndarray:
        left = remainder(prompts, prefix.length if prefix else 0)
        known = prefix.states if prefix else ()
        past = [torch.from_numpy(left.place(states)).to(self.model.device, self.model.dtype) for states in known]
        cache = plain_cache(past)
        logits = self._compute(left, cache)
        if self.padding.rows:
            dropped, before, behind = self.padding.admit(left.mask)
            for layer, new in zip(self.cache.layers, cache.layers, strict=True):
                layer.keys = torch.cat([_padded(layer.keys[:, :, dropped:], before), _padded(new.keys, behind)])
                layer.values = torch.cat([_padded(layer.values[:, :, dropped:], before), _padded(new.values, behind)])
        else:
            self.padding.admit(left.mask)
            self.cache = cache
        return logits

    def step(self, tokens: np.ndarray) -> np.ndarray:
        places = self.padding.step()
        return self._run(tokens[:, None], self.padding.mask, places, self.cache)

    def extend(self, tokens: Sequence[int]) -> np.ndarray:
        places = np.concatenate([self.padding.step() for _ in tokens], axis=1)
        ids = np.array([tokens], dtype=np.int64)
        found: np.ndarray = self._run(ids, self.padding.mask, places, self.cache, last=len(tokens))[0]
        return found

    def cut(self, tokens: int) -> None:
        if tokens:
            self.padding.cut(tokens)
            for layer in self.cache.layers:
                layer.keys, layer.values = layer.keys[:, :, :-tokens], layer.values[:, :, :-tokens]

    def keep(self, rows: list[int]) -> None:
        self.padding.keep(rows)
        if rows:
            self.cache.batch_select_indices(torch.tensor(rows, device=self.model.device))
        else:
            self.cache = plain_cache()

    def _compute(self, left: Remainder, cache: Any) -> np.ndarray:
        for part in left.parts():
            logits = self._run(part.ids, part.mask, part.positions, cache)
        check_kept(self.model, cache)
        return logits

    def _run(self, ids: np.ndarray, mask: np.ndarray, places: np.ndarray, cache: Any, *, last: int = 0) -> np.ndarray:
        """Return the logits [R, last, V] of the last ``last`` tokens. With 0, return those of the last one [R, V]."""
        tokens, seen, positions = (torch.from_numpy(array).to(self.model.device) for array in (ids, mask, places))
        with computing(self.setup):
            logits = self._logits(tokens, seen, positions, cache, last=max(last, 1))
            return self._told(logits if last else logits[:, -1])

    def _logits(self, ids: torch.Tensor, mask: torch.Tensor, places: torch.Tensor, cache: Any, *, last: int = 1) -> torch.Tensor:
        """Return the logits of the last tokens of each row, [R, last, V]."""
        given = {
            "input_ids": ids, "attention_mask": mask, "position_ids": places,
            "logits_to_keep": last,
        }  # fmt: skip
        known = {name: value for name, value in given.items() if name in self._takes}
        found: torch.Tensor = self.model(**known, **{self._cache_argument: cache}, use_cache=True).logits
        return found[:, -last:]

    @staticmethod
    def _told(logits: torch.Tensor) -> np.ndarray:
        found: np.ndarray = logits.float().cpu().numpy()
        return found


def _prefix(cache: Any, row: int, length: int) -> Prefix:
    """``states``: keys [1, heads, T, width] and values of the first layer, then of the next."""
    whole = [states[row : row + 1, :, -length:] for layer in cache.layers for states in (layer.keys, layer.values)]
    return Prefix(length, [states.float().cpu().numpy().copy() for states in whole])


def _padded(states: torch.Tensor, places: int) -> torch.Tensor:
    """Return [R, heads, T, width] with ``places`` more places on the left."""
    return torch.nn.functional.pad(states, (0, 0, places, 0)) if places else states
