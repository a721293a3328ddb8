"""Define a load test's requests and their times: independent arrivals at a rate, whatever the server answers.

WORDS also make up the texts that stand for the expected ones when an engine starts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from pydantic import Field

from upshift.value import Value

WORDS = ("time", "model", "memory", "paper", "number", "light", "water", "question", "answer", "step", "layer", "place")


class Traffic(Value):
    """The load of a test: each of the ``rates`` (requests per second) for ``seconds``, one rate after the other."""

    rates: tuple[float, ...] = (1.0,)
    seconds: float = Field(30.0, gt=0)
    prompts: tuple[str, ...] = ()
    prompt_words: int = Field(64, gt=0, description="mean words of random prompts, used without ``prompts``")
    max_tokens: int = Field(64, gt=0)
    seed: int = 0


class Arrival(NamedTuple):
    """A request to send. ``due`` is in seconds after the start."""

    due: float
    prompt: str


def arrivals(traffic: Traffic, rate: float) -> Iterator[Arrival]:
    """Yield the arrivals of a Poisson process. The same seed gives every server the same load."""
    generator = random.Random(f"{traffic.seed}/{rate}")
    due = 0.0
    while (due := due + generator.expovariate(rate)) < traffic.seconds:
        if traffic.prompts:
            yield Arrival(due, generator.choice(traffic.prompts))
        else:
            yield Arrival(due, _random_prompt(generator, traffic.prompt_words))


def _random_prompt(generator: random.Random, mean_words: int) -> str:
    """Return a prompt with half to one and a half times ``mean_words`` words."""
    num_words = max(round(mean_words * generator.uniform(0.5, 1.5)), 1)
    return " ".join(generator.choice(WORDS) for _ in range(num_words))
