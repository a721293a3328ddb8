"""Measure what an engine can promise, on prompts like the expected ones, before the first request comes."""

from __future__ import annotations

import time
from statistics import median
from typing import Any, NamedTuple

from upshift.inference.generation.options import GenerationOptions
from upshift.inference.generation.prefix import PASS_TOKENS
from upshift.inference.generation.sequence import GeneratedSequence
from upshift.serving.engine.scheduler import PART_TOKENS, Scheduler, Ticket

STEPS = 12  # with all rows filled, every third one after a row was exchanged
PROOF_TOKENS = 20  # of a row at most


class Joined(NamedTuple):
    tokens: int
    passes: int  # that told the other rows a token
    seconds: float


def prove(scheduler: Scheduler, prompts: list[list[int]], tokenizer: Any, rows: int) -> tuple[float, float, float]:
    """Return the seconds of one prompt alone, of a prompt's token beside the other rows, and of a step of all rows.

    Each is measured after a pass that warms up. A joining request costs its prompt, and the moving of rows into one
    batch, which the step behind it may do."""
    run = Run(scheduler, prompts, tokenizer)
    scheduler.part_tokens = PASS_TOKENS  # answers are short here
    alone, steps, joined = list[float](), list[float](), list[Joined]()
    for _ in range(2):
        run.add(1)
        alone.append(run.timed(0)[1])
        run.keep([])
    tokens = run.add(rows)
    together = run.timed(0)[1] / tokens
    for number in range(STEPS):
        if number % 3 == 0 and scheduler.decoder.joins:
            run.keep(list(range(1, rows)))
            tokens = run.add(1)
            joined.append(Joined(tokens, *run.timed(0 if scheduler.decoder.mixes else 1)))
        else:
            steps.append(run.timed(1)[1])
    run.keep([])
    scheduler.part_tokens = PART_TOKENS
    step = median(steps)
    token = median((one.seconds - one.passes * step) / one.tokens for one in joined) if joined else together
    return alone[-1], max(token, 0.0), step


class Run:
    def __init__(self, scheduler: Scheduler, prompts: list[list[int]], tokenizer: Any) -> None:
        self._scheduler, self._prompts, self._tokenizer = scheduler, prompts, tokenizer
        self._options = GenerationOptions(max_new_tokens=PROOF_TOKENS)

    def add(self, count: int) -> int:
        """Add ``count`` prompts to the waiting requests, and return the number of their tokens."""
        for prompt in self._prompts[:count]:
            sequence = GeneratedSequence(0, prompt, self._options, self._tokenizer)
            self._scheduler.waiting.append(Ticket(-1, sequence, time.perf_counter()))
        return sum(map(len, self._prompts[:count]))

    def keep(self, places: list[int]) -> None:
        self._scheduler.decoder.keep(places)
        self._scheduler.live = [self._scheduler.live[place] for place in places]

    def timed(self, steps: int) -> tuple[int, float]:
        """Run until no prompt is left, and ``steps`` steps more. Return the passes that gave all rows a token, and
        the seconds."""
        start, passes = time.perf_counter(), 0
        while self._scheduler.computing:
            self._scheduler.step()
            passes += self._scheduler.decoder.mixes
        for _ in range(steps):
            self._scheduler.step()
        return passes + steps, time.perf_counter() - start
