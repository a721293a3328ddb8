"""Decide for which task a model is trained: by its class, by the columns of the rows, and by --objective. Prepare the rows.

The table of tasks decides, with the class that config.json names. A class that is a language model, too, such as Gemma 3, is
trained on images only if the first row of the data has some. A model of masked words gets a new head for words with tags, and
for questions with answers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple

from transformers import PretrainedConfig, PreTrainedModel

from upshift.errors import RequestError
from upshift.models.build import Architecture, find_architecture, find_classes
from upshift.models.source import ModelSource
from upshift.models.tasks import TASKS, inputs_of, tasks_of
from upshift.training.data.data_files import say_once
from upshift.training.data.data_options import DataOptions
from upshift.training.data.row_formats import possible_formats
from upshift.training.tasks.chats import prepare_chats
from upshift.training.tasks.contents import digest_of
from upshift.training.tasks.images.detection import learns_boxes, prepare_detection
from upshift.training.tasks.images.folders import has_named_label_image, has_pairs, paired_folder
from upshift.training.tasks.images.segmentation import learns_label_images, prepare_segmentation
from upshift.training.tasks.media_classification import prepare_images, prepare_sounds
from upshift.training.tasks.question_answering import has_questions, prepare_question_answering
from upshift.training.tasks.rows import Progress, TaskData, TaskInputs, TaskRow, TaskRows, first_row, has_images, read_task_rows
from upshift.training.tasks.speech import prepare_speech
from upshift.training.tasks.text_classification import prepare_text_classification, text_columns
from upshift.training.tasks.token_classification import prepare_token_classification, word_columns

TextKind = Literal["text-classification", "token-classification", "question-answering"]
TaskKind = Literal[
    "image-text-to-text",
    "image-classification",
    "audio-classification",
    "speech-recognition",
    "text-classification",
    "token-classification",
    "question-answering",
    "object-detection",
    "image-segmentation",
]
SORTED_BY_LABEL: tuple[TaskKind, ...] = ("image-classification", "audio-classification", "text-classification")
TEXT_KINDS: Mapping[str, TextKind] = {  # by the name of --objective
    "sequence-classification": "text-classification",
    "token-classification": "token-classification",
    "question-answering": "question-answering",
}
SEGMENTATION: TaskKind = "image-segmentation"
PREPARE: Mapping[TaskKind, Callable[[TaskInputs], TaskData]] = {
    "image-text-to-text": prepare_chats,
    "image-classification": prepare_images,
    "audio-classification": prepare_sounds,
    "speech-recognition": prepare_speech,
    "text-classification": prepare_text_classification,
    "token-classification": prepare_token_classification,
    "question-answering": prepare_question_answering,
    "object-detection": prepare_detection,
    "image-segmentation": prepare_segmentation,
}
IMAGE_CLASSIFICATION, AUDIO_CLASSIFICATION = (
    next(task for task in TASKS if task.name == name) for name in ("image-classification", "audio-classification")
)
CLASSIFICATIONS = {"image": IMAGE_CLASSIFICATION, "audio": AUDIO_CLASSIFICATION}  # by what a model reads


class TaskModel(NamedTuple):
    """The class that is trained, and for what. ``new_head_on``: the class of the files, if they lack the head of the class."""

    kind: TaskKind
    model_class: type[PreTrainedModel]
    new_head_on: str | None = None


def find_task_model(source: ModelSource, data: str, options: DataOptions) -> TaskModel | None:
    """Return the task, or None if the model is trained on text alone."""
    config = source.hf_config
    architecture = find_architecture(config, source.reference)
    model_class = architecture.model_class
    names = {task.name for task in tasks_of(model_class.__name__)}
    segmenter = _find_segmenter(source, model_class, names, data, options)
    if segmenter is not None:
        return segmenter
    if "automatic-speech-recognition" in names:
        return TaskModel("speech-recognition", model_class)
    if IMAGE_CLASSIFICATION.name in names:
        return TaskModel("image-classification", model_class)
    if "audio-classification" in names:
        return TaskModel("audio-classification", model_class)
    if "object-detection" in names and learns_boxes(model_class):
        return TaskModel("object-detection", model_class)
    classifier = _classifier_on(model_class, config)
    if classifier is not None:
        return classifier
    if "image-text-to-text" in names and "image" in inputs_of(model_class):
        is_language_model = architecture.objective is not None
        if not is_language_model or _data_has_images(data, options):
            return TaskModel("image-text-to-text", model_class)
        return None
    return _find_text_task(source, architecture, data, options)


def _find_segmenter(
    source: ModelSource, model_class: type[PreTrainedModel], names: Collection[str], data: str, options: DataOptions
) -> TaskModel | None:
    """Return the task of a model that learns label images, or None for another model.

    A model of images with another head, or without one, gets the head if the data has label images. Raise RequestError for a
    segmenter whose labels have another form."""
    if SEGMENTATION in names:
        if not learns_label_images(model_class):
            raise RequestError(
                f"{source.reference!r} is a {model_class.__name__}, which learns masks in a form that Upshift does not make of "
                "label images; give a model such as SegFormer, UperNet, MaskFormer or Mask2Former"
            )
        return TaskModel(SEGMENTATION, model_class)
    task = next(task for task in TASKS if task.name == SEGMENTATION)
    may_change = inputs_of(model_class) == ("image",) and (IMAGE_CLASSIFICATION.name in names or not _is_trained(model_class))
    other_class = next(find_classes(task, source.hf_config), None) if may_change else None
    if other_class is None or not _data_has_label_images(data, options):
        return None
    return TaskModel(SEGMENTATION, other_class, new_head_on=model_class.__name__)


def _data_has_label_images(data: str, options: DataOptions) -> bool:
    if has_pairs(Path(data)):
        return True
    row = _first_row(data, options)
    return row is not None and has_named_label_image(row)


def _find_text_task(source: ModelSource, architecture: Architecture, data: str, options: DataOptions) -> TaskModel | None:
    """Return the task of a model of texts: that of --objective, of its class, or of the columns of the first row."""
    if options.has_pairs or options.objective in ("causal-lm", "masked-lm", "seq2seq-lm"):
        return None
    own_kind = TEXT_KINDS.get(architecture.objective or "")
    kind = TEXT_KINDS.get(options.objective or "", own_kind)
    if kind is None:
        kind = _kind_of_columns(architecture, data, options)
    if kind is None:
        return None
    if kind == own_kind:
        return TaskModel(kind, architecture.model_class)
    task = next(task for task in TASKS if task.name == kind)
    model_class = next(find_classes(task, source.hf_config), None)
    if model_class is None:
        raise RequestError(
            f"transformers has no class for {kind} of {source.reference!r} (model_type {source.hf_config.model_type!r}); use "
            "another model"
        )
    return TaskModel(kind, model_class, new_head_on=architecture.model_class.__name__)


def _kind_of_columns(architecture: Architecture, data: str, options: DataOptions) -> TextKind | None:
    """Return the task that the columns of the first row say, or None if they may be read as text.

    The rows of a model that writes texts are always texts."""
    if architecture.objective not in (None, "masked-lm") or options.text_column is not None or options.data_format is not None:
        return None
    row = _first_row(data, options)
    if row is None:
        return None
    has_labels = text_columns(row.fields) is not None
    if possible_formats(row.fields) and has_labels and architecture.objective == "masked-lm":
        say_once(f"{data}: the texts alone are learned (masked-lm); --objective sequence-classification learns their labels")
    if word_columns(row.fields) is not None:
        return "token-classification"
    if has_questions(row.fields):
        return "question-answering"
    is_text = bool(possible_formats(row.fields)) and architecture.objective == "masked-lm"
    return "text-classification" if has_labels and not is_text else None


def _classifier_on(model_class: type[PreTrainedModel], config: PretrainedConfig) -> TaskModel | None:
    """Return the classifier of images or of sounds that a model without a trained head gets, or None for another model."""
    inputs = inputs_of(model_class)
    task = CLASSIFICATIONS.get(inputs[0]) if len(inputs) == 1 else None
    if task is None or _is_trained(model_class):
        return None
    classifier = next(find_classes(task, config), None)
    if classifier is None:
        return None
    kind: TaskKind = "image-classification" if task is IMAGE_CLASSIFICATION else "audio-classification"
    return TaskModel(kind, classifier, new_head_on=model_class.__name__)


def _is_trained(model_class: type[PreTrainedModel]) -> bool:
    """Return whether a class has a head for a task that Upshift trains."""
    return any(task.objective is not None or task.trained_on for task in tasks_of(model_class.__name__))


def _data_has_images(data: str, options: DataOptions) -> bool:
    row = _first_row(data, options)
    return row is not None and has_images(row)


def _first_row(data: str, options: DataOptions) -> TaskRow | None:
    try:
        return first_row(data, options)
    except RequestError:  # the reader of texts says what is wrong with it
        return None


def prepare_task(
    source: ModelSource,
    task: TaskModel,
    data: str,
    options: DataOptions,
    *,
    eval_data: str | None = None,
    sequence_length: int | None = None,
    progress: Progress = lambda done, total: None,
    identifying: Progress | None = None,
) -> TaskData:
    """Return the examples of the data. Raise RequestError for an option of other data, and for a row that cannot be used.

    ``identifying``: find the identity of the data, too, which reads each image and sound, and report the rows that are done."""
    _check_options(options, task.kind, sequence_length)
    if source.directory is None:
        raise RequestError(f"{source.base_reference!r} is a config without a processor beside it; give a model directory")
    read_folder = paired_folder if task.kind == SEGMENTATION else None
    rows = read_task_rows(data, options, eval_data=eval_data, are_sorted=task.kind in SORTED_BY_LABEL, read_folder=read_folder)
    prepared = PREPARE[task.kind](
        TaskInputs(
            source=source,
            model_class=task.model_class,
            has_head=task.new_head_on is None,
            rows=rows,
            options=options,
            sequence_length=sequence_length,
            progress=progress,
        )
    )
    return prepared if identifying is None else replace(prepared, data_identity=_identity_of(rows, prepared, identifying))


def _identity_of(rows: TaskRows, prepared: TaskData, progress: Progress) -> dict[str, str | None]:
    """Return the digests of the rows of both splits, and the labels of a new head."""
    class_names = sorted(rows.class_names.items()), prepared.class_names
    total = len(rows.training) + len(rows.evaluation)
    done = count(1)
    identity: dict[str, str | None] = {}
    for name, split in (("rows", rows.training), ("held_out_rows", rows.evaluation)):
        identity[name] = digest_of(split, class_names, lambda: progress(next(done), total)) if split else None
    return {**identity, "labels": None if prepared.new_head is None else ", ".join(prepared.new_head.labels)}


def _check_options(options: DataOptions, kind: TaskKind, sequence_length: int | None) -> None:
    is_text = kind in TEXT_KINDS.values()
    if not is_text:
        refuse_given({"--objective": options.objective}, kind)
    if kind != "text-classification":
        refuse_given({"--text-column": options.text_column}, kind)
    if kind != "image-text-to-text":
        of_chats = {"--data-format": options.data_format, "--loss-on": options.loss_on, "--chat-template": options.chat_template}
        refuse_given(of_chats, kind)
    if kind != "image-text-to-text" and not is_text:
        refuse_given({"--sequence-length": sequence_length, "--long-rows": options.long_rows}, kind)
    if kind in ("text-classification", "token-classification"):
        if options.long_rows == "split":
            raise RequestError("--long-rows split would cut a text from its labels; use cut or drop")
        return
    if kind == "question-answering":
        refuse_given({"--long-rows": options.long_rows}, kind)
    if options.long_rows in ("cut", "split"):
        raise RequestError(f"--long-rows {options.long_rows} would cut an image in two; use drop, or leave it out")
    if options.long_rows == "drop" and sequence_length is None:
        raise RequestError("--long-rows drop needs the length of the longest row; add --sequence-length")


def refuse_given(given: Mapping[str, Any], kind: TaskKind) -> None:
    """Raise RequestError with the first of these options that has a value."""
    for option, value in given.items():
        if value not in (None, False):
            raise RequestError(f"{option} is not for {kind}; leave it out")
