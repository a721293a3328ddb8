"""Lower the logits of tokens that a text has already: OpenAI's two penalties, which transformers does not have."""

from __future__ import annotations

from typing import cast

import torch
from transformers import LogitsProcessor


class SaidPenalty(LogitsProcessor):
    """A penalty on every token of the answer so far: ``frequency`` for each time that it came, ``presence`` once
    (OpenAI, "Frequency and presence penalties"). ``prompt_length`` is the number of tokens before the answer, which
    do not count."""

    def __init__(self, frequency: float, presence: float, prompt_length: int) -> None:
        self._frequency, self._presence, self._before = frequency, presence, prompt_length

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Return scores [1, V] from input_ids [1, T] and scores [1, V]."""
        counts = torch.bincount(input_ids[0, self._before :], minlength=scores.shape[-1])
        lowered = scores - self._frequency * counts - self._presence * (counts > 0)
        return cast("torch.FloatTensor", lowered)  # torch types what operators give as Tensor
