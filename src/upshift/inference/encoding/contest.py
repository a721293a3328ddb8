"""Run one setup of an encoding race in the process of its engine."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import transformers.modeling_utils  # noqa: F401  import once for all engines

from upshift.inference.encoding.engines.base import batch_by_length
from upshift.inference.encoding.model_config import EncodingConfig
from upshift.inference.encoding.run import Encoding
from upshift.inference.race.early_stopping import EarlyStopping, serve_race
from upshift.inference.race.types import RaceRequest, RaceResult, Run, with_agreement
from upshift.inference.registry import EngineSetup
from upshift.record import Spread

MAX_ROUNDS = 5  # repetitions over the sample
ENOUGH_SECONDS = 3.0  # of rounds, for all batches together: no further round begins after them


def run_setup(request: RaceRequest, setup: EngineSetup, early_stopping: EarlyStopping) -> list[Run]:
    """Return the runs of one setup, one for each batch, up to the batch with which it is stopped."""
    contest = request.contest
    sample = json.loads(request.sample.read_text())
    config = EncodingConfig.from_json(contest.asked, origin="the race")
    start = time.perf_counter()
    encoding = Encoding(contest.source, config, setup, sample, pad=contest.pad)
    encoding.rows(sample[:8])
    load_seconds = time.perf_counter() - start
    runs: list[Run] = []
    for batch in contest.batches:
        if not request.reference.is_file():  # the reference encodes each text alone, whatever the batches of the race
            encoding.setup = setup.changed(batch=1)
            np.save(request.reference, encoding.rows(sample))
        encoding.setup = setup.changed(batch=batch)
        cpu_start = time.process_time()
        start = time.perf_counter()
        rows = encoding.rows(sample)
        cpu_seconds = time.process_time() - cpu_start
        seconds = time.perf_counter() - start
        run = with_agreement(Run(setup=encoding.setup, load_seconds=load_seconds), rows, np.load(request.reference))
        rounds = [_time_round(encoding, sample) if setup.hint == "latency" else [seconds]]
        cpu_share = cpu_seconds / (seconds * setup.threads)
        stopped = early_stopping.stop(_with_times(run, rounds, len(sample)), cpu_share)
        if stopped == "behind":  # the first pass may have compiled kernels: OpenVINO's took twice as long as its second
            rounds = [_time_round(encoding, sample)]
            stopped = early_stopping.stop(_with_times(run, rounds, len(sample)), cpu_share)
        enough_seconds = 0.0 if stopped else ENOUGH_SECONDS / len(contest.batches)
        if rounds == [[seconds]] and seconds < enough_seconds:  # there is time for rounds without new shapes
            rounds = []
        while len(rounds) < MAX_ROUNDS and sum(map(sum, rounds)) < enough_seconds:
            rounds.append(_time_round(encoding, sample))
        runs.append(_with_times(run, rounds, len(sample)).changed(stopped=stopped))
        if stopped is not None:
            break
    return runs


def _time_round(encoding: Encoding, sample: list[list[int]]) -> list[float]:
    """Return the seconds of the whole sample. Under the hint "latency", return the seconds of each batch alone, as a
    user waits for it."""
    batches = [sample]
    if encoding.setup.hint == "latency":
        lengths = [len(row) for row in sample]
        batches = [[sample[index] for index in indices] for indices in batch_by_length(lengths, encoding.setup.batch)]
    return [_time_batch(encoding, batch) for batch in batches]


def _time_batch(encoding: Encoding, batch: list[list[int]]) -> float:
    start = time.perf_counter()
    encoding.rows(batch)
    return time.perf_counter() - start


def _with_times(run: Run, rounds: list[list[float]], texts: int) -> Run:
    """Return the run with its rate. Under the hint "latency", add the time of the slowest batch."""
    spread = Spread.of([sum(times) for times in rounds])
    slowest_batch = None
    if run.setup.hint == "latency":
        slowest_batch = max(median(times) for times in zip(*rounds, strict=True))
    return run.changed(seconds=spread, per_second=texts / spread.p50, first_seconds=slowest_batch)


def main(path: Path, answer: Callable[[RaceResult], None]) -> None:
    serve_race(path, answer, run_setup)
