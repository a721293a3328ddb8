"""Define the bounds that a user sets: how near to the reference an answer must be, and how long it may take."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from upshift.errors import RequestError
from upshift.value import Value

Quality = float | Literal["exact"]


class Limits(Value):
    """The longest times that the user can wait. ``ttft_ms``: until the first token of prompts that are admitted
    together, or until the rows of a batch of texts. ``tpot_ms``: for one more token of each sequence, in the mean."""

    ttft_ms: float | None = Field(None, gt=0)
    tpot_ms: float | None = Field(None, gt=0)

    def __bool__(self) -> bool:
        return self.ttft_ms is not None or self.tpot_ms is not None


def read_quality(text: str) -> Quality:
    """Return ``exact``, or the lowest cosine that is allowed."""
    if text == "exact":
        return "exact"
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= 1.0:
        raise RequestError(f"--quality {text!r} is not possible; use exact, or a cosine such as 0.999 or 0.99")
    return value


def read_limit(name: str, milliseconds: float | None) -> float | None:
    if milliseconds is not None and not 0.0 < milliseconds < math.inf:
        raise RequestError(f"--{name} {milliseconds:g} is not possible; give milliseconds above 0")
    return milliseconds


def read_seconds(seconds: float | None) -> float | None:
    """Return the seconds of a race."""
    if seconds is not None and not 0.0 < seconds < math.inf:
        raise RequestError(f"--race-seconds {seconds:g} is not possible; give seconds above 0")
    return seconds
