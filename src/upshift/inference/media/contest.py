"""Run one setup of a race on images, sounds or texts beside them, in the process of its engine."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import transformers.modeling_utils  # noqa: F401  import once for all engines

from upshift.inference.media.items import MediaItem
from upshift.inference.media.model import MediaConfig
from upshift.inference.media.run import MediaEncoding
from upshift.inference.race.early_stopping import EarlyStopping, serve_race
from upshift.inference.race.types import RaceRequest, RaceResult, Run, with_agreement
from upshift.inference.registry import EngineSetup
from upshift.record import Spread


def run_setup(request: RaceRequest, setup: EngineSetup, early_stopping: EarlyStopping) -> list[Run]:
    """Return the runs of one setup, one for each batch, up to the batch with which it is stopped."""
    contest = request.contest
    sample = [MediaItem(*item) for item in json.loads(request.sample.read_text())]
    config = MediaConfig.from_json(contest.asked, origin="the race")
    start = time.perf_counter()
    encoding = MediaEncoding(contest.source, config, setup)
    encoding.rows(sample[:1])
    load_seconds = time.perf_counter() - start
    runs: list[Run] = []
    for batch in contest.batches:
        if not request.reference.is_file():  # the reference computes each item alone, whatever the batches of the race
            encoding.setup = setup.changed(batch=1)
            np.save(request.reference, encoding.rows(sample))
        encoding.setup = setup.changed(batch=batch)
        cpu_start = time.process_time()
        start = time.perf_counter()
        rows = encoding.rows(sample)
        seconds = time.perf_counter() - start
        cpu_share = (time.process_time() - cpu_start) / (seconds * setup.threads)
        expected = np.load(request.reference)
        if setup.engine == "nothing":
            rows = np.broadcast_to(rows, expected.shape)
        run = Run(
            setup=encoding.setup,
            load_seconds=load_seconds,
            seconds=Spread.of([seconds]),
            per_second=len(sample) / seconds,
            first_seconds=seconds * batch / len(sample) if setup.hint == "latency" else None,
        )
        run = with_agreement(run, rows, expected)
        stopped = early_stopping.stop(run, cpu_share)
        runs.append(run.changed(stopped=stopped))
        if stopped is not None:
            break
    return runs


def main(path: Path, answer: Callable[[RaceResult], None]) -> None:
    serve_race(path, answer, run_setup)
