"""How long a request that comes now would wait for its first token: by what the engine's own passes took.

Passes are measured as they run: prompts by their tokens, steps by their rows. The estimate is then held against what came true:
the factor by which nine in ten admitted requests would have been promised right is what the next estimate is multiplied with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Listed

MEMORY = 0.9  # of what was known, when a pass more is measured
KEPT = 64  # requests that the factor is taken from
SURE = 0.9  # of them, that the estimate is to hold for
LEAST_FACTOR, MOST_FACTOR = 0.5, 4.0


class Pace:
    def __init__(self, *, token_seconds: float, step_seconds: float, output_length: float) -> None:
        """``token_seconds``: of a prompt's token; ``step_seconds``: one token more of all rows; ``output_length``: tokens of an
        answer, all as the race or the proof measured them."""
        self.token_seconds, self.step_seconds, self.output_length = token_seconds, step_seconds, output_length
        self._ratios: deque[float] = deque(maxlen=KEPT)

    def admitted(self, prompt_tokens: int, seconds: float) -> None:
        self.token_seconds = _moved(self.token_seconds, seconds / max(prompt_tokens, 1))

    def stepped(self, seconds: float) -> None:
        self.step_seconds = _moved(self.step_seconds, seconds)

    def ended(self, tokens: int) -> None:
        self.output_length = _moved(self.output_length, tokens)

    def came(self, expected: float, seconds: float) -> None:
        """A first token that was expected so, and when it came."""
        self._ratios.append(seconds / max(expected, 1e-3))

    @property
    def factor(self) -> float:
        if len(self._ratios) < KEPT // 4:
            return 1.0
        ordered = sorted(self._ratios)
        return min(max(ordered[int(SURE * (len(ordered) - 1))], LEAST_FACTOR), MOST_FACTOR)

    def first_token(self, prompt_tokens: int, *, free: int, left: Listed[int], before: Listed[int]) -> float:
        """Seconds, before the factor. ``free``: rows; ``left``: most tokens that each live sequence may still have; ``before``:
        tokens of the prompts that wait already."""
        soon = sorted(min(self._still(), most) for most in left)
        place = len(before) - free  # how many rows must come free before this one's
        waited = 0.0
        if place >= 0:
            rounds, rest = divmod(place, max(len(soon), 1))
            waited = (soon[rest] if soon else 0.0) + rounds * self.output_length
        return waited * self.step_seconds + self.token_seconds * (sum(before) + prompt_tokens) + self.step_seconds / 2

    def _still(self) -> float:
        """Tokens that a live sequence has still to come, in the mean: they are at any place of their answers."""
        return self.output_length / 2


def _moved(known: float, found: float) -> float:
    return MEMORY * known + (1.0 - MEMORY) * found
