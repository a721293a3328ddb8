"""Run one setup of an encoding race in the process of its engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import transformers.modeling_utils  # noqa: F401  import once for all engines

from upshift.inference.encoding.engines.base import batch_by_length
from upshift.inference.encoding.model_config import EncodingConfig
from upshift.inference.encoding.run import Encoding
from upshift.inference.race.early_stopping import EarlyStopping, serve_race
from upshift.inference.race.rows import run_row_setup
from upshift.inference.race.types import RaceRequest, RaceResult, Run
from upshift.inference.registry import EngineSetup

FIRST_TEXTS = 8  # texts that run as a part of loading


def run_setup(request: RaceRequest, setup: EngineSetup, early_stopping: EarlyStopping) -> list[Run]:
    """Return the runs of one setup, one for each batch, up to the batch with which it is stopped."""
    contest = request.contest
    sample: list[list[int]] = json.loads(request.sample.read_text())
    config = EncodingConfig.from_json(contest.asked, origin="the race")

    def load() -> Encoding:
        return Encoding(contest.source, config, setup, sample, pad=contest.pad)

    return run_row_setup(request, setup, early_stopping, sample, load=load, num_first=FIRST_TEXTS, split=_split)


def _split(sample: list[list[int]], batch: int) -> list[list[list[int]]]:
    lengths = [len(row) for row in sample]
    return [[sample[index] for index in indices] for indices in batch_by_length(lengths, batch)]


def main(path: Path, answer: Callable[[RaceResult], None]) -> None:
    serve_race(path, answer, run_setup)
