"""Define a load test's requests and their times: independent arrivals at a rate, whatever the server answers.

Hold words for made-up texts, which stand for the expected ones before any request comes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from pydantic import Field

from upshift.value import Value

WORDS = ("time", "model", "memory", "paper", "number", "light", "water", "question", "answer", "step", "layer", "place")


class Traffic(Value):
    """The load of a test: each of the ``rates`` (requests a second) for ``seconds``, one rate after the other."""

    rates: tuple[float, ...] = (1.0,)
    seconds: float = Field(30.0, gt=0)
    prompts: tuple[str, ...] = ()
    prompt_words: int = Field(64, gt=0, description="of made-up prompts, where none are given")
    max_tokens: int = Field(64, gt=0)
    seed: int = 0


class Arrival(NamedTuple):
    at: float  # seconds after the start
    prompt: str


def arrivals(traffic: Traffic, rate: float) -> Iterator[Arrival]:
    """Yield the arrivals of a Poisson process. The same seed gives every server the same load."""
    chance, at = random.Random(f"{traffic.seed}/{rate}"), 0.0
    while (at := at + chance.expovariate(rate)) < traffic.seconds:
        yield Arrival(at, chance.choice(traffic.prompts) if traffic.prompts else _made_up(chance, traffic.prompt_words))


def _made_up(chance: random.Random, words: int) -> str:
    """Return a prompt with half to one and a half times as many words as ``words``."""
    return " ".join(chance.choice(WORDS) for _ in range(max(round(words * chance.uniform(0.5, 1.5)), 1)))
