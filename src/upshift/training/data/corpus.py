"""Read a training corpus: text files, JSON lines, CSV, Parquet, Arrow, or a directory saved by datasets.

Every command that trains or plans on data uses this reader. It decides what one document is: a text file, a JSON line, or a
table row. Documents are read while they are iterated, and are never all in memory. docs/data.md states the rules.

A table is trained on by the column that the user names, else by its columns (row_formats.py): token ids, text, chats, or prompts
with completions. No other column is taken for text: a table without these is rejected, with the names of its columns. Beside
token ids, `labels` and `attention_mask` are used. Any other column with a number for each token is rejected by name.
"""

from __future__ import annotations

import io
import json
import lzma
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from upshift.errors import MissingExtra, RequestError
from upshift.text import find_lone_surrogate
from upshift.training.data.chat_rows import Chat, PromptCompletion, read_chat
from upshift.training.data.data_files import EVALUATION_SPLIT, SPLIT_WORDS, Kind, find_data_files, open_data, say_once
from upshift.training.data.records import (
    Row,
    check_column_names,
    is_number_list,
    read_arrow,
    read_csv,
    read_json,
    read_parquet,
    rows_of_batches,
)
from upshift.training.data.row_formats import (
    TOKEN_COLUMN,
    Columns,
    RowFormat,
    check_data_format,
    find_format,
    list_columns,
)
from upshift.value import Value

LABELS = "labels"
MASK = "attention_mask"
IGNORED = -100
SPECIAL_TOKENS_MASK = "special_tokens_mask"  # ignored: the tokenizer knows its special tokens
SEGMENTS = "token_type_ids"  # ignored if it is all zero, which means one segment


class TokenRow(NamedTuple):
    """A document that is already tokenized.

    ``labels`` has one entry for each id, -100 where nothing is learned. None means that the ids are the labels.
    """

    ids: NDArray[Any]
    labels: NDArray[Any] | None = None


def read_document(record: Mapping[str, Any], columns: Columns, place: str) -> str | TokenRow | None:
    """Return a row's text or token ids, or None if it is empty. Raise RequestError, with the place, for anything else."""
    if columns.name not in record:
        raise RequestError(f"{place} has no column {columns.name!r}; {list_columns(record)}; give it, or leave the row out")
    value = record[columns.name]
    if isinstance(value, str) and columns.name == TOKEN_COLUMN:
        raise RequestError(f"{place}: column {TOKEN_COLUMN!r} holds text, {_shorten(value)}; it must be a list of token ids")
    if value is None or isinstance(value, str):
        return _check_text(value, place)
    if not isinstance(value, np.ndarray) and not _is_token_list(value):
        raise RequestError(f"{place}: column {columns.name!r} holds {_shorten(value)}; it must be text or a list of token ids")
    return _make_token_row(_to_integers(value, columns.name, place), record, columns, place)


def _check_text(text: str | None, place: str) -> str | None:
    """Return the text, or None if it is empty. Raise RequestError if it cannot be encoded."""
    if not text or text.isspace():
        return None
    surrogate = find_lone_surrogate(text)
    if surrogate is not None:
        raise RequestError(f"{place} holds {surrogate}, half of a surrogate pair, which is no text; write the file again")
    return text


def _make_token_row(ids: NDArray[Any], record: Mapping[str, Any], columns: Columns, place: str) -> TokenRow | None:
    for name, value in record.items():
        if name not in (columns.name, LABELS, MASK, SPECIAL_TOKENS_MASK):
            _refuse_token_numbers(name, value, place)
    labels = _token_column(record, LABELS, columns.has_labels, ids, place)
    mask = _token_column(record, MASK, columns.has_mask, ids, place)
    _check_ids(ids, columns.name, place)
    if labels is not None:
        _check_ids(labels[labels != IGNORED], LABELS, place)
    if mask is not None:
        unmasked = _unmasked_range(mask, place)
        ids = ids[unmasked]
        labels = None if labels is None else labels[unmasked]
    return TokenRow(ids, labels) if len(ids) else None


def _token_column(record: Mapping[str, Any], name: str, expected: bool, ids: NDArray[Any], place: str) -> NDArray[Any] | None:
    """Return a column with a number for each token. Raise RequestError if its length is wrong, or only some rows have it."""
    if (name in record) != expected:
        article = "no" if expected else "a"
        others = "have one" if expected else "have none"
        raise RequestError(
            f"{place} has {article} column {name!r} and the rows before it {others}; give it in all rows or in none"
        )
    if not expected:
        return None
    value = record[name]
    if not isinstance(value, np.ndarray) and not _is_token_list(value):
        raise RequestError(
            f"{place}: column {name!r} holds {_shorten(value)}; it must be a list of as many integers as the token ids"
        )
    numbers = _to_integers(value, name, place)
    if len(numbers) != len(ids):
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
    """Raise RequestError if a column that is not used has a number for each token."""
    is_numbers = isinstance(value, np.ndarray) or (
        isinstance(value, list) and bool(value) and all(isinstance(item, int | float) for item in value)
    )
    if is_numbers and not (name == SEGMENTS and not any(value)):
        raise RequestError(
            f"{place}: column {name!r} says something of each token, which is not used; remove the column, "
            f"or say what is learned with labels ({IGNORED}: nothing)"
        )


def _to_integers(value: Any, name: str, place: str) -> NDArray[Any]:
    """Return a list as int64 numbers. Raise RequestError for other numbers."""
    numbers = value if isinstance(value, np.ndarray) else np.array(value, np.int64)
    if numbers.dtype.kind not in "iub":
        raise RequestError(f"{place}: column {name!r} holds an empty value or no integers; tokenize the text again")
    return numbers.astype(np.int64)


def _check_ids(ids: NDArray[Any], name: str, place: str) -> None:
    """Raise RequestError for ids that no vocabulary has."""
    invalid = ids[(ids < 0) | (ids >= 2**31)]
    if len(invalid):
        labels_note = f", or {IGNORED} in labels" if name == LABELS else ""
        raise RequestError(
            f"{place}: column {name!r} holds token id {int(invalid[0])}; ids are 0 to the vocabulary size - 1{labels_note}: "
            "tokenize the text again, padding is added here"
        )


def _is_token_list(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) in (int, bool) and abs(item) < 2**63 for item in value)


def _shorten(value: Any) -> str:
    return json.dumps(value, default=str)[:60]


PIECE_CHARACTERS = 2**18  # characters of a long text file that are in memory at once
DECOMPRESSION_ERRORS = (EOFError, zlib.error, lzma.LZMAError)  # from readers of compressed files, beside OSError


class CorpusSummary(Value):
    """The counts of a corpus."""

    origin: str
    num_documents: int
    num_evaluation_documents: int
    num_skipped_empty: int
    num_skipped_binary: int  # files that are not UTF-8 text


@dataclass(frozen=True)
class TextFile:
    """A document that is too long to be held in memory."""

    path: Path

    def pieces(self) -> Iterator[str]:
        """Yield the text in pieces."""
        with _open_text(self.path) as text:
            while piece := text.read(PIECE_CHARACTERS):
                yield piece


Document = str | TextFile | TokenRow | Chat | PromptCompletion


def content_of(document: Document) -> str:
    """Return what a document is, for messages."""
    if isinstance(document, TokenRow):
        return "token ids"
    if isinstance(document, PromptCompletion):
        return "a prompt and a completion of plain text"
    if isinstance(document, Chat):
        return "a chat" if document.num_prompt_messages is None else "a prompt and a completion of messages"
    return "text"


class Documents:
    """The documents of one split. They are read again whenever they are iterated. The counts are those of the last time."""

    def __init__(self, read: Callable[[Documents], Iterator[tuple[str, Document | None]]], origin: str, num_bytes: int) -> None:
        self._read = read
        self.origin = origin
        self.num_bytes = num_bytes  # size of the files
        self.num_documents = 0
        self.num_empty = 0
        self.binary: list[str] = []
        self.columns: Columns | None = None  # of tables, once a row was read, as is the next
        self.unused_columns: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Document]:
        self.num_documents = 0
        self.num_empty = 0
        self.binary = []
        previous: str | None = None
        try:
            for place, document in self._read(self):
                if document is None:
                    self.num_empty += 1
                    continue
                content = content_of(document)
                if content != (previous or content):
                    raise RequestError(f"{place} holds {content}, the rows before it hold {previous}; give one of the two")
                previous = content
                self.num_documents += 1
                yield document
        except OSError as error:
            reason = error.strerror or error
            raise RequestError(f"cannot read {error.filename or self.origin}: {reason}; check the path and its rights") from None
        except DECOMPRESSION_ERRORS as error:
            raise RequestError(f"{self.origin} is not a complete compressed file ({error}); copy or write it again") from None
        self._report_left_out()

    def first(self) -> Document | None:
        """Return the first document that is not empty, or None if there is none."""
        return next(iter(self), None)

    def _report_left_out(self) -> None:
        if self.num_empty and self.num_documents:
            say_once(f"{self.origin}: {self.num_empty} empty or null rows or files are left out")
        if self.binary and self.num_documents:
            names = ", ".join(self.binary[:5])
            if len(self.binary) > 5:
                names += f" and {len(self.binary) - 5} more"
            say_once(f"{self.origin}: left out, not UTF-8 text: {names}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """A corpus of documents."""

    origin: str
    documents: Documents  # of the training split
    evaluation: Documents | None  # None: the data has no such split, and documents of the training are held out
    is_tokenized: bool
    columns: Columns | None  # of tables

    @property
    def is_chat(self) -> bool:
        """Return whether the documents are chats, or prompts with completions."""
        return self.columns is not None and self.columns.is_chat

    def summary(self) -> CorpusSummary:
        """Return the counts, after the documents were iterated."""
        return CorpusSummary(
            origin=self.origin,
            num_documents=self.documents.num_documents,
            num_evaluation_documents=self.evaluation.num_documents if self.evaluation else 0,
            num_skipped_empty=self.documents.num_empty,
            num_skipped_binary=len(self.documents.binary),
        )


def read_corpus(
    path: Path | str, *, text_column: str | None = None, data_format: RowFormat | None = None, pattern: str | None = None
) -> Corpus:
    """Find the documents under ``path`` and read the first one.

    Raise RequestError for a path without data. Iterating the documents raises it for a row that cannot be used.

    Args:
        path: a file, a folder, or a directory that datasets saved.
        text_column: the column of a table that holds the text.
        data_format: what the rows of a table are.
        pattern: a glob that selects the files of a folder of texts.
    """
    check_data_format(text_column, data_format)
    path = Path(path)
    if not path.exists():
        raise RequestError(
            f"{path} does not exist; give a text file, a folder of texts, .jsonl, .csv, .parquet, or a datasets directory"
        )
    is_saved = path.is_dir() and ((path / "dataset_dict.json").exists() or (path / "state.json").exists())
    open_documents = _open_saved_dataset if is_saved else _open_files
    documents, evaluation = open_documents(path, _Selection(text_column, data_format), pattern)
    first = documents.first()
    if first is None:
        raise RequestError(
            f"{path} holds no documents ({documents.num_empty} empty, {len(documents.binary)} not UTF-8 text); "
            "give at least one with text"
        )
    first_evaluation = None if evaluation is None else evaluation.first()
    if first_evaluation is None and evaluation is not None:
        say_once(f"{evaluation.origin} is empty; documents of the training are held out for evaluation instead")
        evaluation = None
    if first_evaluation is not None and content_of(first_evaluation) != content_of(first):
        contents = f"{content_of(first)}, the other {content_of(first_evaluation)}"
        raise RequestError(f"{path}: one of train and {EVALUATION_SPLIT} holds {contents}; give one of the two")
    return Corpus(
        origin=str(path),
        documents=documents,
        evaluation=evaluation,
        is_tokenized=isinstance(first, TokenRow),
        columns=documents.columns,
    )


class _Selection(NamedTuple):
    """Hold what the user says of the rows of a table."""

    text_column: str | None
    data_format: RowFormat | None


def _open_files(path: Path, selection: _Selection, pattern: str | None) -> tuple[Documents, Documents | None]:
    """Return the training and evaluation documents of a file or a folder."""
    try:
        data_files = find_data_files(path, pattern=pattern)
    except OSError as error:
        raise RequestError(f"cannot read {error.filename or path}: {error.strerror}; check the path and its rights") from None
    if data_files.kind == "text" and any(selection):
        option = f"--text-column {selection.text_column}" if selection.text_column else f"--data-format {selection.data_format}"
        raise RequestError(
            f"{option} is for tables (JSON, CSV, TSV, Parquet, Arrow, a saved datasets directory), "
            f"and {path} is plain text; leave it out"
        )

    def make_documents(files: tuple[Path, ...], origin: str) -> Documents:
        def read(documents: Documents) -> Iterator[tuple[str, Document | None]]:
            if data_files.kind == "text":
                return _read_texts(files, documents, is_alone=path.is_file())
            return _read_tables(files, data_files.kind, _ColumnChooser(selection, documents))

        return Documents(read, origin, sum(file.stat().st_size for file in files))

    evaluation = None
    if data_files.evaluation:
        evaluation = make_documents(data_files.evaluation, f"{path} split {EVALUATION_SPLIT}")
    return make_documents(data_files.training, str(path)), evaluation


def _read_texts(files: tuple[Path, ...], documents: Documents, *, is_alone: bool) -> Iterator[tuple[str, Document | None]]:
    """Yield each file as a document. Leave out files that are not UTF-8 text, or raise RequestError if it is the only one."""
    for file in files:
        try:
            yield str(file), _read_text(file)
        except UnicodeDecodeError:
            if is_alone:
                raise RequestError(f"{file} is not UTF-8 text; convert it, or give .jsonl, .csv or .parquet") from None
            documents.binary.append(file.name)


def _read_text(file: Path) -> str | TextFile | None:
    """Return the text, or a TextFile if it is long, or None if it is empty. Raise UnicodeDecodeError for other bytes."""
    with _open_text(file) as text:
        first_piece = text.read(PIECE_CHARACTERS)
        piece = first_piece
        num_pieces = 0
        is_empty = True
        while piece:
            if "\0" in piece:
                raise UnicodeDecodeError("utf-8", b"\0", 0, 1, "a text has no zero bytes")
            num_pieces += 1
            is_empty = is_empty and piece.isspace()
            piece = text.read(PIECE_CHARACTERS)
    if is_empty:
        return None
    return first_piece if num_pieces == 1 else TextFile(file)


def _open_text(file: Path) -> io.TextIOWrapper:
    return io.TextIOWrapper(open_data(file), encoding="utf-8-sig", newline="")


class _ColumnChooser:
    """Choose the columns to read at the first row or schema. The choice holds for all files."""

    def __init__(self, selection: _Selection, documents: Documents) -> None:
        self._selection = selection
        self._documents = documents
        self.columns: Columns | None = None

    def choose(self, names: Collection[str], empty: Collection[str], origin: str) -> Columns:
        """Return the columns to read. ``empty`` has the columns without a value."""
        if self.columns is None:
            found = find_format(
                names,
                text_column=self._selection.text_column,
                data_format=self._selection.data_format,
                empty=empty,
                origin=origin,
            )
            self.columns = replace(found, has_labels=LABELS in names, has_mask=MASK in names)
            self._documents.columns = self.columns
            if self.columns.is_chat:
                used = self.columns.of_chat(names)
                self._documents.unused_columns = tuple(name for name in names if name not in used)
        return self.columns

    def choose_from_schema(self, schema: Any, origin: str) -> list[str]:
        """Return the columns of an Arrow schema to read: the chosen ones, and all that have a number for each token."""
        import pyarrow.types as kinds

        check_column_names(schema.names, origin)
        empty = [field.name for field in schema if kinds.is_null(field.type)]
        columns = self.choose(schema.names, empty, origin)
        if columns.is_chat:
            return columns.of_chat(schema.names)
        if columns.name not in schema.names:
            raise RequestError(f"{origin} has no column {columns.name!r}; {list_columns(schema.names)}; name one that holds text")
        if not is_number_list(schema.field(columns.name).type):
            return [columns.name]
        chosen = [columns.name]
        for name in schema.names:
            if name in (columns.name, SPECIAL_TOKENS_MASK):
                continue
            if name in (LABELS, MASK) or is_number_list(schema.field(name).type):
                chosen.append(name)
        return chosen


def _read_tables(files: tuple[Path, ...], kind: Kind, chooser: _ColumnChooser) -> Iterator[tuple[str, Document | None]]:
    for file in files:
        if kind == "parquet":
            rows = read_parquet(file, chooser.choose_from_schema)
        elif kind == "arrow":
            rows = read_arrow(file, chooser.choose_from_schema)
        else:
            rows = read_csv(file) if kind == "csv" else read_json(file)
        yield from _read_documents(rows, chooser)


def _read_documents(rows: Iterator[Row], chooser: _ColumnChooser) -> Iterator[tuple[str, Document | None]]:
    for place, row in rows:
        empty = [name for name, value in row.items() if value is None]
        columns = chooser.choose(row, empty, place)
        yield place, read_chat(row, columns, place) if columns.is_chat else read_document(row, columns, place)


def _open_saved_dataset(path: Path, selection: _Selection, pattern: str | None) -> tuple[Documents, Documents | None]:
    """Return the train split and, if there is one, the validation split of a directory that `save_to_disk` wrote."""
    try:
        import datasets
    except ImportError:
        raise MissingExtra(library="datasets", extra="data", purpose="reading a saved datasets directory") from None
    try:
        saved = datasets.load_from_disk(str(path))
    except Exception as error:  # for a damaged directory datasets raises errors of many types
        raise RequestError(f"{path} is not a complete datasets directory ({str(error)[:120]}); save it again") from None
    if not isinstance(saved, datasets.DatasetDict):
        return _saved_split(saved, selection, str(path)), None
    if "train" not in saved:
        raise RequestError(f"{path} has no split 'train'; it has {', '.join(saved)}; give the folder of one split")
    evaluation_name = next((name for name in SPLIT_WORDS[EVALUATION_SPLIT] if name in saved), None)
    other_names = [name for name in saved if name not in ("train", evaluation_name)]
    if other_names:
        say_once(f"{path}: not trained on: split {', '.join(other_names)}, which is left alone")
    evaluation = None
    if evaluation_name is not None:
        evaluation = _saved_split(saved[evaluation_name], selection, f"{path} split {evaluation_name}")
    return _saved_split(saved["train"], selection, f"{path} split train"), evaluation


def _saved_split(dataset: Any, selection: _Selection, origin: str) -> Documents:
    def read(documents: Documents) -> Iterator[tuple[str, Document | None]]:
        chooser = _ColumnChooser(selection, documents)
        columns = chooser.choose_from_schema(dataset.features.arrow_schema, origin)
        tables = dataset.select_columns(columns).with_format("arrow").iter(batch_size=1024)
        yield from _read_documents(rows_of_batches(tables, origin), chooser)

    return Documents(read, origin, dataset.dataset_size or 0)
