"""Measure what an engine can promise, on prompts like the expected ones, before the first request comes."""

from __future__ import annotations

import random
import time
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from upshift.errors import EngineFailed, JobFailed, NothingFits
from upshift.inference.generation.generator import Generator
from upshift.inference.generation.options import GenerationOptions
from upshift.inference.generation.prefix import PASS_TOKENS
from upshift.inference.generation.prompts import check_prompts, read_prompts
from upshift.inference.generation.sequence import GeneratedSequence
from upshift.serving.engine.admission import Ticket
from upshift.serving.engine.scheduler import PROMPT_CHUNK_TOKENS, Scheduler
from upshift.serving.engine.tokenization import check_token_ids
from upshift.serving.messages import EngineRequest

FILE_PROMPTS = 64  # that are read of the user's file of expected prompts
FULL_STEPS = 12  # steps with all rows used; every third one after a row was exchanged
WARMUP_TOKENS = 20  # of an answer at most


class JoinTiming(NamedTuple):
    """The time of a request that joins other rows."""

    prompt_tokens: int
    passes: int  # in which the other rows got a token
    seconds: float


class PassTimes(NamedTuple):
    """The seconds of one prompt that runs alone, of one prompt token beside other rows, and of a step of all rows."""

    first_token: float
    prompt_token: float
    step: float


def expected_prompts(generator: Generator, request: EngineRequest, prompt_length: int, output_length: int) -> list[list[int]]:
    """Return token ids of prompts like the expected ones, at least as many as may run at once.

    Each prompt is cut to the positions that the model has. Random prompts all differ, because a shared beginning
    would be computed only once."""
    random_ids = random.Random(0)
    vocabulary = min(len(generator.prompts.tokenizer), generator.vocabulary)
    prompts: list[list[int]] = []
    if request.prompts is not None:
        path = Path(request.prompts)
        check_prompts(path, "--prompts")
        prompts = generator.prompts.tokenize(list(islice(read_prompts(path), FILE_PROMPTS)))
        for ids in prompts:
            check_token_ids(ids, generator.vocabulary)
    lengths = [len(prompt) for prompt in prompts] or [prompt_length]
    for index in range(len(prompts), request.concurrency):
        length = lengths[index % len(lengths)]
        prompts.append([random_ids.randrange(vocabulary) for _ in range(length)])
    max_length = None
    if generator.longest is not None:
        max_length = max(generator.longest - max(output_length, WARMUP_TOKENS), 1)
    return [prompt[:max_length] for prompt in prompts]


def rows_that_fit(rows: int, cache_tokens: int | None, prompts: list[list[int]]) -> int:
    """Return how many sequences of the warm-up the cache holds, at most ``rows``. Raise NothingFits if it holds none.

    ``cache_tokens`` is the capacity of the cache for all sequences together. None is unknown, and sets no limit."""
    if cache_tokens is None:
        return rows
    longest = max(map(len, prompts))
    fitting_rows = min(rows, cache_tokens // (longest + WARMUP_TOKENS))
    if fitting_rows < 1:
        raise NothingFits(
            f"the cache holds {cache_tokens:,} tokens, and one expected prompt of {longest:,} tokens with the first "
            f"{WARMUP_TOKENS} of its answer takes more; give a shorter --prompt-length or shorter --prompts, fewer --replicas, "
            "or more --max-memory"
        )
    return fitting_rows


def measure_passes(scheduler: Scheduler, prompts: list[list[int]], tokenizer: Any, rows: int) -> PassTimes:
    """Measure an engine's passes.

    Each time is measured after a pass that warms up. A request that joins costs the time of its prompt. It also costs the
    time to move the rows into one batch, which the step after it may take."""
    run = WarmupRun(scheduler, prompts, tokenizer)
    scheduler.chunk_tokens = PASS_TOKENS  # the warm-up may delay running answers
    first_token_seconds: list[float] = []
    step_seconds: list[float] = []
    join_timings: list[JoinTiming] = []
    for _ in range(2):
        run.add_prompts(1)
        first_token_seconds.append(run.time_passes(0)[1])
        run.keep_rows([])
    prompt_tokens = run.add_prompts(rows)
    batch_token_seconds = run.time_passes(0)[1] / prompt_tokens
    for number in range(FULL_STEPS):
        if number % 3 == 0 and scheduler.decoder.joins:
            run.keep_rows(list(range(1, rows)))
            prompt_tokens = run.add_prompts(1)
            join_timings.append(JoinTiming(prompt_tokens, *run.time_passes(0 if scheduler.decoder.mixes else 1)))
        else:
            step_seconds.append(run.time_passes(1)[1])
    run.keep_rows([])
    scheduler.chunk_tokens = PROMPT_CHUNK_TOKENS
    step = median(step_seconds)
    token = batch_token_seconds
    if join_timings:
        token = median((timing.seconds - timing.passes * step) / timing.prompt_tokens for timing in join_timings)
    return PassTimes(first_token_seconds[-1], max(token, 0.0), step)


class WarmupRun:
    """A scheduler that runs prompts for the measurement."""

    def __init__(self, scheduler: Scheduler, prompts: list[list[int]], tokenizer: Any) -> None:
        self._scheduler = scheduler
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._options = GenerationOptions(max_new_tokens=WARMUP_TOKENS)

    def add_prompts(self, count: int) -> int:
        """Add ``count`` prompts to the waiting requests. Return the number of their tokens."""
        prompts = self._prompts[:count]
        for prompt in prompts:
            sequence = GeneratedSequence(0, prompt, self._options, self._tokenizer)
            self._scheduler.waiting.append(Ticket(-1, sequence, time.perf_counter()))
        return sum(map(len, prompts))

    def keep_rows(self, rows: list[int]) -> None:
        """Keep only these rows."""
        self._scheduler.decoder.keep(rows)
        self._scheduler.live = [self._scheduler.live[row] for row in rows]

    def time_passes(self, steps: int) -> tuple[int, float]:
        """Run passes until every request has a token, and ``steps`` steps more.

        Return the number of passes in which the other rows got a token, and the seconds."""
        start = time.perf_counter()
        passes = 0
        while self._scheduler.is_prefilling:
            self._run_pass()
            passes += self._scheduler.decoder.mixes
        for _ in range(steps):
            self._run_pass()
        return passes + steps, time.perf_counter() - start

    def _run_pass(self) -> None:
        """Run one pass. Raise the first error at which a prompt or the engine failed: another start would fail at it, too."""
        try:
            self._scheduler.step()
        except EngineFailed as error:
            raise error.__cause__ or JobFailed(str(error)) from None
        if self._scheduler.failed:
            raise self._scheduler.failed[0][1]
