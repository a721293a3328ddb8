"""Define the task of a contestant in a generation race."""

from __future__ import annotations

from math import log2
from typing import Self

from upshift.inference.generation.options import GenerationOptions
from upshift.value import Value


class GenerationTask(Value):
    """The task of a race. ``new_tokens`` is the length of every answer, as a power of two, so that a race serves all
    that are alike. If the model has no positions for the nearest power, it is the lower of the two around the number.
    """

    new_tokens: int

    @classmethod
    def of(cls, options: GenerationOptions, most: int | None = None) -> Self:
        power = 2 ** round(log2(options.max_new_tokens))
        return cls(new_tokens=power if most is None or power <= most else power // 2)
