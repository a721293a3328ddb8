"""Compute the log-probability of a token, and the likeliest tokens in its place."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

LEAST = -9999.0  # as OpenAI says what has no chance


class Likely(NamedTuple):
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the likeliest first

    @classmethod
    def of(cls, logits: np.ndarray, token: int, count: int) -> Likely:
        """Return the log-probability of ``token`` from logits [V], with the ``count`` likeliest tokens."""
        whole = logits.astype(np.float64)
        shifted = whole - whole.max()
        found = np.maximum(shifted - np.log(np.exp(shifted).sum()), LEAST)
        count = min(count, len(found))
        places = np.argpartition(-found, count - 1)[:count] if count else np.empty(0, dtype=np.int64)
        top = tuple((int(place), float(found[place])) for place in places[np.argsort(-found[places], kind="stable")])
        return cls(token, float(found[token]), top)
