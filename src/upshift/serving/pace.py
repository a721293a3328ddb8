"""Estimate how long a new request would wait for its first token, from the times of the engine's own passes.

Passes are measured as they run: prompts by their tokens, steps by their rows. Each estimate is compared with the time
that the request really waited. The next estimate is multiplied by the factor with which nine in ten admitted requests
would have been promised right."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from statistics import fmean

MEMORY = 0.9  # of what was known, when a pass more is measured
KEPT = 64  # requests that the factor, and answers that their length, is taken from
SURE = 0.9  # of them, that the estimate is to hold for
LEAST_FACTOR, MOST_FACTOR = 0.5, 4.0


class Pace:
    def __init__(self, *, token_seconds: float, step_seconds: float, output_length: float) -> None:
        """Start from values that the race or the proof measured. ``token_seconds`` is for one token of a prompt.
        ``step_seconds`` is for one more token of all rows. ``output_length`` is the number of tokens of an answer."""
        self.token_seconds, self.step_seconds = token_seconds, step_seconds
        self._lengths: deque[float] = deque([output_length], maxlen=KEPT)
        self._ratios: deque[float] = deque(maxlen=KEPT)

    def admitted(self, prompt_tokens: int, seconds: float) -> None:
        self.token_seconds = _moved(self.token_seconds, seconds / max(prompt_tokens, 1))

    def stepped(self, seconds: float) -> None:
        self.step_seconds = _moved(self.step_seconds, seconds)

    def ended(self, tokens: int) -> None:
        self._lengths.append(tokens)

    def came(self, expected: float, seconds: float) -> None:
        """Record the expected and the real seconds to a first token."""
        self._ratios.append(seconds / max(expected, 1e-3))

    @property
    def factor(self) -> float:
        if len(self._ratios) < KEPT // 4:
            return 1.0
        ordered = sorted(self._ratios)
        return min(max(ordered[int(SURE * (len(ordered) - 1))], LEAST_FACTOR), MOST_FACTOR)

    def first_token(self, prompt_tokens: int, *, free: int, live: Iterable[tuple[int, int]], before: int) -> float:
        """Return the expected seconds to the first token, before the factor.

        ``prompt_tokens`` are those of this request and of the ``before`` requests that wait already. ``free`` is the
        number of free rows. ``live`` holds, for each sequence, the tokens that it has and the most that it may still
        get."""
        ends, length = [self._still(told, most) for told, most in live], fmean(self._lengths)  # in steps from now
        heapq.heapify(ends)
        waited = 0.0
        for _ in range(free, before + 1):
            waited = ends[0] if ends else 0.0
            heapq.heappushpop(ends, waited + length)
        return waited * self.step_seconds + self.token_seconds * prompt_tokens + self.step_seconds / 2

    def _still(self, told: int, most: int) -> float:
        """Return the steps that a sequence still stays: the mean of the recent answers that were longer than it is
        now."""
        longer = [length for length in self._lengths if length > told]
        return min(fmean(longer) - told if longer else 1.0, most)


def _moved(known: float, found: float) -> float:
    return MEMORY * known + (1.0 - MEMORY) * found
