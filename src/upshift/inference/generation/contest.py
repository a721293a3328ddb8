"""One contestant of a race that generates: it follows the texts that the reference chose, so that every
contestant computes the same logits, and is timed at that."""

from __future__ import annotations

import json
import time
from itertools import cycle, islice
from statistics import median
from typing import NamedTuple

import numpy as np

from upshift.inference.agreement import cosines
from upshift.inference.engines import build_engine
from upshift.inference.generation.engines.decoder import Decoder, DecoderBuild
from upshift.inference.generation.task import GenerationTask
from upshift.inference.race import Entrants, Run, answer
from upshift.inference.setup import EngineSetup
from upshift.inference.weights import engine_folder
from upshift.record import Spread

FOLLOWED = 16  # tokens of each prompt
TIMED, ENOUGH_SECONDS = 3, 4.0  # passes, and seconds after which no further one is begun


class Pass(NamedTuple):
    logits: np.ndarray  # [tokens, N, V]
    first_seconds: float
    step_seconds: list[float]

    @property
    def seconds(self) -> float:
        return self.first_seconds + sum(self.step_seconds)


def run(entrants: Entrants, setup: EngineSetup) -> Run:
    contest, sample = entrants.contest, json.loads(entrants.sample.read_text())
    task = GenerationTask.from_json(contest.asked, origin="the race")
    followed = min(task.new_tokens, FOLLOWED)
    start = time.perf_counter()
    folder = engine_folder(contest.task, contest.source, setup.engine)
    decoder: Decoder = build_engine(contest.task, setup.engine, DecoderBuild(contest.source, setup, folder))
    load = time.perf_counter() - start
    if entrants.reference.is_file():
        expected = np.load(entrants.reference)
        first = _follow(decoder, sample, expected.argmax(2), followed)
    else:
        first = _follow(decoder, sample, None, followed)
        expected = first.logits
        np.save(entrants.reference, expected)
    tokens, found = expected.argmax(2), first.logits
    best: tuple[float, int, Spread, float] | None = None
    for rows in contest.batches:
        places = list(islice(cycle(range(len(sample))), rows))
        known = first if rows == len(sample) and first.seconds > ENOUGH_SECONDS else None
        seconds, step = _timed(decoder, [sample[place] for place in places], tokens[:, places], task.new_tokens, known)
        per_second = rows * task.new_tokens / seconds.p50
        if best is None or per_second > best[0]:
            best = (per_second, rows, seconds, step)
    assert best is not None
    difference = float(np.abs(found - expected).max() / max(float(np.abs(expected).max()), 1.0))
    width = expected.shape[-1]
    agree = cosines(found.reshape(-1, width), expected.reshape(-1, width))
    return Run(
        setup=setup.changed(batch=best[1]), load_seconds=load, seconds=best[2], per_second=best[0],
        step_seconds=best[3], weight_bytes=decoder.weight_bytes, largest_difference=difference,
        worst_cosine=float(agree.min()), median_cosine=float(np.median(agree)),
        same_tokens=float((found.argmax(2) == tokens).mean()),
    )  # fmt: skip


def _follow(decoder: Decoder, prompts: list[list[int]], tokens: np.ndarray | None, count: int) -> Pass:
    """tokens [count, N]: what is generated; None: the likeliest."""
    decoder.keep([])
    start = time.perf_counter()
    logits = [decoder.admit(prompts)]
    ends = [time.perf_counter()]
    for place in range(count - 1):
        logits.append(decoder.step(logits[-1].argmax(1) if tokens is None else tokens[place]))
        ends.append(time.perf_counter())
    return Pass(np.stack(logits), ends[0] - start, list(np.diff(ends)))


def _timed(
    decoder: Decoder, prompts: list[list[int]], tokens: np.ndarray, new_tokens: int, known: Pass | None
) -> tuple[Spread, float]:
    """Seconds of all tokens that are asked, a step taken for as long as the median of those that ran, and that of a step.
    ``known``: a pass that took so long that no other is worth its time."""
    passes = [] if known is None else [known]
    while known is None and len(passes) < TIMED and sum(one.seconds for one in passes) < ENOUGH_SECONDS:
        passes.append(_follow(decoder, prompts, tokens, len(tokens)))
    steps = [median(one.step_seconds or [0.0]) for one in passes]
    seconds = [one.first_seconds + step * (new_tokens - 1) for one, step in zip(passes, steps, strict=True)]
    return Spread.of(seconds, num_warmup=0 if known else 1), median(steps)


if __name__ == "__main__":
    answer(run)
