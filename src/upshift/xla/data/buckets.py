"""Plan the widths that batches are padded to. Few are good, as each one is a program to compile. Many are good, as
padding is computed like tokens.

The widths come from the lengths of the data: those with the least cost over the run, counted in steps of full width."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Sequence

from upshift.value import Value

MULTIPLE = 32  # of widths: whole tiles of a TPU's vector unit are 8 x 128, and the guide's rule is 32 or 64
MAX_BUCKETS = 8
COMPILE_STEPS = 20.0  # a compilation costs as much as so many steps: 6.8 s against 0.30 s (30 M parameters, one CPU core)
SAMPLE_BATCHES = 512


class Buckets(Value):
    """The planned widths. ``widths`` rise, and the last is the longest that a batch may have. ``padded_share`` is the
    expected share of padding among the computed tokens."""

    widths: tuple[int, ...]
    padded_share: float

    def width_of(self, length: int) -> int:
        """Return the narrowest width that holds the length."""
        return self.widths[bisect_left(self.widths, length)]


def plan_buckets(
    lengths: Sequence[int], counts: Sequence[int], *, longest: int, batch_size: int, num_steps: int, multiple: int = MULTIPLE
) -> Buckets:
    """Return the planned widths. ``lengths`` with their ``counts`` are those of the data's sequences. A batch is as
    wide as its longest sequence needs."""
    drawn = random.Random(0).choices(lengths, weights=counts, k=SAMPLE_BATCHES * batch_size)
    batches = [drawn[start : start + batch_size] for start in range(0, len(drawn), batch_size)]
    needed = sorted(max(batch) for batch in batches)
    candidates = sorted({min(_up(length, multiple), _up(longest, multiple)) for length in (*needed, longest)})
    widths = _cheapest(candidates, needed, num_steps)
    computed = sum(widths[bisect_left(widths, max(batch))] * batch_size for batch in batches)
    return Buckets(widths=tuple(widths), padded_share=1 - sum(drawn) / computed)


def _up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _cheapest(candidates: list[int], needed: list[int], num_steps: int) -> list[int]:
    """Return the cheapest of all choices of at most MAX_BUCKETS widths that have the last one: a shortest path, width
    by width."""
    full = candidates[-1]
    below = [bisect_left(needed, width + 1) for width in candidates]  # batches that a width holds

    def cost(width: int, first: int, last: int) -> float:
        return COMPILE_STEPS + (last - first) / len(needed) * num_steps * width / full

    best: dict[tuple[int, int], tuple[float, list[int]]] = {}  # (last width, number of widths)
    for place, width in enumerate(candidates):
        best[place, 1] = cost(width, 0, below[place]), [width]
        for count in range(2, MAX_BUCKETS + 1):
            before = [
                (best[other, count - 1][0] + cost(width, below[other], below[place]), best[other, count - 1][1])
                for other in range(place)
                if (other, count - 1) in best
            ]
            if before:
                spent, widths = min(before)
                best[place, count] = spent, [*widths, width]
    last = len(candidates) - 1
    return min(best[last, count] for count in range(1, MAX_BUCKETS + 1) if (last, count) in best)[1]
