"""What a contestant of a race that generates is asked."""

from __future__ import annotations

from math import log2
from typing import Self

from upshift.inference.generation.options import GenerationOptions
from upshift.value import Value


class GenerationTask(Value):
    """``new_tokens``: asked of every prompt, as a power of two, so that a race serves all that are alike; of the two powers
    around the number the lower one where the model has no positions for the other."""

    new_tokens: int

    @classmethod
    def of(cls, options: GenerationOptions, most: int | None = None) -> Self:
        power = 2 ** round(log2(options.max_new_tokens))
        return cls(new_tokens=power if most is None or power <= most else power // 2)
