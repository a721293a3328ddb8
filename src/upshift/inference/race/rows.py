"""Run one setup of a race whose results are rows, such as a vector for each text, image or sound. Time it, and compare its rows
with the reference's."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Protocol, TypeVar

import numpy as np

from upshift.inference.race.early_stopping import EarlyStopping
from upshift.inference.race.types import RaceRequest, Run, with_agreement
from upshift.inference.registry import EngineSetup
from upshift.record import Spread

MAX_ROUNDS = 5  # repetitions over the sample
ENOUGH_SECONDS = 3.0  # for all batches together: no further round begins after this time

Item = TypeVar("Item")


class RowEncoding(Protocol[Item]):
    """A model under one setup."""

    setup: EngineSetup

    def rows(self, items: list[Item], /) -> np.ndarray:
        """Return the rows [N, H] of the items in fp32."""
        ...


Split = Callable[[list[Item], int], list[list[Item]]]  # items into batches of a size


def run_row_setup(
    request: RaceRequest,
    setup: EngineSetup,
    early_stopping: EarlyStopping,
    sample: list[Item],
    *,
    load: Callable[[], RowEncoding[Item]],
    num_first: int,
    split: Split[Item],
) -> list[Run]:
    """Return the runs of one setup, one for each batch, up to the batch with which it is stopped.

    Args:
        request: the race.
        setup: the engine and its precision.
        early_stopping: decides whether the setup may still win.
        sample: the items that every setup computes.
        load: returns the setup's encoding.
        num_first: how many items run before the clock of loading stops.
        split: divides the sample as the encoding does, to time each batch alone under the hint "latency".
    """
    start = time.perf_counter()
    encoding = load()
    encoding.rows(sample[:num_first])
    load_seconds = time.perf_counter() - start
    runs: list[Run] = []
    for batch in request.contest.batches:
        if not request.reference.is_file():  # the reference computes each item alone, whatever the batches of the race
            encoding.setup = setup.changed(batch=1)
            np.save(request.reference, encoding.rows(sample))
        encoding.setup = setup.changed(batch=batch)
        runs.append(_run_batch(request, encoding, early_stopping, sample, load_seconds, split))
        if runs[-1].stopped is not None:
            break
    return runs


def _run_batch(
    request: RaceRequest,
    encoding: RowEncoding[Item],
    early_stopping: EarlyStopping,
    sample: list[Item],
    load_seconds: float,
    split: Split[Item],
) -> Run:
    """Return the run of one batch."""
    setup = encoding.setup
    cpu_start = time.process_time()
    start = time.perf_counter()
    rows = encoding.rows(sample)
    cpu_seconds = time.process_time() - cpu_start
    seconds = time.perf_counter() - start
    expected = np.load(request.reference)
    if setup.engine == "nothing":  # its rows may be narrower
        rows = np.broadcast_to(rows, expected.shape)
    run = with_agreement(Run(setup=setup, load_seconds=load_seconds), rows, expected)
    rounds = [_time_round(encoding, sample, split) if setup.hint == "latency" else [seconds]]
    cpu_share = cpu_seconds / (seconds * setup.threads)
    stopped = early_stopping.stop(_with_times(run, rounds, len(sample)), cpu_share)
    if stopped == "behind":  # the first pass may have compiled kernels: OpenVINO's took twice as long as its second
        rounds = [_time_round(encoding, sample, split)]
        stopped = early_stopping.stop(_with_times(run, rounds, len(sample)), cpu_share)
    enough_seconds = 0.0 if stopped else ENOUGH_SECONDS / len(request.contest.batches)
    if rounds == [[seconds]] and seconds < enough_seconds:  # there is time for rounds without new shapes
        rounds = []
    while len(rounds) < MAX_ROUNDS and sum(map(sum, rounds)) < enough_seconds:
        rounds.append(_time_round(encoding, sample, split))
    return _with_times(run, rounds, len(sample)).changed(stopped=stopped)


def _time_round(encoding: RowEncoding[Item], sample: list[Item], split: Split[Item]) -> list[float]:
    """Return the seconds of the whole sample. Under the hint "latency", return the seconds of each batch alone, as a
    user waits for it."""
    batches = split(sample, encoding.setup.batch) if encoding.setup.hint == "latency" else [sample]
    return [_time_batch(encoding, batch) for batch in batches]


def _time_batch(encoding: RowEncoding[Item], batch: list[Item]) -> float:
    start = time.perf_counter()
    encoding.rows(batch)
    return time.perf_counter() - start


def _with_times(run: Run, rounds: list[list[float]], num_items: int) -> Run:
    """Return the run with its rate. Under the hint "latency", add the time of the slowest batch."""
    spread = Spread.of([sum(times) for times in rounds])
    slowest_batch = None
    if run.setup.hint == "latency":
        slowest_batch = max(median(times) for times in zip(*rounds, strict=True))
    return run.changed(seconds=spread, per_second=num_items / spread.p50, first_seconds=slowest_batch)
