"""Decide whether a model is trained on images or sounds, and on which rows. Prepare the examples of these rows.

The table of tasks decides, with the class that config.json names. A class that is a language model, too, such as Gemma 3, is
trained on images only if the first row of the data has some.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from transformers import PretrainedConfig, PreTrainedModel

from upshift.errors import RequestError
from upshift.models.build import find_architecture, find_classes
from upshift.models.source import ModelSource
from upshift.models.tasks import TASKS, inputs_of, tasks_of
from upshift.training.data.data_options import DataOptions
from upshift.training.media.chats import prepare_chats
from upshift.training.media.classification import prepare_classification
from upshift.training.media.rows import MediaData, Progress, first_row, has_images, read_media_rows
from upshift.training.media.speech import prepare_speech

MediaKind = Literal["image-text-to-text", "image-classification", "audio-classification", "speech-recognition"]
CLASSIFICATIONS: tuple[MediaKind, ...] = ("image-classification", "audio-classification")
IMAGE_CLASSIFICATION = next(task for task in TASKS if task.name == "image-classification")


class MediaModel(NamedTuple):
    """The class that is trained, and on what. ``new_head_on``: the class of the files, if they lack the head of the class."""

    kind: MediaKind
    model_class: type[PreTrainedModel]
    new_head_on: str | None = None


def find_media_model(source: ModelSource, data: str, options: DataOptions) -> MediaModel | None:
    """Return what is trained on images or sounds, or None if the model is trained on text."""
    config = source.hf_config
    architecture = find_architecture(config, source.reference)
    model_class = architecture.model_class
    names = {task.name for task in tasks_of(model_class.__name__)}
    if "automatic-speech-recognition" in names:
        return MediaModel("speech-recognition", model_class)
    if IMAGE_CLASSIFICATION.name in names:
        return MediaModel("image-classification", model_class)
    if "audio-classification" in names:
        return MediaModel("audio-classification", model_class)
    classifier = _image_classifier(config)
    if "image-feature-extraction" in names and inputs_of(model_class) == ("image",) and classifier is not None:
        return MediaModel("image-classification", classifier, new_head_on=model_class.__name__)
    if "image-text-to-text" in names and "image" in inputs_of(model_class):
        is_language_model = architecture.objective is not None
        if not is_language_model or _data_has_images(data, options):
            return MediaModel("image-text-to-text", model_class)
    return None


def _image_classifier(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    return next(find_classes(IMAGE_CLASSIFICATION, config), None)


def _data_has_images(data: str, options: DataOptions) -> bool:
    try:
        row = first_row(data, options)
    except RequestError:  # the reader of texts says what is wrong with it
        return False
    return row is not None and has_images(row)


def prepare_media(
    source: ModelSource,
    media: MediaModel,
    data: str,
    options: DataOptions,
    *,
    eval_data: str | None = None,
    sequence_length: int | None = None,
    progress: Progress = lambda done, total: None,
) -> MediaData:
    """Return the examples of the data. Raise RequestError for an option of other data, and for a row that cannot be used."""
    _check_options(options, media.kind, sequence_length)
    if source.directory is None:
        raise RequestError(f"{source.base_reference!r} is a config without a processor beside it; give a model directory")
    rows = read_media_rows(data, options, eval_data=eval_data, are_sorted=media.kind in CLASSIFICATIONS)
    if media.kind == "image-text-to-text":
        return prepare_chats(source, rows, options, sequence_length=sequence_length, progress=progress)
    if media.kind in CLASSIFICATIONS:
        of_sounds = media.kind == "audio-classification"
        return prepare_classification(source, rows, of_sounds=of_sounds, has_head=media.new_head_on is None, progress=progress)
    return prepare_speech(source, rows, writes=media.model_class.can_generate(), progress=progress)


def _check_options(options: DataOptions, kind: MediaKind, sequence_length: int | None) -> None:
    refuse_given({"--objective": options.objective, "--text-column": options.text_column}, kind)
    if kind != "image-text-to-text":
        of_chats = {
            "--data-format": options.data_format,
            "--loss-on": options.loss_on,
            "--chat-template": options.chat_template,
            "--sequence-length": sequence_length,
            "--long-rows": options.long_rows,
        }
        refuse_given(of_chats, kind)
    if options.long_rows in ("cut", "split"):
        raise RequestError(f"--long-rows {options.long_rows} would cut an image in two; use drop, or leave it out")
    if options.long_rows == "drop" and sequence_length is None:
        raise RequestError("--long-rows drop needs the length of the longest row; add --sequence-length")


def refuse_given(given: Mapping[str, Any], kind: MediaKind) -> None:
    """Raise RequestError with the first of these options that has a value."""
    for option, value in given.items():
        if value not in (None, False):
            raise RequestError(f"{option} is not for training on images and sounds ({kind}); leave it out")
