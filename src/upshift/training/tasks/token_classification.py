"""Make batches of words and their tags for a classifier of tokens.

The first token of a word has the word's label, and no other token has one, as in transformers' run_ner.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from upshift.errors import RequestError
from upshift.training.data.chat_rows import decode_json
from upshift.training.data.data_files import say_once
from upshift.training.data.row_formats import list_columns
from upshift.training.data.rows.token_rows import IGNORED
from upshift.training.tasks.labels import Label, check_label, find_labels
from upshift.training.tasks.metrics.entities import tag_metrics
from upshift.training.tasks.rows import TaskData, TaskInputs, TaskRow, TaskRows
from upshift.training.tasks.texts import TextExample, TextReader

WORD_COLUMNS = ("tokens", "words")
TAG_COLUMNS = ("ner_tags", "tags", "labels", "pos_tags")


def word_columns(names: Collection[str]) -> tuple[str, str] | None:
    """Return the columns of the words and of their tags, or None for other rows."""
    words = next((name for name in WORD_COLUMNS if name in names), None)
    tags = next((name for name in TAG_COLUMNS if name in names), None)
    return None if words is None or tags is None else (words, tags)


def prepare_token_classification(inputs: TaskInputs) -> TaskData:
    """Return the examples of rows of words with tags."""
    rows = inputs.rows
    reader = TextReader(inputs.source, inputs.options, inputs.sequence_length)
    reader.need_fast("token classification")
    reader.take_words()
    words_of_row = {id(row): _read_words(row, rows) for row in (*rows.training, *rows.evaluation)}
    tags = {tag for _, row_tags in words_of_row.values() for tag in row_tags}
    if not tags:
        raise RequestError(f"{rows.origin} has no row with a word; give at least one")
    names = word_columns(rows.training[0].fields) or WORD_COLUMNS
    labels = find_labels(inputs.source, tags, has_head=inputs.has_head, class_names=rows.class_names.get(names[1], ()))
    say_once(
        f"{rows.origin}: token classification, the words of {names[0]!r} with the tags of {names[1]!r} "
        f"({len(labels.names)} labels: {labels.shown()})"
    )

    def read(row: TaskRow) -> TextExample | None:
        words, row_tags = words_of_row.pop(id(row))
        if not words:
            return None
        encoding = reader.encode(words, is_split_into_words=True)
        if encoding is None:
            return None
        numbers = [labels.number(tag, row.place) for tag in row_tags]
        learned = _labels_of_tokens(encoding.word_ids(), numbers)
        return reader.example(encoding, learned) if (learned != IGNORED).any() else None

    def collate(examples: Sequence[TextExample]) -> dict[str, Any]:
        padded = reader.pad(examples)
        width = padded["input_ids"].shape[1]
        return {**padded, "labels": reader.pad_side([example.learned for example in examples], width)}

    def describe(example: TextExample) -> list[tuple[str, bool]]:
        parts = []
        for token, label in zip(example.ids.tolist(), example.learned.tolist(), strict=True):
            parts.append((f"{reader.tokenizer.decode([token])} ", False))
            if label != IGNORED:
                parts.append((labels.names[label], True))
                parts.append((" ", False))
        return parts

    return reader.read_data(
        rows,
        read,
        inputs.progress,
        collate=collate,
        describe=describe,
        new_head=labels.new_head(inputs.source),
        metrics=tag_metrics(labels.names),
    )


def _labels_of_tokens(places: Sequence[int | None], numbers: Sequence[int]) -> np.ndarray:
    """Return the labels of tokens. ``places``: the word of each token, None for a special token."""
    learned = np.full(len(places), IGNORED, np.int32)
    position = 0
    for word, group in groupby(places):
        if word is not None:
            learned[position] = numbers[word]
        position += len(list(group))
    return learned


def _read_words(row: TaskRow, rows: TaskRows) -> tuple[list[str], list[Label]]:
    """Return the words and the tags of a row. Raise RequestError if there are not as many tags as words."""
    names = word_columns(row.fields)
    if names is None:
        raise RequestError(
            f"{row.place} has no columns 'tokens' and 'ner_tags' or 'tags'; {list_columns(row.fields)}; rename those of the "
            "words and of their tags"
        )
    words, tags = (_list_of(row, name) for name in names)
    if len(words) != len(tags):
        raise RequestError(f"{row.place} has {len(words)} words and {len(tags)} tags; give each word one tag")
    other = next((word for word in words if not isinstance(word, str)), None)
    if other is not None:
        raise RequestError(f"{row.place} has the word {other!r:.60}; it must be text")
    class_names = rows.class_names.get(names[1], ())
    return words, [check_label(tag, row.place, class_names) for tag in tags]


def _list_of(row: TaskRow, name: str) -> list[Any]:
    value = decode_json(row.fields[name])
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if value is None:
        return []
    if not isinstance(value, list):
        raise RequestError(f"{row.place} has {name} {value!r:.60}; it must be a list, with one entry for each word")
    return value
