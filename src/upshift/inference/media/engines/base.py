"""Define the protocol of the engines that encode images and sounds, and the parts that they are built from."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from upshift.inference.media.model import MediaConfig
from upshift.inference.registry import EngineSetup
from upshift.loading.media_files import Modality
from upshift.models.source import ModelSource

Arrays = dict[str, np.ndarray]  # the inputs of a batch by the names of the model's own, each [B, ...]


class MediaEngine(Protocol):
    def rows(self, modality: Modality, arrays: Arrays) -> np.ndarray:
        """Return the rows [B, H] fp32 of a batch."""
        ...


class MediaBuild(NamedTuple):
    """The parts that an engine is built from. ``folder`` holds the engine's own files between runs."""

    source: ModelSource
    config: MediaConfig
    setup: EngineSetup
    folder: Path
