"""One contestant of a race: python -m upshift.inference.race_worker REQUEST.json. Its last line is a Run."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import psutil

from upshift.inference.encode import Encoding
from upshift.inference.engines.registry import TOKEN_BUDGETS
from upshift.inference.pool import cosines
from upshift.inference.race import Entrant, Run
from upshift.record import Spread

ROUNDS, ENOUGH_SECONDS = 5, 3.0  # repetitions, and seconds after which no further one is begun


def run(entrant: Entrant) -> Run:
    sample = json.loads(entrant.sample.read_text())
    start = time.perf_counter()
    encoding = Encoding(entrant.source, entrant.recipe, entrant.setup, sample, pad=entrant.pad)
    encoding.rows(sample[:8])
    load = time.perf_counter() - start
    best: tuple[Spread, int, np.ndarray] | None = None
    for budget in TOKEN_BUDGETS:
        encoding.setup = entrant.setup.changed(token_budget=budget)
        found, seconds = _timed(encoding, sample)
        if best is None or seconds.p50 < best[0].p50:
            best = (seconds, budget, found)
    assert best is not None
    seconds, budget, found = best
    if entrant.is_reference:
        np.save(entrant.reference, found)
    expected = np.load(entrant.reference)
    return Run(
        setup=entrant.setup.changed(token_budget=budget), load_seconds=load, seconds=seconds,
        texts_per_second=len(sample) / seconds.p50, largest_difference=float(np.abs(found - expected).max()),
        worst_cosine=float(cosines(found, expected).min()), resident_bytes=psutil.Process().memory_info().rss,
    )  # fmt: skip


def _timed(encoding: Encoding, sample: list[list[int]]) -> tuple[np.ndarray, Spread]:
    seconds: list[float] = []
    found = encoding.rows(sample)
    while len(seconds) < ROUNDS and (not seconds or sum(seconds) < ENOUGH_SECONDS / len(TOKEN_BUDGETS)):
        start = time.perf_counter()
        found = encoding.rows(sample)
        seconds.append(time.perf_counter() - start)
    return found, Spread.of(seconds, num_warmup=1)


if __name__ == "__main__":
    sys.stdout.write(run(Entrant.from_file(Path(sys.argv[1]))).to_json() + "\n")
