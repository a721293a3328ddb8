# needs torch
"""Run transformers in PyTorch for models that keep states of a fixed size: recurrent layers and convolutions, alone or beside
attention. Rows join others, as those of keys and values do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from upshift.inference.generation.engines.base import Prefix
from upshift.inference.generation.engines.torch_decoder import TorchDecoder
from upshift.inference.generation.prefix import remaining_tokens
from upshift.models.kv_cache import check_cache_filled, join_rows, mask_of_pass, select_rows, states_cache


class TorchStatesDecoder(TorchDecoder):
    """A model whose layers keep states of a fixed size, or keys and values, or both.

    A state holds all tokens of its row, so no row starts from the beginning of another one, and none drops its last tokens. A
    prompt is one pass, because not every model continues a state with several tokens."""

    extends = False
    prefixes = False

    def empty_cache(self) -> Any:
        return states_cache(self.model.config)

    def admit(self, prompts: Sequence[Sequence[int]], prefix: Prefix | None = None) -> np.ndarray:
        remainder = remaining_tokens(prompts, 0)
        cache = self.empty_cache()
        logits = self._run(remainder.ids, remainder.mask, remainder.positions, cache)
        check_cache_filled(self.model, cache)
        if self.padding.rows:
            dropped, present_padding, new_padding = self.padding.admit(remainder.mask)
            join_rows(self.cache, cache, dropped=dropped, present_padding=present_padding, new_padding=new_padding)
        else:
            self.padding.admit(remainder.mask)
            self.cache = cache
        return logits

    def keep(self, rows: list[int]) -> None:
        self.padding.keep(rows)
        if rows:
            select_rows(self.cache, torch.tensor(rows, device=self.model.device))
        else:
            self.cache = self.empty_cache()

    def _logits(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any, *, last: int = 1
    ) -> torch.Tensor:
        return super()._logits(ids, mask_of_pass(cache, mask, ids.shape[1]), positions, cache, last=last)
