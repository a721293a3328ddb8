"""Decide which parts of prompts are computed, and in which passes.

A common beginning of several prompts, such as a system prompt, is computed once. Long prompts are computed in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Self

import numpy as np

from upshift.inference.tokenizer import padded_rows

MIN_PREFIX_TOKENS = 32  # to compute fewer tokens again takes no longer than to copy their keys and values
PASS_TOKENS = 8192  # tokens of all rows of one pass, with padding: activations take memory too


def common_prefix(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Return the common beginning of the prompts, or nothing if it is too short.

    The last token of each prompt is never part of it, because the engine computes the first logits from that token."""
    if len(prompts) < 2:
        return []
    first = min(prompts, key=tuple)
    last = max(prompts, key=tuple)  # in lexicographic order: what the first and the last share, all prompts share
    max_length = min(map(len, prompts)) - 1
    length = next((index for index in range(max_length) if first[index] != last[index]), max_length)
    return list(first[:length]) if length >= MIN_PREFIX_TOKENS else []


class Remainder(NamedTuple):
    """The tokens of prompts that are still to be computed after their common prefix.

    All rows end with the same number of new tokens. Shorter rows compute some tokens of the prefix again. So padding stays
    on the left of the cached tokens, as masks of sliding windows and ALiBi need it."""

    ids: np.ndarray  # [N, S]
    mask: np.ndarray  # [N, C + S] of 0 and 1, padded on the left
    prefix_tokens: list[int]  # cached tokens of the prefix that each row uses; the maximum is C

    @property
    def positions(self) -> np.ndarray:
        """Return the positions [N, S] of the new tokens, as transformers counts them."""
        positions: np.ndarray = np.maximum(self.mask.cumsum(1) - 1, 0)[:, -self.ids.shape[1] :]
        return positions

    def chunks(self, next_width: Callable[[], int]) -> Iterator[Self]:
        """Yield the remainder in chunks. Each chunk attends to the chunks before it (chunked prefill: Sarathi, arXiv:2308.16369).

        ``next_width`` returns the number of tokens of the next chunk, and is called before each one."""
        rows, new_tokens = self.ids.shape
        cached_tokens = self.mask.shape[1] - new_tokens
        end = 0
        while end < new_tokens:
            start = end
            end = min(start + max(next_width() // rows, 1), new_tokens)
            yield self._replace(ids=self.ids[:, start:end], mask=self.mask[:, : cached_tokens + end])

    def pad_states(self, states: np.ndarray) -> np.ndarray:
        """Return the prefix's keys or values for all rows, [N, heads, C, width], padded on the left.

        ``states`` are those of the prefix, [1, heads, P, width]."""
        _, heads, _, width = states.shape
        padded = np.zeros((len(self.prefix_tokens), heads, max(self.prefix_tokens), width), dtype=states.dtype)
        for row, count in enumerate(self.prefix_tokens):
            padded[row, :, padded.shape[2] - count :] = states[0, :, :count]
        return padded


def remaining_tokens(prompts: Sequence[Sequence[int]], prefix_length: int) -> Remainder:
    """Return the tokens to compute after the prompts' common prefix, which is shorter than any prompt.

    With a ``prefix_length`` of 0, return all tokens."""
    new_tokens = max(map(len, prompts)) - prefix_length
    prefix_tokens = [max(len(prompt) - new_tokens, 0) for prompt in prompts]
    ids, _ = padded_rows([prompt[count:] for prompt, count in zip(prompts, prefix_tokens, strict=True)], left=True)
    _, mask = padded_rows(prompts, left=True)
    return Remainder(ids, mask, prefix_tokens)
