"""Define ``upshift.MediaEncoder``: it turns images and sounds, and texts beside them, into vectors or scores of classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from upshift.errors import RequestError
from upshift.inference.computing_device import computing_host
from upshift.inference.media.files import FORMS, MODALITIES
from upshift.inference.media.model import MediaInputs, check_weights, read_media_config
from upshift.inference.media.run import MediaEncoding
from upshift.inference.race.policy import RacePolicy
from upshift.inference.race.race import Race, race
from upshift.inference.race.types import Contest, Limits, RaceSeconds, Run, pick_evenly, read_quality, read_seconds
from upshift.inference.resumable_output import is_text
from upshift.inference.weights import check_requested_engine, find_weights, stored_for
from upshift.loading.media_files import MediaItem, check_media, check_sounds, modality_of
from upshift.models.config import label_names

SAMPLE_ITEMS = 32  # items that a race runs on
BATCHES = (1, 4, 16)  # items


class MediaEncoder:
    """Encode images and sounds with a model of transformers: CLIP, SigLIP, DINOv2, ViT, Whisper's encoder, wav2vec2 and others.

    A row is the result of transformers for the item alone. Models that compare images or sounds with texts give features, and
    take texts, too. A classifier gives scores. An encoder gives its pooled output, or else the mean over its outputs. The first
    call races the installed engines on some of the items, or recalls the result of an earlier race.

    Args:
        model: directory or hub id.
        quality: "exact" (fp32, within 1e-4 of transformers), or the lowest cosine to transformers that an item may have.
        engine: the only engine to use.
        race_seconds: time of the race. "run": no longer than the run of the first call takes.
        on_run: called after each run of the race.

    Raises:
        RequestError: a request is not possible. The message names what is possible.
    """

    def __init__(
        self,
        model: str,
        *,
        quality: str | float = "exact",
        engine: str | None = None,
        race_seconds: RaceSeconds = None,
        on_run: Callable[[Run], None] = lambda run: None,
    ) -> None:
        self.quality = read_quality(str(quality))
        self.source = find_weights(model)
        self.host = computing_host(stored_for(self.source))
        self._engine = check_requested_engine("media", self.source, engine, self.host)
        self.config = read_media_config(self.source)
        check_weights(self.source, self.config)
        self.inputs = MediaInputs(self.source)
        self._on_run = on_run
        self._race_seconds = read_seconds(race_seconds)
        self._encoding: MediaEncoding | None = None
        self.race: Race | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the names of a classifier's columns of scores, or nothing for other models."""
        if self.config.kind != "class scores":
            return ()
        return label_names(self.source.hf_config)

    def encode(self, items: Sequence[str | Path | Mapping[str, str]]) -> np.ndarray:
        """Return one row for each item [N, H], in the order of the items, in fp32.

        An item is the path of an image or a sound, or a mapping such as {"image": path}, {"audio": path} or {"text": text}."""
        return self.rows(self.check([_read_item(item, number) for number, item in enumerate(items, start=1)]))

    def check(self, items: list[MediaItem]) -> list[MediaItem]:
        """Return the items. Raise RequestError with the first one that cannot be read, or that the model does not read."""
        for item in items:
            if item.modality not in self.config.modalities:
                modalities = " and ".join(self.config.modalities)
                model = repr(self.source.reference)
                raise RequestError(f"{item.origin} is of kind {item.modality}, and {model} encodes {modalities}")
        check_media(items)
        if any(item.modality == "audio" for item in items):
            rate, longest_seconds = self.inputs.sound_limits()
            check_sounds(items, rate=rate, longest_seconds=longest_seconds)
        return items

    def rows(self, items: Sequence[MediaItem]) -> np.ndarray:
        """Return the rows of items that are checked. The first call runs the race."""
        if not len(items):
            return np.empty((0, 0), dtype=np.float32)
        return self.prepare(items).rows(items)

    def prepare(self, items: Sequence[MediaItem]) -> MediaEncoding:
        """Return the engine that wins a race on some of the items, or that won before."""
        if self._encoding is None:
            self.prepare_sample(pick_evenly(items, SAMPLE_ITEMS), len(items))
        assert self._encoding is not None
        return self._encoding

    def prepare_sample(self, sample: Sequence[MediaItem], total: int, *, result: Race | None = None) -> Race:
        """Return the result of the race on a sample of ``total`` items, or of an earlier race. Load the winner.

        ``result`` is that of a race in another process, and then nothing is raced here."""
        self.race = result or self._run_race(sample, total)
        self._encoding = MediaEncoding(self.source, self.config, self.race.chosen)
        return self.race

    def _run_race(self, sample: Sequence[MediaItem], total: int) -> Race:
        contest = Contest(
            task="media",
            source=self.source,
            asked=self.config.to_json(),
            pad=0,
            batches=BATCHES,
            hint="throughput",
        )
        policy = RacePolicy(self.quality, Limits(), total, engine=self._engine, seconds=self._race_seconds)
        rows = [list(item) for item in sample]
        return race(contest, self.host, rows, policy, forecast=lambda: lambda setup: None, on_run=self._on_run)


def _read_item(item: str | Path | Mapping[str, str], number: int) -> MediaItem:
    origin = f"item {number}"
    if isinstance(item, str | Path):
        modality = modality_of(Path(item))
        if modality is not None:
            return MediaItem(modality, str(item), str(item))
    elif isinstance(item, Mapping) and len(item) == 1:
        ((key, value),) = item.items()
        modality = next((modality for modality in MODALITIES if modality == key), None)
        if modality is not None and (isinstance(value, Path) or is_text(value)):
            return MediaItem(modality, str(value), origin)
    raise RequestError(f"{origin} is {item!r:.80}; give the path of an image or a sound, or {FORMS}")
