"""Decide which column of a table is trained on, and check what stands in it.

The rule: the column that was asked for, else `input_ids` (already tokenized), else `text`. Nothing else is taken for
text: a table without these is refused with the names of its columns. Beside token ids, `labels` and `attention_mask` are
honoured; any other column with a number for each token is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from upshift.characters import half_of_pair
from upshift.errors import RequestError

TEXT_COLUMN = "text"
TOKEN_COLUMN = "input_ids"
LABELS = "labels"
MASK = "attention_mask"
IGNORED = -100
OF_TOKENIZER = "special_tokens_mask"  # marks the special tokens, which the tokenizer itself knows
SEGMENTS = "token_type_ids"  # all zero: one segment, as here
CHAT_COLUMNS = frozenset((
    "messages", "conversations", "conversation", "dialog", "dialogue", "turns", "prompt", "completion", "response", "instruction",
    "input", "output", "question", "answer", "query", "context", "chosen", "rejected", "system", "user", "assistant",
))  # fmt: skip


class TokenRow(NamedTuple):
    """A document that is tokenized already.

    ``labels`` has as many entries, -100 where nothing is learned. None means the ids themselves.
    """

    ids: NDArray[Any]
    labels: NDArray[Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns of a table that are read: the text or the token ids, and what goes with the ids."""

    name: str
    labels: bool
    mask: bool


def choose_column(columns: Collection[str], *, asked: str | None, empty: Collection[str] = (), origin: str) -> str:
    """Return the column to train on. Raise RequestError if none is named or known.

    ``empty`` has the columns without a value.
    """
    if asked is not None:
        if asked in columns:
            return asked
        raise RequestError(f"{origin} has no column {asked!r}; {_named(columns)}; name one that holds text")
    if TOKEN_COLUMN in columns and not (TOKEN_COLUMN in empty and TEXT_COLUMN in columns):
        return TOKEN_COLUMN
    if TEXT_COLUMN in columns:
        return TEXT_COLUMN
    chat = [name for name in columns if name in CHAT_COLUMNS]
    if chat:
        raise RequestError(
            f"{origin} holds chats or pairs ({', '.join(chat)}), which are not trained on yet; {_named(columns)}; write each as "
            "one text with tokenizer.apply_chat_template(.., tokenize=False) into a column 'text', or name a column of "
            "plain text with --text-column"
        )
    raise RequestError(
        f"{origin} has no column 'text'; {_named(columns)}; name the one that holds the text with --text-column "
        "(text_column in Python)"
    )


def columns_of(columns: Collection[str], name: str) -> Columns:
    return Columns(name=name, labels=LABELS in columns, mask=MASK in columns)


def document_of(record: Mapping[str, Any], columns: Columns, place: str) -> str | TokenRow | None:
    """Return a row's text or token ids, or None if it is empty. Raise RequestError over anything else, naming its place."""
    if columns.name not in record:
        raise RequestError(f"{place} has no column {columns.name!r}; {_named(record)}; give it, or leave the row out")
    value = record[columns.name]
    if isinstance(value, str) and columns.name == TOKEN_COLUMN:
        raise RequestError(f"{place}: column {TOKEN_COLUMN!r} holds text, {_shown(value)}; it must be a list of token ids")
    if value is None or isinstance(value, str):
        return _checked_text(value, place)
    if not isinstance(value, np.ndarray) and not _is_token_list(value):
        raise RequestError(f"{place}: column {columns.name!r} holds {_shown(value)}; it must be text or a list of token ids")
    return _token_row(_integers(value, columns.name, place), record, columns, place)


def _checked_text(text: str | None, place: str) -> str | None:
    if not text or text.isspace():
        return None
    half = half_of_pair(text)
    if half is not None:
        raise RequestError(f"{place} holds {half}, half of a surrogate pair, which is no text; write the file again")
    return text


def _token_row(ids: NDArray[Any], record: Mapping[str, Any], columns: Columns, place: str) -> TokenRow | None:
    for name, value in record.items():
        if name not in (columns.name, LABELS, MASK, OF_TOKENIZER):
            _refuse_numbers_of_tokens(name, value, place)
    labels = _companion(record, LABELS, columns.labels, ids, place)
    mask = _companion(record, MASK, columns.mask, ids, place)
    _refuse_negative(ids, columns.name, place)
    if labels is not None:
        _refuse_negative(labels[labels != IGNORED], LABELS, place)
    if mask is not None:
        kept = _unmasked(mask, place)
        ids = ids[kept]
        labels = None if labels is None else labels[kept]
    return TokenRow(ids, labels) if len(ids) else None


def _companion(record: Mapping[str, Any], name: str, expected: bool, ids: NDArray[Any], place: str) -> NDArray[Any] | None:
    """Return a column with a number for each token. Raise RequestError if its length differs, or only some rows have it."""
    if (name in record) != expected:
        there = "no" if expected else "a"
        others = "have one" if expected else "have none"
        raise RequestError(f"{place} has {there} column {name!r} and the rows before it {others}; give it in all rows or in none")
    if not expected:
        return None
    value = record[name]
    if not isinstance(value, np.ndarray) and not _is_token_list(value):
        raise RequestError(
            f"{place}: column {name!r} holds {_shown(value)}; it must be a list of as many integers as the token ids"
        )
    numbers = _integers(value, name, place)
    if len(numbers) != len(ids):
        raise RequestError(f"{place} has {len(ids)} token ids and {len(numbers)} in column {name!r}; give one for each token id")
    return numbers


def _unmasked(mask: NDArray[Any], place: str) -> slice:
    """Return the range where the mask is 1. Padding before and behind is left out; a gap within a text is refused."""
    if ((mask != 0) & (mask != 1)).any():
        raise RequestError(f"{place}: attention_mask holds {int(mask[(mask != 0) & (mask != 1)][0])}; it must be 0 or 1")
    ones = np.flatnonzero(mask)
    if not len(ones):
        return slice(0, 0)
    first, last = int(ones[0]), int(ones[-1])
    if len(ones) != last - first + 1:
        raise RequestError(
            f"{place}: attention_mask hides tokens within the text, not only padding at its ends, which is not trained on; "
            "leave the hidden tokens out of the row"
        )
    return slice(first, last + 1)


def _refuse_numbers_of_tokens(name: str, value: Any, place: str) -> None:
    is_numbers = isinstance(value, np.ndarray) or (
        isinstance(value, list) and bool(value) and all(isinstance(item, int | float) for item in value)
    )
    if is_numbers and not (name == SEGMENTS and not any(value)):
        raise RequestError(
            f"{place}: column {name!r} says something of each token, which is not used; remove the column, "
            f"or say what is learned with labels ({IGNORED}: nothing)"
        )


def _integers(value: Any, name: str, place: str) -> NDArray[Any]:
    numbers = value if isinstance(value, np.ndarray) else np.array(value, np.int64)
    if numbers.dtype.kind not in "iub":
        raise RequestError(f"{place}: column {name!r} holds an empty value or no integers; tokenize the text again")
    return numbers.astype(np.int64)


def _refuse_negative(ids: NDArray[Any], name: str, place: str) -> None:
    wrong = ids[(ids < 0) | (ids >= 2**31)]
    if len(wrong):
        more = f", or {IGNORED} in labels" if name == LABELS else ""
        raise RequestError(
            f"{place}: column {name!r} holds token id {int(wrong[0])}; ids are 0 to the vocabulary size - 1{more}: "
            "tokenize the text again, padding is added here"
        )


def _is_token_list(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) in (int, bool) and abs(item) < 2**63 for item in value)


def _named(columns: Collection[str]) -> str:
    return f"its columns are {', '.join(map(str, columns)) or 'none'}"


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)[:60]
