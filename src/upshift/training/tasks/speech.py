"""Make batches of sounds and their texts, for models that write token by token (Whisper) and for CTC heads (wav2vec2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from upshift.errors import RequestError
from upshift.loading.media_files import MediaItem, read_sound_at, sound_header
from upshift.models.source import ModelSource
from upshift.training.data.row_formats import list_columns
from upshift.training.data.rows.token_rows import IGNORED
from upshift.training.data.special_tokens import UnknownTokens
from upshift.training.tasks.contents import sound_of
from upshift.training.tasks.metrics.task_metrics import BatchLoss
from upshift.training.tasks.metrics.words import speech_metrics
from upshift.training.tasks.rows import (
    Preprocessors,
    TaskData,
    TaskInputs,
    TaskRow,
    load_processor,
    make_task_data,
    read_splits,
)

SOUND_NAMES = ("audio", "file_name")  # columns of the sounds; datasets' audio folders have the second one
TEXT_NAMES = ("text", "sentence", "transcription")  # of what is said; Common Voice has the second one, audio folders the third


class SpokenText(NamedTuple):
    """A sound, and the tokens of what is said in it."""

    sound: MediaItem
    text: str
    labels: list[int]


class SpeechReader:
    """Reads rows of sounds and texts, and makes batches of them."""

    def __init__(self, source: ModelSource, *, writes: bool) -> None:
        self._config = source.hf_config
        self._writes = writes
        self.extractor = load_processor(source, "AutoFeatureExtractor")
        self.tokenizer = load_processor(source, "AutoTokenizer")
        self._window_seconds = getattr(self.extractor, "chunk_length", None)
        self.unknown = UnknownTokens(self.tokenizer)
        self.limit: int | None = getattr(self._config, "max_target_positions", None)  # tokens that the model writes

    def read(self, row: TaskRow) -> SpokenText | None:
        """Return the example of a row, or None for a row without text. Raise RequestError for a row that cannot be used."""
        text_name, sound_name = (
            next((name for name in names if name in row.fields), None) for names in (TEXT_NAMES, SOUND_NAMES)
        )
        if text_name is None or sound_name is None:
            raise RequestError(
                f"{row.place} has not the columns 'audio' and 'text'; {list_columns(row.fields)}; rename those of the sounds and "
                "of what is said in them"
            )
        text = row.fields[text_name]
        if text is not None and not isinstance(text, str):
            raise RequestError(f"{row.place} has the text {text!r:.60}; it must be text")
        if text is None or not text.strip():
            return None
        sound = sound_of(row.fields[sound_name], row, self.extractor)
        labels: list[int] = self.tokenizer(text).input_ids
        self.unknown.add(labels)
        if self._writes and labels[:1] == [self._config.decoder_start_token_id]:
            labels = labels[1:]  # the model puts it before the labels itself
        self._check_length(labels, sound, row)
        return SpokenText(sound, text, labels)

    def _check_length(self, labels: list[int], sound: MediaItem, row: TaskRow) -> None:
        """Raise RequestError if the model cannot write so many tokens, or not for so short a sound."""
        if self._writes and self.limit is not None and len(labels) > self.limit:
            raise RequestError(
                f"{row.place} has a text of {len(labels)} tokens, and the model writes at most {self.limit}; cut the sound"
            )
        samples_per_place = getattr(self._config, "inputs_to_logits_ratio", None)
        if self._writes or samples_per_place is None:
            return
        num_places = int(sound_header(sound)[1] * self.extractor.sampling_rate) // samples_per_place
        if num_places <= len(labels):
            raise RequestError(
                f"{row.place} has a text of {len(labels)} letters for a sound of {num_places} places, and a CTC head writes at "
                "most one at each; correct the row, or leave it out"
            )

    def collate(self, examples: Sequence[SpokenText]) -> dict[str, Any]:
        """Return the model's inputs for some sounds, as its feature extractor makes them, and the labels [rows, tokens]."""
        sounds = [read_sound_at(example.sound, self.extractor.sampling_rate).samples for example in examples]
        options: dict[str, Any] = {"sampling_rate": self.extractor.sampling_rate, "return_tensors": "pt"}
        if self._writes:
            options["return_attention_mask"] = True
        if self._window_seconds is None:
            options["padding"] = True  # Whisper's extractor pads to its window
        width = max(len(example.labels) for example in examples)
        labels = torch.full((len(examples), width), IGNORED)
        for number, example in enumerate(examples):
            labels[number, : len(example.labels)] = torch.tensor(example.labels)
        return {**self.extractor(sounds, **options), "labels": labels}


def prepare_speech(inputs: TaskInputs) -> TaskData:
    """Return the examples of sounds with texts."""
    writes = inputs.model_class.can_generate()  # token by token; else the model has a CTC head
    reader = SpeechReader(inputs.source, writes=writes)
    splits = read_splits(inputs.rows, reader.read, inputs.progress)
    reader.unknown.report()
    longest = max((len(example.labels) for example in splits[1]), default=0)
    return make_task_data(
        splits,
        tries_batch=True,
        collate=reader.collate,
        preprocessors=Preprocessors((reader.extractor, reader.tokenizer)),
        batch_loss=_batch_loss(inputs.source.hf_config, writes=writes),
        metrics=speech_metrics(reader.tokenizer, writes=writes, longest=longest, limit=reader.limit),
        describe=lambda example: [(f"{example.sound.content} ", False), (example.text, True)],
    )


def _batch_loss(config: Any, *, writes: bool) -> BatchLoss:
    """Return what the loss of a batch is. The config of a CTC head says whether it is the mean of the rows or their sum."""
    if writes:
        return "mean over labels"
    return "sum over rows" if getattr(config, "ctc_loss_reduction", "mean") == "sum" else "mean over rows"
