"""Make batches of texts, or of pairs of texts, with labels: one label, several ones, or a number (regression)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from upshift.errors import RequestError
from upshift.models.config import label_names
from upshift.models.source import ModelSource
from upshift.text import join_names
from upshift.training.data.chat_rows import decode_json
from upshift.training.data.data_files import say_once
from upshift.training.data.row_formats import list_columns
from upshift.training.tasks.labels import NO_LABEL, Labels, check_label, find_labels
from upshift.training.tasks.metrics.classes import class_metrics, number_metrics, several_class_metrics
from upshift.training.tasks.metrics.task_metrics import TaskMetrics
from upshift.training.tasks.rows import NewHead, TaskData, TaskInputs, TaskRow, TaskRows
from upshift.training.tasks.texts import TextExample, TextReader, text_of

TEXT_COLUMNS = (  # of GLUE's tables and their like; the first that a table has
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("text", "text_pair"),
    ("text",),
    ("sentence",),
)
LABEL_COLUMNS = ("label", "labels")
ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
DESCRIPTIONS: dict[ProblemType, str] = {
    "single_label_classification": "text classification",
    "multi_label_classification": "text classification with several labels",
    "regression": "regression",
}
METRICS: dict[ProblemType, Callable[[Any], TaskMetrics]] = {
    "single_label_classification": class_metrics,
    "multi_label_classification": several_class_metrics,
    "regression": number_metrics,
}


def text_columns(names: Collection[str]) -> tuple[str, ...] | None:
    """Return the columns of the texts, or None for a table without them or without labels."""
    if not any(name in names for name in LABEL_COLUMNS):
        return None
    return next((columns for columns in TEXT_COLUMNS if all(name in names for name in columns)), None)


@dataclass(frozen=True)
class Targets:
    """The targets of the rows. ``number`` makes one of a row's value: None if nothing is learned, an error for a wrong value."""

    problem_type: ProblemType
    number: Callable[[Any, str], Any]
    shown: str
    show: Callable[[Any], str]
    new_head: NewHead | None


def prepare_text_classification(inputs: TaskInputs) -> TaskData:
    """Return the examples of texts with labels."""
    rows = inputs.rows
    columns = _find_columns(rows.training[0], inputs.options.text_column)
    label = next((name for name in LABEL_COLUMNS if name in rows.training[0].fields), LABEL_COLUMNS[0])
    targets = _find_targets(inputs.source, rows, label, has_head=inputs.has_head)
    say_once(
        f"{rows.origin}: {DESCRIPTIONS[targets.problem_type]}, the {'pairs' if len(columns) == 2 else 'texts'} of "
        f"{' and '.join(map(repr, columns))} with {label!r}{targets.shown}"
    )
    reader = TextReader(inputs.source, inputs.options, inputs.sequence_length)

    def read(row: TaskRow) -> TextExample | None:
        missing = next((name for name in (*columns, label) if name not in row.fields), None)
        if missing is not None:
            raise RequestError(f"{row.place} has no column {missing!r}; {list_columns(row.fields)}; add it, or leave the row out")
        value = row.fields[label]
        texts = [text_of(row.fields[name], name, row.place) for name in columns]
        if texts[0] is None or _is_missing(value):
            return None
        learned = targets.number(value, row.place)
        if learned is None:
            return None
        encoding = reader.encode(*(text or "" for text in texts))
        return None if encoding is None else reader.example(encoding, learned)

    def collate(examples: Sequence[TextExample]) -> dict[str, Any]:
        return {**reader.pad(examples), "labels": torch.tensor([example.learned for example in examples])}

    def describe(example: TextExample) -> list[tuple[str, bool]]:
        text = reader.tokenizer.decode(example.ids.tolist(), clean_up_tokenization_spaces=False)
        return [(f"{text} ", False), (targets.show(example.learned), True)]

    return reader.read_data(
        rows,
        read,
        inputs.progress,
        collate=collate,
        describe=describe,
        new_head=targets.new_head,
        metrics=METRICS[targets.problem_type](lambda example: example.learned),
    )


def _find_columns(row: TaskRow, text_column: str | None) -> tuple[str, ...]:
    """Return the columns of the texts. Raise RequestError if there are none."""
    columns = text_columns(row.fields) if text_column is None else (text_column,)
    if columns is None or columns[0] not in row.fields:
        raise RequestError(
            f"{row.place} has no columns {text_column or 'text'!r} and 'label'; {list_columns(row.fields)}; rename the column "
            "of the labels to label, and that of the texts to text"
        )
    return columns


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value)


def _find_targets(source: ModelSource, rows: TaskRows, column: str, *, has_head: bool) -> Targets:
    """Return what is learned, by the values of all rows and by the model's own head."""
    values = [_plain(value) for value in rows.values(column)]
    given = [value for value in values if not _is_missing(value)]
    if not given:
        raise RequestError(f"{rows.origin} has no label in the column {column!r}; rename the column of the labels to {column}")
    config = source.hf_config
    own_type = config.problem_type if has_head else None
    class_names = rows.class_names.get(column, ())
    if isinstance(given[0], list):
        return _several_labels(source, rows, column, class_names, has_head=has_head)
    numbers = _numbers_of(given)
    has_fractions = numbers is not None and any(isinstance(number, float) for number in numbers)
    if own_type == "regression" or has_fractions or (has_head and config.num_labels == 1):
        return _regression(source, has_head=has_head)
    are_written = numbers is not None and isinstance(given[0], str)  # a table of text writes numbers as texts
    known = label_names(config) if has_head else ()

    def label(value: Any, place: str) -> str | int:
        plain = _plain(value)
        is_number = are_written and isinstance(plain, str) and plain not in known and plain.strip().isdecimal()
        return check_label(int(plain) if is_number else plain, place, class_names)

    with_label = [row for row in _rows_with(rows, column) if _plain(row.fields[column]) != NO_LABEL]
    checked = {label(row.fields[column], row.place) for row in with_label}
    if not checked:
        raise RequestError(f"{rows.origin} has the label {NO_LABEL} alone, which marks rows without a label; give at least one")
    labels = find_labels(source, checked, has_head=has_head, class_names=class_names)
    return Targets(
        problem_type="single_label_classification",
        number=lambda value, place: None if _plain(value) == NO_LABEL else labels.number(label(value, place), place),
        shown=f" ({len(labels.names)} labels: {labels.shown()})",
        show=lambda number: labels.names[number],
        new_head=labels.new_head(source, problem_type="single_label_classification"),
    )


def _rows_with(rows: TaskRows, column: str) -> list[TaskRow]:
    every = (*rows.training, *rows.evaluation)
    return [row for row in every if column in row.fields and not _is_missing(_plain(row.fields[column]))]


def _plain(value: Any) -> Any:
    """Return a value of a row as Python has it: lists of arrays and of JSON texts, too."""
    return value.tolist() if isinstance(value, np.ndarray) else decode_json(value)


def _numbers_of(values: Sequence[Any]) -> list[int | float] | None:
    """Return values as numbers, int where none has a fraction, or None if one is no number."""
    numbers: list[int | float] = []
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            return None
        try:
            number = float(value)
        except ValueError:
            return None
        is_whole = isinstance(value, int) or (isinstance(value, str) and value.strip().lstrip("+-").isdecimal())
        numbers.append(int(value) if is_whole else number)
    return numbers


def _regression(source: ModelSource, *, has_head: bool) -> Targets:
    def number(value: Any, place: str) -> float:
        try:
            target = float(value)
        except (TypeError, ValueError):
            target = math.nan
        if not math.isfinite(target):
            raise RequestError(f"{place} has the label {value!r:.60}; the labels are numbers, so give one")
        return target

    new_head = None
    if not has_head or source.hf_config.num_labels != 1:
        say_once(f"{source.base_reference} gets a new head for one number, whose weights are random")
        new_head = NewHead(("LABEL_0",), "regression")
    return Targets("regression", number, " (a number)", lambda target: f"{target:g}", new_head)


def _several_labels(source: ModelSource, rows: TaskRows, column: str, class_names: Sequence[str], *, has_head: bool) -> Targets:
    """Return the targets of lists: one 0 or 1 for each label, or the names or the numbers of the labels."""
    lists = {row.place: _list_of(row.fields[column], row.place) for row in _rows_with(rows, column)}
    are_indicators = _are_indicators(list(lists.values())) and not class_names
    if are_indicators:
        width = len(next(iter(lists.values())))
        is_known = has_head and source.hf_config.num_labels == width
        names = label_names(source.hf_config) if is_known else tuple(f"LABEL_{number}" for number in range(width))
        labels = Labels(names, are_new=not is_known)
    else:
        every = {check_label(entry, place, class_names) for place, entries in lists.items() for entry in entries}
        labels = find_labels(source, every, has_head=has_head, class_names=class_names)

    def number(value: Any, place: str) -> list[float]:
        entries = _list_of(value, place)
        if are_indicators:
            return [float(entry) for entry in entries]
        target = [0.0] * len(labels.names)
        for entry in entries:
            target[labels.number(check_label(entry, place, class_names), place)] = 1.0
        return target

    def show(target: Sequence[float]) -> str:
        return join_names(name for name, share in zip(labels.names, target, strict=True) if share)

    return Targets(
        problem_type="multi_label_classification",
        number=number,
        shown=f" ({len(labels.names)} labels: {labels.shown()})",
        show=show,
        new_head=labels.new_head(source, problem_type="multi_label_classification"),
    )


def _list_of(value: Any, place: str) -> list[Any]:
    entries = _plain(value)
    if not isinstance(entries, list):
        raise RequestError(f"{place} has the label {value!r:.60}, and other rows have lists; give one of the two")
    return entries


def _are_indicators(values: Sequence[list[Any]]) -> bool:
    """Return whether lists have one number from 0 to 1 for each of several labels."""
    lengths = {len(value) for value in values}
    if len(lengths) > 1 or max(lengths) < 2:
        return False
    return all(isinstance(entry, int | float) and 0 <= entry <= 1 for value in values for entry in value)
