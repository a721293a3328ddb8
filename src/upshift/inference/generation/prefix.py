"""Decide which parts of prompts are computed, and in which passes. A common beginning, such as a system prompt, is
computed once. Long prompts are computed in parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

import numpy as np

from upshift.inference.tokenizer import padded_rows

SHORTEST = 32  # tokens: less is computed as fast as its keys and values are copied
PASS_TOKENS = 8192  # of all rows, padding included, in one pass: activations take memory, too


def common_prefix(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Return the common beginning of the prompts, or nothing if it is not worth keeping. The last token of each
    prompt is left out, because the first logits come from it."""
    if len(prompts) < 2:
        return []
    first, last = min(prompts, key=tuple), max(prompts, key=tuple)  # in the order of words: what these two share, all do
    most = min(map(len, prompts)) - 1
    shared = next((place for place in range(most) if first[place] != last[place]), most)
    return list(first[:shared]) if shared >= SHORTEST else []


class Remainder(NamedTuple):
    """The part of the prompts that is left to compute. All rows end in as many new tokens. Shorter rows have some of
    the prefix among them, so that padding stays on the left of what is kept, as masks of sliding windows and ALiBi
    expect."""

    ids: np.ndarray  # [N, S]
    mask: np.ndarray  # [N, C + S] of 0 and 1, padded on the left
    kept: list[int]  # tokens of the prefix that each row takes as they are; the most of any are C

    @property
    def positions(self) -> np.ndarray:
        """Return the positions [N, S] of the new tokens, as transformers counts them."""
        found: np.ndarray = np.maximum(self.mask.cumsum(1) - 1, 0)[:, -self.ids.shape[1] :]
        return found

    def parts(self) -> Iterator[Self]:
        """Yield the parts of long prompts one after another. Each goes on from those before (chunked prefill:
        Sarathi, arXiv:2308.16369)."""
        rows, new = self.ids.shape
        width, kept = max(PASS_TOKENS // rows, 1), self.mask.shape[1] - new
        for start in range(0, new, width):
            end = min(start + width, new)
            yield self._replace(ids=self.ids[:, start:end], mask=self.mask[:, : kept + end])

    def place(self, states: np.ndarray) -> np.ndarray:
        """Return the keys or values of all rows, [N, heads, C, width], padded on the left, from those of the prefix,
        [1, heads, P, width]."""
        _, heads, _, width = states.shape
        found = np.zeros((len(self.kept), heads, max(self.kept), width), dtype=states.dtype)
        for row, count in enumerate(self.kept):
            found[row, :, found.shape[2] - count :] = states[0, :, :count]
        return found


def remainder(prompts: Sequence[Sequence[int]], prefix_length: int) -> Remainder:
    """Return what is left to compute. ``prefix_length`` is the length of every prompt's common beginning, shorter
    than any of them. With 0 all is computed."""
    new = max(map(len, prompts)) - prefix_length
    kept = [max(len(prompt) - new, 0) for prompt in prompts]
    ids, _ = padded_rows([prompt[count:] for prompt, count in zip(prompts, kept, strict=True)], left=True)
    _, mask = padded_rows(prompts, left=True)
    return Remainder(ids, mask, kept)
