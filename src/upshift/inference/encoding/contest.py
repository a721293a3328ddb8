"""Run one contestant of an encoding race, in the process of its engine."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import transformers.modeling_utils  # noqa: F401  once for all engines

from upshift.inference.encoding.engines.base import by_length
from upshift.inference.encoding.model_config import Recipe
from upshift.inference.encoding.run import Encoding
from upshift.inference.race.early_stopping import Standing, contend
from upshift.inference.race.types import Entrants, Run, Runs, cosines
from upshift.inference.registry import EngineSetup
from upshift.record import Spread

ROUNDS, ENOUGH_SECONDS = 5, 3.0  # repetitions, and seconds after which no further one is begun


def run(entrants: Entrants, setup: EngineSetup, standing: Standing) -> list[Run]:
    contest, sample = entrants.contest, json.loads(entrants.sample.read_text())
    recipe = Recipe.from_json(contest.asked, origin="the race")
    start = time.perf_counter()
    encoding = Encoding(contest.source, recipe, setup, sample, pad=contest.pad)
    encoding.rows(sample[:8])
    load = time.perf_counter() - start
    runs: list[Run] = []
    for budget in contest.batches:
        if not entrants.reference.is_file():  # of each text alone, whatever the batches that are raced
            encoding.setup = setup.changed(batch=1)
            np.save(entrants.reference, encoding.rows(sample))
        encoding.setup = setup.changed(batch=budget)
        computed, start = time.process_time(), time.perf_counter()
        found = encoding.rows(sample)
        computed, seconds = time.process_time() - computed, time.perf_counter() - start
        expected = np.load(entrants.reference)
        agree = cosines(found, expected)
        one = Run(
            setup=encoding.setup, load_seconds=load, largest_difference=float(np.abs(found - expected).max(initial=0.0)),
            worst_cosine=float(agree.min(initial=1.0)), median_cosine=float(np.median(agree)) if len(agree) else 1.0,
        )  # fmt: skip
        rounds = [_round(encoding, sample) if setup.hint == "latency" else [seconds]]
        share = computed / (seconds * setup.threads)
        stopped = standing.stopped(_timed(one, rounds, len(sample)), share)
        if stopped == "behind":  # kernels for shapes that are met first: OpenVINO's first pass took twice its second
            rounds = [_round(encoding, sample)]
            stopped = standing.stopped(_timed(one, rounds, len(sample)), share)
        enough = 0.0 if stopped else ENOUGH_SECONDS / len(contest.batches)
        if rounds == [[seconds]] and seconds < enough:  # the first pass met all shapes, and is no measure beside others
            rounds = []
        while len(rounds) < ROUNDS and sum(map(sum, rounds)) < enough:
            rounds.append(_round(encoding, sample))
        runs.append(_timed(one, rounds, len(sample)).changed(stopped=stopped))
        if stopped is not None:
            break
    return runs


def _round(encoding: Encoding, sample: list[list[int]]) -> list[float]:
    """Return the seconds of the whole sample at once, or of each batch alone, as for a user who waits for it."""
    parts, setup = [sample], encoding.setup
    if setup.hint == "latency":
        parts = [[sample[place] for place in places] for places in by_length([len(row) for row in sample], setup.batch)]
    return [_seconds(encoding, part) for part in parts]


def _seconds(encoding: Encoding, part: list[list[int]]) -> float:
    start = time.perf_counter()
    encoding.rows(part)
    return time.perf_counter() - start


def _timed(run: Run, rounds: list[list[float]], texts: int) -> Run:
    spread = Spread.of([sum(one) for one in rounds])
    slowest = max(median(times) for times in zip(*rounds, strict=True)) if run.setup.hint == "latency" else None
    return run.changed(seconds=spread, per_second=texts / spread.p50, first_seconds=slowest)


def main(path: Path, answer: Callable[[Runs], None]) -> None:
    contend(path, answer, run)
