"""Keep keys and values of earlier prompts, for conversations that go on and for beginnings that prompts share."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from upshift.inference.generation.engines.decoder import Prefix
from upshift.inference.generation.prefill import SHORTEST

RECENT = 64  # prompts that new ones are held against


class Kept(NamedTuple):
    tokens: np.ndarray  # [T]
    prefix: Prefix


class PromptCache:
    """Kept prompts with at most ``most_tokens`` tokens together. The least recently used ones are dropped first."""

    def __init__(self, most_tokens: int) -> None:
        self._most = most_tokens
        self._kept: list[Kept] = []  # the last one was used last
        self._recent: deque[np.ndarray] = deque(maxlen=RECENT)

    def find(self, prompt: Sequence[int]) -> Prefix | None:
        """Return the longest kept beginning of the prompt, or None. The last token is left out, because the first
        logits come from it."""
        ids = np.asarray(prompt)
        lengths = [_shared(kept.tokens, ids[:-1]) for kept in self._kept]
        longest = max(lengths, default=0)
        if longest < SHORTEST:
            return None
        found = self._kept.pop(lengths.index(longest))
        self._kept.append(found)
        return found.prefix._replace(length=longest)

    def repeats(self, prompt: Sequence[int], known: int) -> bool:
        """Return whether a recent prompt shares more of this prompt's beginning than is known of it. The prompt then
        counts as recent."""
        ids = np.asarray(prompt)
        longest = max((_shared(one, ids) for one in self._recent), default=0)
        self._recent.append(ids)
        return longest >= known + SHORTEST

    def add(self, tokens: Sequence[int], prefix: Prefix) -> None:
        ids = np.asarray(tokens)[: prefix.length]
        if len(ids) > self._most:
            return
        self._kept = [kept for kept in self._kept if _shared(kept.tokens, ids) < len(kept.tokens)]  # what it holds, too
        self._kept.append(Kept(ids, prefix))
        held = 0
        for place in reversed(range(len(self._kept))):
            held += len(self._kept[place].tokens)
            if held > self._most:
                del self._kept[: place + 1]
                break


def _shared(one: np.ndarray, other: np.ndarray) -> int:
    size = min(len(one), len(other))
    differ = one[:size] != other[:size]
    return int(differ.argmax()) if differ.any() else size
