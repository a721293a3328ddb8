"""Decode with prompt lookup: guess that what followed the same words before follows them again, and check the guess
in one pass.

Saxena 2023 (github.com/apoorvumang/prompt-lookup-decoding); transformers' name for it is
``prompt_lookup_num_tokens``. A token is chosen from the logits that a step of its own would give, so the text is the
same, sampled or not. One sequence runs at once: the rows of several would be of different lengths after each pass.
Whether guessing pays is measured while it runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LONGEST_MATCH = 3  # tokens that must have been there before; of fewer, down to one, where no longer ones were
TRIALS = 8  # passes with a guess, before it is judged
AGAIN = 64  # passes without guesses, after which they are tried again: texts change


class Lookup:
    """The guesses of one sequence. ``count`` is the most tokens of a guess."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._step, self._guessed = Rate(), Rate()
        self._resting = 0

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return the tokens that may follow, or nothing if nothing is known or guessing does not pay."""
        if self._resting or not self._step.passes:  # a pass without one comes first, to compare with
            self._resting = max(self._resting - 1, 0)
            return []
        if self._guessed.passes >= TRIALS and self._guessed.per_second < self._step.per_second:
            self._guessed, self._resting = Rate(), AGAIN
            return []
        return continuation(tokens, min(self._count, most))

    def add(self, tokens: int, seconds: float, *, guessed: bool) -> None:
        """Record a pass that gave ``tokens`` tokens."""
        (self._guessed if guessed else self._step).add(tokens, seconds)


class Rate:
    def __init__(self) -> None:
        self.passes, self._tokens, self._seconds = 0, 0, 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self.passes += 1
        self._tokens += tokens
        self._seconds += seconds

    @property
    def per_second(self) -> float:
        return self._tokens / max(self._seconds, 1e-9)


def continuation(tokens: Sequence[int], most: int) -> list[int]:
    """Return what followed the last tokens at their previous place. The longest match comes first."""
    text = np.asarray(tokens)
    for length in range(min(LONGEST_MATCH, len(text) - 1), 0, -1):
        windows = np.lib.stride_tricks.sliding_window_view(text[:-1], length)
        places = np.flatnonzero((windows == text[-length:]).all(1))
        if len(places) and most > 0:
            start = int(places[-1]) + length
            return [int(token) for token in text[start : start + most]]
    return []
