"""Read the text or the token ids of a row, with labels and an attention mask beside the ids."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from upshift.errors import RequestError
from upshift.training.data.row_formats import TOKEN_COLUMN, Columns, list_columns
from upshift.training.data.text_files import check_text

LABELS = "labels"
MASK = "attention_mask"
IGNORED = -100
SPECIAL_TOKENS_MASK = "special_tokens_mask"  # left out: the tokenizer knows its special tokens
SEGMENTS = "token_type_ids"  # ignored if it is all zero, which means one segment


class TokenRow(NamedTuple):
    """A document that is already tokenized.

    ``labels`` has one entry for each id, -100 where nothing is learned. None means that the ids are the labels.

    With ``source_length``, the first ids are the input of an encoder, and the labels after them are those of its decoder.
    ``margin`` is of the pair of answers that the row belongs to: by how much the reward of the chosen answer shall be larger.
    ``rating``: whether the answer is a good one. None: the data does not rate it.
    """

    ids: NDArray[Any]
    labels: NDArray[Any] | None = None
    source_length: int | None = None
    margin: float | None = None
    rating: bool | None = None


def read_document(record: Mapping[str, Any], columns: Columns, place: str) -> str | TokenRow | None:
    """Return a row's text or token ids, or None if it is empty. Raise RequestError, with the place, for anything else."""
    if columns.name not in record:
        raise RequestError(f"{place} has no column {columns.name!r}; {list_columns(record)}; give it, or leave the row out")
    value = record[columns.name]
    if isinstance(value, str) and columns.name == TOKEN_COLUMN:
        raise RequestError(f"{place}: column {TOKEN_COLUMN!r} holds text, {_shorten(value)}; it must be a list of token ids")
    if value is None or isinstance(value, str):
        return _check_text(value, place)
    if not isinstance(value, np.ndarray | list):
        raise RequestError(f"{place}: column {columns.name!r} holds {_shorten(value)}; it must be text or a list of token ids")
    return _make_token_row(_to_integers(value, columns.name, place), record, columns, place)


def _check_text(text: str | None, place: str) -> str | None:
    """Return the text, or None if it is empty. Raise RequestError if it cannot be encoded."""
    if not text or text.isspace():
        return None
    check_text(text, place)
    return text


def _make_token_row(ids: NDArray[Any], record: Mapping[str, Any], columns: Columns, place: str) -> TokenRow | None:
    for name, value in record.items():
        if name not in (columns.name, LABELS, MASK, SPECIAL_TOKENS_MASK):
            _refuse_token_numbers(name, value, place)
    labels = _token_column(record, LABELS, columns.has_labels, None if columns.is_pair else ids, place)
    mask = _token_column(record, MASK, columns.has_mask, ids, place)
    _check_ids(ids, columns.name, place)
    if labels is not None:
        _check_ids(labels[labels != IGNORED], LABELS, place)
    if mask is not None:
        unmasked = _unmasked_range(mask, place)
        ids = ids[unmasked]
        labels = labels if labels is None or columns.is_pair else labels[unmasked]
    if columns.is_pair and labels is not None:
        return make_pair(ids, labels) if len(ids) and len(labels) else None
    return TokenRow(ids, labels) if len(ids) else None


def make_pair(source: NDArray[Any], labels: NDArray[Any]) -> TokenRow:
    """Return a row whose first ids an encoder reads, and whose labels after them a decoder learns."""
    ids = np.concatenate([source, np.zeros(len(labels), np.int64)])  # the decoder's inputs are made from the labels
    return TokenRow(ids, np.concatenate([np.full(len(source), IGNORED), labels]), len(source))


def _token_column(
    record: Mapping[str, Any], name: str, expected: bool, ids: NDArray[Any] | None, place: str
) -> NDArray[Any] | None:
    """Return a column with a number for each of the ids, if they are given.

    Raise RequestError if its length is wrong, or if only some rows have the column.
    """
    if (name in record) != expected:
        article = "no" if expected else "a"
        others = "have one" if expected else "have none"
        raise RequestError(
            f"{place} has {article} column {name!r} and the rows before it {others}; give it in all rows or in none"
        )
    if not expected:
        return None
    value = record[name]
    if not isinstance(value, np.ndarray | list):
        raise RequestError(f"{place}: column {name!r} holds {_shorten(value)}; it must be a list of integers, one for each token")
    numbers = _to_integers(value, name, place)
    if ids is not None and len(numbers) != len(ids):
        raise RequestError(f"{place} has {len(ids)} token ids and {len(numbers)} in column {name!r}; give one for each token id")
    return numbers


def _unmasked_range(mask: NDArray[Any], place: str) -> slice:
    """Return the range where the mask is 1. Padding at both ends is left out. Raise RequestError for a gap within the text."""
    invalid = mask[(mask != 0) & (mask != 1)]
    if len(invalid):
        raise RequestError(f"{place}: attention_mask holds {int(invalid[0])}; it must be 0 or 1")
    ones = np.flatnonzero(mask)
    if not len(ones):
        return slice(0, 0)
    first = int(ones[0])
    last = int(ones[-1])
    if len(ones) != last - first + 1:
        raise RequestError(
            f"{place}: attention_mask hides tokens within the text, not only padding at its ends, which is not trained on; "
            "leave the hidden tokens out of the row"
        )
    return slice(first, last + 1)


def _refuse_token_numbers(name: str, value: Any, place: str) -> None:
    """Raise RequestError if a column that is not used has numbers that may belong to the tokens."""
    if _holds_numbers(value) and not (name == SEGMENTS and not np.any(value)):
        raise RequestError(
            f"{place}: column {name!r} says something of each token, which is not used; remove the column, "
            f"or say what is learned with labels ({IGNORED}: nothing)"
        )


def _holds_numbers(value: Any) -> bool:
    """Return whether a value is a list of numbers, or of such lists."""
    if isinstance(value, np.ndarray):
        return True
    if not isinstance(value, list):
        return False
    return bool(value) and all(isinstance(item, int | float) or _holds_numbers(item) for item in value)


def _to_integers(value: Any, name: str, place: str) -> NDArray[Any]:
    """Return a list as int64 numbers. Raise RequestError for other numbers. Only a mask may have truth values."""
    items = value if isinstance(value, list) else value[:1].tolist()  # the numbers of an array have one type
    types = {type(item) for item in items}
    if types - {int, bool} or (bool in types and name != MASK):
        text = "" if name in (TOKEN_COLUMN, LABELS, MASK) else "text or "
        raise RequestError(
            f"{place}: column {name!r} holds {_shorten(value)}; it must be {text}a list of integers (1, not 1.0) "
            "without empty values"
        )
    highest = max(items, default=0) if isinstance(value, list) else int(value.max(initial=0))
    lowest = min(items, default=0) if isinstance(value, list) else 0
    if highest >= 2**63 or lowest < -(2**63):
        raise _no_such_id(highest if highest >= 2**63 else lowest, name, place)
    return np.array(value, np.int64)


def _check_ids(ids: NDArray[Any], name: str, place: str) -> None:
    """Raise RequestError for ids that no vocabulary has."""
    invalid = ids[(ids < 0) | (ids >= 2**31)]
    if len(invalid):
        raise _no_such_id(int(invalid[0]), name, place)


def _no_such_id(number: int, name: str, place: str) -> RequestError:
    labels_note = f", or {IGNORED} in labels" if name == LABELS else ""
    return RequestError(
        f"{place}: column {name!r} holds token id {number}; ids are 0 to the vocabulary size - 1{labels_note}: "
        "tokenize the text again, padding is added here"
    )


def _shorten(value: Any) -> str:
    return json.dumps(value.tolist() if isinstance(value, np.ndarray) else value, default=str)[:60]
