"""Run one contestant of a generation race. It follows the texts that the reference chose, so that every contestant
computes the same logits, and is timed at that.

Define the task of a contestant in a generation race.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import cycle, islice
from math import log2
from pathlib import Path
from statistics import median
from typing import NamedTuple, Self

import numpy as np
import transformers.modeling_utils  # noqa: F401  once for all engines

from upshift.errors import JobFailed
from upshift.inference.generation.engines.base import Decoder, DecoderBuild
from upshift.inference.generation.options import GenerationOptions
from upshift.inference.race.early_stopping import ALONE, Standing, contend
from upshift.inference.race.types import Entrants, Run, Runs, cosines
from upshift.inference.registry import EngineSetup, build_engine
from upshift.inference.weights import engine_folder
from upshift.record import Spread
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


FOLLOWED = 16  # tokens of each prompt
TIMED, ENOUGH_SECONDS = 3, 2.5  # passes, and seconds after which no further one is begun


class Pass(NamedTuple):
    logits: np.ndarray  # [tokens, N, V]
    first_seconds: float
    step_seconds: list[float]
    cpu_seconds: float

    @property
    def seconds(self) -> float:
        return self.first_seconds + sum(self.step_seconds)


def run(entrants: Entrants, setup: EngineSetup, standing: Standing) -> list[Run]:
    contest, sample = entrants.contest, json.loads(entrants.sample.read_text())
    task = GenerationTask.from_json(contest.asked, origin="the race")
    followed = min(task.new_tokens, FOLLOWED)
    start = time.perf_counter()
    folder = engine_folder(contest.task, contest.source, setup.engine)
    most = setup.changed(batch=max(contest.batches))  # what compiles does so for several rows, too
    decoder: Decoder = build_engine(contest.task, setup.engine, DecoderBuild(contest.source, most, folder))
    load = time.perf_counter() - start
    if entrants.reference.is_file():
        expected = np.load(entrants.reference)
        first = _follow(decoder, sample, expected.argmax(2), followed)
    else:
        first = _follow(decoder, sample, None, followed)
        expected = first.logits
        np.save(entrants.reference, expected)
    one = _agreeing(Run(setup=setup, load_seconds=load, weight_bytes=decoder.weight_bytes), first.logits, expected)
    alone = _timed(one.changed(setup=setup.changed(batch=len(sample))), [first], task.new_tokens)
    share = first.cpu_seconds / (first.seconds * setup.threads)
    stopped = standing.stopped(alone, share)
    if stopped is not None:
        return [alone.changed(stopped=stopped)]
    runs: list[Run] = []
    for rows in contest.batches:
        if runs and standing.late:
            return [*runs[:-1], runs[-1].changed(stopped="time")]
        places = list(islice(cycle(range(len(sample))), rows))
        larger = rows < contest.batches[-1] and not entrants.limited  # batches to come are timed; this one told who is behind
        known = first if rows == len(sample) and (larger or first.seconds > ENOUGH_SECONDS) and share >= ALONE else None
        passes = _passes(decoder, [sample[place] for place in places], expected.argmax(2)[:, places], known)
        runs.append(_timed(one.changed(setup=setup.changed(batch=rows)), passes, task.new_tokens))
    return runs


def _agreeing(run: Run, found: np.ndarray, expected: np.ndarray) -> Run:
    """Return the run with the agreement of its logits, [tokens, N, V], with those of the reference."""
    width = expected.shape[-1]
    agree = cosines(found.reshape(-1, width), expected.reshape(-1, width))
    return run.changed(
        largest_difference=float(np.abs(found - expected).max() / max(float(np.abs(expected).max()), 1.0)),
        worst_cosine=float(agree.min()), median_cosine=float(np.median(agree)),
        same_tokens=float((found.argmax(2) == expected.argmax(2)).mean()),
    )  # fmt: skip


def _follow(decoder: Decoder, prompts: list[list[int]], tokens: np.ndarray | None, count: int) -> Pass:
    """Run one pass over ``tokens`` [count, N]. None: generate the likeliest tokens."""
    decoder.keep([])
    computed, start = time.process_time(), time.perf_counter()
    logits = [decoder.admit(prompts)]
    ends = [time.perf_counter()]
    for place in range(count - 1):
        logits.append(decoder.step(logits[-1].argmax(1) if tokens is None else tokens[place]))
        ends.append(time.perf_counter())
    computed = time.process_time() - computed
    found = np.stack(logits)
    if np.isnan(found).any():
        raise JobFailed("its logits are not numbers")
    return Pass(found, ends[0] - start, list(np.diff(ends)), computed)


def _passes(decoder: Decoder, prompts: list[list[int]], tokens: np.ndarray, known: Pass | None) -> list[Pass]:
    """Run the timed passes. ``known`` is a pass that took so long that no other is worth its time."""
    passes = [] if known is None else [known]
    while known is None and len(passes) < TIMED and sum(one.seconds for one in passes) < ENOUGH_SECONDS:
        passes.append(_follow(decoder, prompts, tokens, len(tokens)))
    return passes


def _timed(run: Run, passes: list[Pass], new_tokens: int) -> Run:
    """Return the run with the seconds of all requested tokens. A step counts as long as the median of those that ran."""
    steps = [median(one.step_seconds or [0.0]) for one in passes]
    seconds = [one.first_seconds + step * (new_tokens - 1) for one, step in zip(passes, steps, strict=True)]
    spread = Spread.of(seconds, num_warmup=1)
    return run.changed(
        seconds=spread, per_second=run.setup.batch * new_tokens / spread.p50,
        first_seconds=median(one.first_seconds for one in passes), step_seconds=median(steps),
    )  # fmt: skip


def main(path: Path, answer: Callable[[Runs], None]) -> None:
    contend(path, answer, run)
