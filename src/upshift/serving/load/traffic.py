"""What is asked, and when: independent arrivals at a rate, whatever the server answers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from pydantic import Field

from upshift.serving.made_up import WORDS
from upshift.value import Value


class Traffic(Value):
    """``rates``: requests a second, one after the other, ``seconds`` each."""

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
    """A Poisson process. The same seed gives the same load to whoever is measured."""
    chance, at = random.Random(f"{traffic.seed}/{rate}"), 0.0
    while (at := at + chance.expovariate(rate)) < traffic.seconds:
        yield Arrival(at, chance.choice(traffic.prompts) if traffic.prompts else _made_up(chance, traffic.prompt_words))


def _made_up(chance: random.Random, words: int) -> str:
    """Of different lengths: half to one and a half times as many words."""
    return " ".join(chance.choice(WORDS) for _ in range(max(round(words * chance.uniform(0.5, 1.5)), 1)))
