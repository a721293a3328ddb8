"""One contestant of a race that encodes, of one engine's process."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import transformers.modeling_utils  # noqa: F401  once for all engines

from upshift.inference.agreement import cosines
from upshift.inference.contestant import Entrants, Run, Runs, contend
from upshift.inference.encoding.batches import by_length
from upshift.inference.encoding.encoding import Encoding
from upshift.inference.encoding.recipe import Recipe
from upshift.inference.setup import EngineSetup, Hint
from upshift.record import Spread

ROUNDS, ENOUGH_SECONDS = 5, 3.0  # repetitions, and seconds after which no further one is begun


def run(entrants: Entrants, setup: EngineSetup) -> list[Run]:
    contest, sample = entrants.contest, json.loads(entrants.sample.read_text())
    recipe = Recipe.from_json(contest.asked, origin="the race")
    start = time.perf_counter()
    encoding = Encoding(contest.source, recipe, setup, sample, pad=contest.pad)
    encoding.rows(sample[:8])
    load = time.perf_counter() - start
    runs = []
    for budget in contest.batches:
        encoding.setup = setup.changed(batch=budget)
        found = encoding.rows(sample)  # once before it is timed
        if not entrants.reference.is_file():
            np.save(entrants.reference, found)
        expected = np.load(entrants.reference)
        agree = cosines(found, expected)
        one = Run(
            setup=encoding.setup, load_seconds=load, largest_difference=float(np.abs(found - expected).max(initial=0.0)),
            worst_cosine=float(agree.min(initial=1.0)), median_cosine=float(np.median(agree)) if len(agree) else 1.0,
        )  # fmt: skip
        runs.append(_timed(one, encoding, sample, contest.hint, ENOUGH_SECONDS / len(contest.batches)))
    return runs


def _timed(run: Run, encoding: Encoding, sample: list[list[int]], hint: Hint, enough: float) -> Run:
    """All at once; or each batch alone, as a user who waits for it does."""
    parts = [sample]
    if hint == "latency":
        parts = [[sample[place] for place in places] for places in by_length([len(row) for row in sample], run.setup.batch)]
    rounds: list[list[float]] = []
    while len(rounds) < ROUNDS and sum(map(sum, rounds)) < enough:
        rounds.append([_seconds(encoding, part) for part in parts])
    spread = Spread.of([sum(one) for one in rounds], num_warmup=1)
    slowest = max(median(times) for times in zip(*rounds, strict=True)) if hint == "latency" else None
    return run.changed(seconds=spread, per_second=len(sample) / spread.p50, first_seconds=slowest)


def _seconds(encoding: Encoding, part: list[list[int]]) -> float:
    start = time.perf_counter()
    encoding.rows(part)
    return time.perf_counter() - start


def main(path: Path, answer: Callable[[Runs], None]) -> None:
    contend(path, answer, run)
