"""Run images, sounds and texts through an engine, batch by batch, and return rows in the order of the input."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from upshift.errors import RequestError
from upshift.inference.media.engines.base import Arrays, MediaBuild, MediaEngine
from upshift.inference.media.model import MediaConfig, MediaInputs
from upshift.inference.registry import EngineSetup, build_engine
from upshift.inference.weights import engine_folder
from upshift.loading.media_files import MediaItem, Modality
from upshift.models.source import ModelSource

READ_AHEAD = 64  # items whose inputs are in memory at once
READERS = 2  # threads: an image is decoded while another one is


class MediaEncoding:
    """One model under one setup. ``setup.batch`` is the number of items of a batch."""

    def __init__(self, source: ModelSource, config: MediaConfig, setup: EngineSetup) -> None:
        self.setup = setup
        self.inputs = MediaInputs(source)
        folder = engine_folder("media", source, setup.engine)
        self.engine: MediaEngine = build_engine("media", setup.engine, MediaBuild(source, config, setup, folder))

    def rows(self, items: Sequence[MediaItem]) -> np.ndarray:
        """Return the rows [N, H] of the items in fp32.

        Only items whose inputs have equal shapes share a batch, so that no padding changes a row."""
        parts = [self._block(items[start : start + READ_AHEAD]) for start in range(0, len(items), READ_AHEAD)]
        return np.concatenate(parts) if parts else np.empty((0, 0), dtype=np.float32)

    def _block(self, items: Sequence[MediaItem]) -> np.ndarray:
        for modality in dict.fromkeys(item.modality for item in items):
            self.inputs.processor(modality)  # in this thread: two would load it twice
        with ThreadPoolExecutor(READERS) as readers:
            arrays = list(readers.map(self.inputs.arrays, items))
        rows: list[np.ndarray | None] = [None] * len(items)
        for modality, indices in self._batches(items, arrays):
            batch = {name: np.concatenate([arrays[index][name] for index in indices]) for name in arrays[indices[0]]}
            for index, row in zip(indices, self._computed(modality, batch, items[indices[0]]), strict=True):
                rows[index] = row
        return np.stack([row for row in rows if row is not None])

    def _batches(self, items: Sequence[MediaItem], arrays: list[Arrays]) -> Iterator[tuple[Modality, list[int]]]:
        """Yield batches of items of one modality whose inputs have equal shapes."""
        groups: dict[tuple[object, ...], list[int]] = {}
        for index, item in enumerate(items):
            shapes = tuple((name, array.shape[1:]) for name, array in arrays[index].items())
            groups.setdefault((item.modality, shapes), []).append(index)
        for indices in groups.values():
            for start in range(0, len(indices), self.setup.batch):
                yield items[indices[0]].modality, indices[start : start + self.setup.batch]

    def _computed(self, modality: Modality, batch: Arrays, first: MediaItem) -> np.ndarray:
        """Return the rows of a batch. Raise RequestError for a sound that is too short for the model's convolutions."""
        try:
            return self.engine.rows(modality, batch)
        except RuntimeError as error:
            if modality == "audio" and "size" in str(error):
                reason = f"{first.origin} is too short for the model ({error})"
                raise RequestError(f"{reason}; make it longer, or leave it out") from None
            raise
