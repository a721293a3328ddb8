"""Run one setup of a race on images, sounds or texts beside them, in the process of its engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import transformers.modeling_utils  # noqa: F401  import once for all engines

from upshift.inference.media.model import MediaConfig
from upshift.inference.media.run import MediaEncoding
from upshift.inference.race.early_stopping import EarlyStopping, serve_race
from upshift.inference.race.rows import run_row_setup
from upshift.inference.race.types import RaceRequest, RaceResult, Run
from upshift.inference.registry import EngineSetup
from upshift.loading.media_files import MediaItem


def run_setup(request: RaceRequest, setup: EngineSetup, early_stopping: EarlyStopping) -> list[Run]:
    """Return the runs of one setup, one for each batch, up to the batch with which it is stopped."""
    contest = request.contest
    sample = [MediaItem(*item) for item in json.loads(request.sample.read_text())]
    config = MediaConfig.from_json(contest.asked, origin="the race")

    def load() -> MediaEncoding:
        return MediaEncoding(contest.source, config, setup)

    return run_row_setup(request, setup, early_stopping, sample, load=load, num_first=1, split=_split)


def _split(sample: list[MediaItem], batch: int) -> list[list[MediaItem]]:
    return [sample[start : start + batch] for start in range(0, len(sample), batch)]


def main(path: Path, answer: Callable[[RaceResult], None]) -> None:
    serve_race(path, answer, run_setup)
