"""Decode with prompt lookup: guess that the tokens that followed the same words before follow them again, and check the
guess in one pass.

Saxena 2023 (github.com/apoorvumang/prompt-lookup-decoding); transformers' name for it is ``prompt_lookup_num_tokens``. Each
token is chosen from the logits that a step of its own would give, so the text is the same, sampled or not. Only one
sequence runs at once: several rows would have different lengths after each pass. Passes with and without guesses are timed, and
guessing pauses while it does not pay off. A smaller model may guess instead (draft.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

MAX_MATCH = 3  # last tokens that are searched in the text; if they do not occur, fewer, down to one
TRIAL_PASSES = 8  # passes with a guess before guessing is judged
PAUSE_PASSES = 64  # passes without guesses before they are tried again, because texts change


Find = Callable[[Sequence[int], int], list[int]]  # returns at most so many tokens that may follow a text


class Lookup:
    """The guesses for one sequence. ``max_guess`` is the maximum number of tokens of a guess, and ``find`` guesses them."""

    def __init__(self, max_guess: int, find: Find | None = None) -> None:
        self._max_guess = max_guess
        self._find: Find = find or find_continuation
        self._step_rate = Rate()
        self._guess_rate = Rate()
        self._pause = 0  # passes that are left without guesses

    def guess(self, tokens: Sequence[int], max_tokens: int) -> list[int]:
        """Return the tokens that may follow, or nothing if there is no match or if guessing does not pay."""
        if self._pause or not self._step_rate.passes:  # the first pass has no guess, to compare with
            self._pause = max(self._pause - 1, 0)
            return []
        if self._guess_rate.passes >= TRIAL_PASSES and self._guess_rate.per_second < self._step_rate.per_second:
            self._guess_rate = Rate()
            self._pause = PAUSE_PASSES
            return []
        return self._find(tokens, min(self._max_guess, max_tokens))

    def add(self, tokens: int, seconds: float, *, guessed: bool) -> None:
        """Record a pass that gave ``tokens`` tokens."""
        rate = self._guess_rate if guessed else self._step_rate
        rate.add(tokens, seconds)


class Rate:
    """The tokens per second of passes of one kind."""

    def __init__(self) -> None:
        self.passes = 0
        self._tokens = 0
        self._seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self.passes += 1
        self._tokens += tokens
        self._seconds += seconds

    @property
    def per_second(self) -> float:
        return self._tokens / max(self._seconds, 1e-9)


def find_continuation(tokens: Sequence[int], max_tokens: int) -> list[int]:
    """Return at most ``max_tokens`` tokens that followed the last tokens where they occurred before.

    The longest match counts, and of several such matches the latest one. Without a match, return nothing."""
    text = np.asarray(tokens)
    for length in range(min(MAX_MATCH, len(text) - 1), 0, -1):
        windows = np.lib.stride_tricks.sliding_window_view(text[:-1], length)
        matches = np.flatnonzero((windows == text[-length:]).all(1))
        if len(matches) and max_tokens > 0:
            start = int(matches[-1]) + length
            return [int(token) for token in text[start : start + max_tokens]]
    return []
