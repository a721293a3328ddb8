"""One contestant of a race that encodes, of one engine's process."""

from __future__ import annotations

import json
import time
from statistics import median

import numpy as np

from upshift.inference.agreement import cosines
from upshift.inference.encoding.batches import by_length
from upshift.inference.encoding.encoding import Encoding
from upshift.inference.encoding.recipe import Recipe
from upshift.inference.race import Entrants, Run, answer
from upshift.inference.setup import EngineSetup
from upshift.record import Spread

ROUNDS, ENOUGH_SECONDS = 5, 3.0  # repetitions, and seconds after which no further one is begun


def run(entrants: Entrants, setup: EngineSetup) -> list[Run]:
    contest, sample = entrants.contest, json.loads(entrants.sample.read_text())
    recipe = Recipe.from_json(contest.asked, origin="the race")
    start = time.perf_counter()
    encoding = Encoding(contest.source, recipe, setup, sample, pad=contest.pad)
    encoding.rows(sample[:8])
    load = time.perf_counter() - start
    found = encoding.rows(sample)
    if not entrants.reference.is_file():
        np.save(entrants.reference, found)
    expected = np.load(entrants.reference)
    agree = cosines(found, expected)
    one = Run(
        setup=setup, load_seconds=load, largest_difference=float(np.abs(found - expected).max(initial=0.0)),
        worst_cosine=float(agree.min(initial=1.0)), median_cosine=float(np.median(agree)) if len(agree) else 1.0,
    )  # fmt: skip
    runs = []
    for budget in contest.batches:
        encoding.setup = setup.changed(batch=budget)
        timed = _together if contest.hint == "throughput" else _one_by_one
        runs.append(timed(one.changed(setup=encoding.setup), encoding, sample, ENOUGH_SECONDS / len(contest.batches)))
    return runs


def _together(run: Run, encoding: Encoding, sample: list[list[int]], enough: float) -> Run:
    encoding.rows(sample)
    seconds: list[float] = []
    while len(seconds) < ROUNDS and sum(seconds) < enough:
        seconds.append(_seconds(encoding, sample))
    spread = Spread.of(seconds, num_warmup=1)
    return run.changed(seconds=spread, per_second=len(sample) / spread.p50)


def _one_by_one(run: Run, encoding: Encoding, sample: list[list[int]], enough: float) -> Run:
    """Each batch alone, as a user who waits for it does."""
    batches = [[sample[place] for place in places] for places in by_length([len(row) for row in sample], run.setup.batch)]
    rounds: list[list[float]] = []
    for batch in batches:
        encoding.rows(batch)
    while len(rounds) < ROUNDS and sum(map(sum, rounds)) < enough:
        rounds.append([_seconds(encoding, batch) for batch in batches])
    spread = Spread.of([sum(one) for one in rounds], num_warmup=1)
    slowest = max(median(times) for times in zip(*rounds, strict=True))
    return run.changed(seconds=spread, per_second=len(sample) / spread.p50, first_seconds=slowest)


def _seconds(encoding: Encoding, sample: list[list[int]]) -> float:
    start = time.perf_counter()
    encoding.rows(sample)
    return time.perf_counter() - start


if __name__ == "__main__":
    answer(run)
