"""One command of upshift, and what it answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Answer(NamedTuple):
    code: int
    out: str
    err: str


Command = Callable[..., Answer]  # of the arguments, as a shell would give them
