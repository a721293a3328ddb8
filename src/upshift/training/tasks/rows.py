"""Read the rows of a task's data: tables, saved data sets, and folders of images or sounds with a folder for each label.

The rows, and the examples that are made of them, are in memory. They name their images and sounds, which are read when a batch
needs them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Required, TypedDict, Unpack

import numpy as np
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from upshift.errors import RequestError
from upshift.loading.media_files import modality_of
from upshift.models.source import ModelSource
from upshift.text import one_line
from upshift.training.data.chat_rows import decode_json
from upshift.training.data.corpus import SavedSplit, existing_path, find_saved_splits, is_saved_dataset, rows_of_files
from upshift.training.data.data_files import (
    EVALUATION_SPLIT,
    METADATA_FILES,
    SPLIT_WORDS,
    DataFiles,
    Kind,
    file_kind,
    find_data_files,
    find_split,
    say_once,
    split_files,
)
from upshift.training.data.data_options import DataOptions
from upshift.training.data.rows.data_set import read_description
from upshift.training.data.rows.row_slice import RowSlice, pick_split, read_split
from upshift.training.data.rows.token_rows import IGNORED
from upshift.training.data.tokens import num_held_out
from upshift.training.tasks.metrics.task_metrics import BatchLoss, TaskMetrics

Collate = Callable[[Sequence[Any]], dict[str, Any]]
Progress = Callable[[int, int], None]  # rows that are read, and all of them
ClassNames = Mapping[str, tuple[str, ...]]  # the names of a column's numbers, by the column; "objects.category" is in a struct
FEATURES_KEY = b"huggingface"  # of the metadata of a Parquet or Arrow file, in which datasets names classes
IMAGE_COLUMNS = ("images", "image")
IMAGE_PARTS = ("image", "image_url")  # types of a content's parts


class TaskRow(NamedTuple):
    """A row, its place for messages, and the folder in which its paths begin."""

    place: str
    fields: Mapping[str, Any]
    folder: Path


HoldOut = Callable[[list[Any]], tuple[list[Any], list[Any]]]  # returns those to train on, and those held out
FolderRows = tuple[list[TaskRow], list[TaskRow]]  # of the training, and of the evaluation


class ReadFolder(Protocol):
    """Return the rows of both splits of a folder, or None for a path of another form."""

    def __call__(self, path: Path, wanted: str | None, *, is_evaluation: bool) -> FolderRows | None: ...


class TaskRows(NamedTuple):
    """The rows of a run. ``evaluation`` is empty if none are held out."""

    training: list[TaskRow]
    evaluation: list[TaskRow]
    origin: str
    class_names: ClassNames
    hold_out: HoldOut | None  # holds rows out that the user did not ask for; None: the user said which, or how many

    def values(self, column: str) -> list[Any]:
        """Return the values that the rows of both splits have in a column."""
        return [row.fields[column] for row in (*self.training, *self.evaluation) if column in row.fields]


@dataclass(frozen=True, kw_only=True)
class TaskInputs:
    """The rows of a task, the model, and what the user says of both."""

    source: ModelSource
    model_class: type[PreTrainedModel]
    has_head: bool  # the model's files have the head of the class
    rows: TaskRows
    options: DataOptions
    sequence_length: int | None
    progress: Progress


def read_task_rows(
    data: str,
    options: DataOptions,
    *,
    eval_data: str | None = None,
    are_sorted: bool = False,
    read_folder: ReadFolder | None = None,
) -> TaskRows:
    """Return the rows to train and to evaluate on. Raise RequestError for data without rows, and for data of another form.

    Args:
        data: path of the rows.
        options: which of them are read.
        eval_data: path of the rows to evaluate on. None: those of a split for validation, or rows that are held out.
        are_sorted: the rows may be sorted by what is learned, so that those held out are spread over them, and not the last.
        read_folder: reads a folder of images without a table. None: their folders are their labels.
    """
    read_folder = read_folder or labelled_folder
    splits = _read_splits(data, options, read_folder)
    rows = list(splits.training)
    if not rows:
        raise RequestError(f"{data} holds no rows; give at least one")
    held_out = list(splits.evaluation)
    if eval_data is not None:
        held_out = list(_read_splits(eval_data, options.changed(split=None), read_folder, is_evaluation=True).training)
        if not held_out:
            raise RequestError(f"--eval-data {eval_data} holds no rows; give at least one")
    if held_out and options.eval_size is not None:
        raise RequestError(
            f"--eval-size {options.eval_size:g} holds rows of the training out, and {data} has a split {EVALUATION_SPLIT}; leave "
            "--eval-size out"
        )
    if held_out:
        return TaskRows(rows, held_out, data, splits.class_names, None)
    hold_out = partial(_hold_out, size=options.eval_size, are_sorted=are_sorted)
    return TaskRows(*hold_out(rows), data, splits.class_names, hold_out if options.eval_size is None else None)


def _hold_out(rows: list[Any], *, size: float | None, are_sorted: bool) -> tuple[list[Any], list[Any]]:
    """Return the rows to train on, and those held out: the last ones, or some that are spread over all."""
    number = num_held_out(len(rows), size)
    if not are_sorted:
        return rows[: len(rows) - number], rows[len(rows) - number :]
    chosen = set(np.linspace(0, len(rows) - 1, num=number + 2).astype(int)[1:-1].tolist())
    kept = [row for number, row in enumerate(rows) if number not in chosen]
    return kept, [row for number, row in enumerate(rows) if number in chosen]


def first_row(data: str, options: DataOptions) -> TaskRow | None:
    """Return the first row of the training, or None if there is none. Raise RequestError for data of another form."""
    return next(_read_splits(data, options, labelled_folder).training, None)


def has_images(row: TaskRow) -> bool:
    """Return whether a row has images in a column, or in the parts of its messages."""
    if any(is_given(row.fields.get(name)) for name in IMAGE_COLUMNS):
        return True
    return any(
        isinstance(part, dict) and part.get("type") in IMAGE_PARTS
        for value in row.fields.values()
        for message in _list_of(value)
        if isinstance(message, dict)
        for part in _list_of(message.get("content"))
    )


def is_given(value: Any) -> bool:
    """Return whether a row has a value in a column. Tables of text have an empty text where there is none."""
    return value is not None and not (isinstance(value, str | list) and not value)


def _list_of(value: Any) -> list[Any]:
    decoded = decode_json(value)
    return decoded if isinstance(decoded, list) else []


class _Splits(NamedTuple):
    """The rows of the split to read, and those of the split for validation."""

    training: Iterator[TaskRow]
    evaluation: Iterator[TaskRow]
    class_names: ClassNames


def _read_splits(data: str, options: DataOptions, read_folder: ReadFolder, *, is_evaluation: bool = False) -> _Splits:
    described = read_description(data)
    if described is not None:
        raise RequestError(f"{described.origin} lists data sets, and the rows of this task are read from one path; give it")
    path = existing_path(data)
    rows = None if options.split is None or is_evaluation else read_split(options.split)
    wanted = None if rows is None else rows.split
    if is_saved_dataset(path):
        split, evaluation = find_saved_splits(path, wanted, is_evaluation=is_evaluation)
        held_out = iter(()) if evaluation is None else _saved_rows(evaluation, path)
        return _Splits(_select(lambda: _saved_rows(split, path), rows), held_out, _class_names_of_saved(split.folder))
    folder = read_folder(path, wanted, is_evaluation=is_evaluation)
    if folder is not None:
        of_folder = folder[0]
        return _Splits(_select(lambda: iter(of_folder), rows), iter(folder[1]), {})
    files = find_data_files(path, pattern=None, is_evaluation=is_evaluation, wanted_split=wanted, rows_name_media=True)
    if files.kind == "text":
        raise RequestError(
            f"{path} is plain text, and this model is trained on the rows of a table; give JSON, CSV, Parquet or Arrow, or, for "
            "images and sounds, a folder with a folder for each label"
        )
    names = _class_names_of_file(files.training[0], files.kind)
    return _Splits(_select(lambda: _table_rows(files.training, files), rows), _table_rows(files.evaluation, files), names)


def _select(read: Any, rows: RowSlice | None) -> Iterator[TaskRow]:
    return read() if rows is None or rows.is_whole else rows.select(read)


def _table_rows(paths: tuple[Path, ...], files: DataFiles) -> Iterator[TaskRow]:
    for path in paths:
        for place, fields in rows_of_files((path,), files.kind, lambda schema, origin: list(schema.names)):
            yield TaskRow(place, fields, path.parent)


def _saved_rows(split: SavedSplit, path: Path) -> Iterator[TaskRow]:
    for place, fields in split.rows():
        yield TaskRow(place, fields, path)


def _class_names_of_saved(folder: Path) -> ClassNames:
    """Return the names of the classes of a split that ``save_to_disk`` wrote."""
    try:
        features = json.loads((folder / "dataset_info.json").read_bytes()).get("features")
    except (OSError, ValueError):  # the reader of the rows says what is wrong with the folder
        return {}
    return _names_of_features(features)


def _class_names_of_file(file: Path, kind: Kind) -> ClassNames:
    """Return the names of the classes of a table. Only Parquet and Arrow files have some."""
    if kind not in ("parquet", "arrow"):
        return {}
    try:
        metadata = _schema_of(file, kind).metadata or {}
        return _names_of_features(json.loads(metadata.get(FEATURES_KEY, b"{}")).get("info", {}).get("features"))
    except (OSError, ValueError, AttributeError):  # the reader of the rows says what is wrong with the file
        return {}


def _schema_of(file: Path, kind: Kind) -> Any:
    import pyarrow
    import pyarrow.ipc
    import pyarrow.parquet

    if kind == "parquet":
        return pyarrow.parquet.read_schema(file)
    try:
        return pyarrow.ipc.open_file(str(file)).schema
    except pyarrow.ArrowInvalid:  # datasets writes a stream
        return pyarrow.ipc.open_stream(str(file)).schema


def _names_of_features(features: Any, column: str = "") -> dict[str, tuple[str, ...]]:
    """Return the names of the classes in features as ``datasets`` writes them: also of lists, and of structs in lists."""
    if isinstance(features, list) and features:
        return _names_of_features(features[0], column)
    if not isinstance(features, dict):
        return {}
    kind = features.get("_type")
    if kind == "ClassLabel":
        return {column: tuple(map(str, features.get("names") or ()))}
    if isinstance(kind, str):
        return _names_of_features(features.get("feature"), column)
    names: dict[str, tuple[str, ...]] = {}
    for name, feature in features.items():
        names |= _names_of_features(feature, f"{column}.{name}" if column else name)
    return names


def labelled_folder(path: Path, wanted: str | None, *, is_evaluation: bool) -> FolderRows | None:
    """Return the rows of a folder of images or sounds, with the names of their folders as labels, or None for another path."""
    if not path.is_dir():
        return None
    files = [file for file in sorted(path.rglob("*")) if file.is_file() and not is_hidden(file.relative_to(path))]
    if holds_table(files):
        return None
    media = [file for file in files if modality_of(file) is not None]
    if not media:
        return None
    splits = split_files(path, media)
    split = find_split(splits, is_evaluation=is_evaluation) if wanted is None else pick_split(list(splits), wanted, path)
    if split is None:
        raise RequestError(f"{path} has no split to read; its files are of {', '.join(splits)}; name one with --split")
    has_other = EVALUATION_SPLIT in splits and split != EVALUATION_SPLIT and not is_evaluation
    evaluation = splits[EVALUATION_SPLIT] if has_other else []
    return [_labelled(file, path) for file in splits[split]], [_labelled(file, path) for file in evaluation]


def _labelled(file: Path, path: Path) -> TaskRow:
    """Return the row of an image or a sound. Raise RequestError if it is in no folder of a label."""
    folders = file.relative_to(path).parts[:-1]
    words = (word for words in SPLIT_WORDS.values() for word in words)
    if not folders or (len(folders) == 1 and folders[0] in words):
        raise RequestError(f"{file} is in no folder of a label; make a folder for each label, such as {path.name}/cat/1.png")
    return TaskRow(str(file), {str(modality_of(file)): file.name, "label": file.parent.name}, file.parent)


def holds_table(files: Sequence[Path]) -> bool:
    """Return whether files of a folder have rows, so that its images and sounds are columns of them."""
    return any(file_kind(file) != "text" and file.name not in METADATA_FILES for file in files)


def is_hidden(file: Path) -> bool:
    """Return whether a path has a part that is hidden, or that Python or a tool wrote for itself."""
    return any(part.startswith((".", "__")) for part in file.parts)


class Examples(Dataset[Any]):
    """The examples of a split. Their images and sounds are read when a batch is made."""

    def __init__(self, members: Sequence[Any]) -> None:
        self._members = members

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, index: int) -> Any:
        return self._members[index]


class NewHead(NamedTuple):
    """A head with random weights in place of that of the model's files."""

    labels: tuple[str, ...]
    problem_type: str | None = None  # as the configs of transformers name it; None: the model's own

    def changes_of(self, model_class: str) -> dict[str, Any]:
        """Return what the config of the model gets."""
        changes: dict[str, Any] = {
            "architectures": [model_class],
            "id2label": {str(number): name for number, name in enumerate(self.labels)},
            "label2id": {name: number for number, name in enumerate(self.labels)},
        }
        return changes if self.problem_type is None else {**changes, "problem_type": self.problem_type}


class Preprocessors(NamedTuple):
    """The processors of a model, which are saved beside it."""

    parts: tuple[Any, ...]

    def __len__(self) -> int:
        """Return the entries of the vocabulary, by which the size of the saved files is estimated."""
        tokenizers = (getattr(part, "tokenizer", part) for part in self.parts)
        return sum(len(tokenizer) for tokenizer in tokenizers if hasattr(tokenizer, "get_vocab"))

    def save_pretrained(self, directory: Path) -> None:
        for part in self.parts:
            part.save_pretrained(directory)


@dataclass(frozen=True, kw_only=True)
class TaskData:
    """The examples of a run, and what makes batches of them."""

    training: Examples
    evaluation: Examples | None
    collate: Collate
    preprocessors: Preprocessors
    describe: Callable[[Any], list[tuple[str, bool]]]  # the parts of an example, and whether each is learned
    new_head: NewHead | None = None  # None: the head of the model's files stays
    label_inputs: tuple[str, ...] = ("labels",)  # the inputs of the model with what is learned
    batch_loss: BatchLoss = "mean over labels"
    ignored_label: int = IGNORED  # the number that the model's loss leaves out, in place of IGNORED
    metrics: TaskMetrics | None = None  # of the evaluation, beside the loss
    class_names: tuple[str, ...] = ()  # those that a file beside the data gives the numbers of its classes
    data_identity: Mapping[str, str | None] = field(default_factory=dict)  # what a run that resumes must find again


class TaskDataParts(TypedDict, total=False):
    """The fields of TaskData beside its examples."""

    collate: Required[Collate]
    preprocessors: Required[Preprocessors]
    describe: Required[Callable[[Any], list[tuple[str, bool]]]]
    new_head: NewHead | None
    label_inputs: tuple[str, ...]
    batch_loss: BatchLoss
    ignored_label: int
    class_names: tuple[str, ...]
    metrics: TaskMetrics | None


def make_task_data(splits: tuple[list[Any], list[Any]], *, tries_batch: bool = False, **parts: Unpack[TaskDataParts]) -> TaskData:
    """Return the data of the examples of both splits.

    ``tries_batch``: make a batch of the first example, so that what a processor rejects is said before the model is loaded."""
    training, evaluation = splits
    data = TaskData(training=Examples(training), evaluation=Examples(evaluation) if evaluation else None, **parts)
    if tries_batch:
        data.collate(training[:1])
    return data


def check_held_out_labels(data: TaskData) -> None:
    """Raise RequestError if the model gets no label of any held-out row, so that there would be no held-out loss.

    A label image may lose its labels when the processor changes its size."""
    if data.evaluation is None or data.batch_loss != "mean over labels":
        return
    examples = (data.evaluation[number] for number in range(len(data.evaluation)))
    if not any(bool((data.collate([example])[data.label_inputs[0]] != IGNORED).any()) for example in examples):
        raise RequestError(
            "no held-out row has a label in what the model gets of it, so that there is no held-out loss; give other rows with "
            "--eval-data, or evaluate on none with --eval-size 0"
        )


def load_processor(source: ModelSource, auto_class: str) -> Any:
    """Return a processor of the model's files. ``auto_class``: its Auto class. Raise RequestError if none loads."""
    import transformers

    try:
        return getattr(transformers, auto_class).from_pretrained(source.directory)
    except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
        reason = one_line(error, limit=200)
        raise RequestError(
            f"{source.base_reference!r} has no {auto_class} that loads ({reason}); save one beside the model"
        ) from None


def join_places(places: Sequence[str]) -> str:
    """Return the places of the rows of a batch, for an error of all of them."""
    return places[0] if len(places) == 1 else f"one of {', '.join(places[:8])}"


def read_splits(rows: TaskRows, read: Callable[[TaskRow], Any | None], progress: Progress) -> tuple[list[Any], list[Any]]:
    """Return the examples that ``read`` makes of the rows of both splits. Tell the user of how many it makes none."""
    total = len(rows.training) + len(rows.evaluation)
    splits: tuple[list[Any], list[Any]] = ([], [])
    done = 0
    for split, examples in zip((rows.training, rows.evaluation), splits, strict=True):
        for row in split:
            example = read(row)
            if example is not None:
                examples.append(example)
            done += 1
            progress(done, total)
    num_left_out = total - sum(map(len, splits))
    if num_left_out:
        say_once(f"{rows.origin}: {num_left_out} rows are left out, because nothing is learned of them")
    if not splits[0] and not (rows.hold_out and splits[1]):
        raise RequestError(f"{rows.origin} has no row of which something is learned; give at least one")
    return hold_out_learned(rows, splits)


def hold_out_learned(rows: TaskRows, splits: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
    """Return the examples of both splits. If one has none, hold some of all examples out, unless the user asked for those rows.

    Raise RequestError if nothing is learned of the held-out rows that the user asked for."""
    if not rows.evaluation or all(splits):
        return splits
    if rows.hold_out is not None:
        return rows.hold_out(splits[0] + splits[1])
    if not splits[1]:
        raise RequestError(
            f"nothing is learned of any held-out row ({rows.evaluation[0].place} is the first); give others with --eval-data, or "
            "evaluate on none with --eval-size 0"
        )
    return splits
