"""Decide whether a model is trained on images or sounds, and on which rows.

The table of tasks decides, with the class that config.json names. A class that is a language model, too, such as Gemma 3, is
trained on images only if the first row of the data has some.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from transformers import PretrainedConfig, PreTrainedModel

from upshift.errors import RequestError
from upshift.models.build import find_architecture, find_classes
from upshift.models.source import ModelSource
from upshift.models.tasks import TASKS, inputs_of, tasks_of
from upshift.training.data.data_options import DataOptions
from upshift.training.media.rows import first_row, has_images

MediaKind = Literal["image-text-to-text", "image-classification", "speech-recognition"]
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
