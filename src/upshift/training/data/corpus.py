"""Read a training corpus from what people have: text files, JSON lines, CSV, Parquet, Arrow, or a directory saved by datasets.

This is the one reader of every command that trains or plans on data. It decides what one document is: a text file, a JSON
line, a table row. Documents are read while they are iterated and never all in memory. docs/data.md states the rules.
"""

from __future__ import annotations

import io
import lzma
import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upshift.errors import MissingExtra, RequestError
from upshift.training.data.columns import (
    LABELS,
    MASK,
    OF_TOKENIZER,
    Columns,
    TokenRow,
    choose_column,
    columns_of,
    document_of,
)
from upshift.training.data.data_files import EVALUATION_SPLIT, SPLIT_WORDS, Kind, find_data_files, open_data, say_once
from upshift.training.data.records import (
    Row,
    check_column_names,
    is_number_list,
    read_arrow,
    read_csv,
    read_json,
    read_parquet,
    rows_of,
)
from upshift.value import Value

PIECE_CHARACTERS = 2**18  # of a longer text file that are in memory at once
DAMAGED = (EOFError, zlib.error, lzma.LZMAError)  # by readers of compressed files, beside OSError


class CorpusSummary(Value):
    origin: str
    num_documents: int
    num_evaluation_documents: int
    num_skipped_empty: int
    num_skipped_binary: int  # files that are not UTF-8 text


@dataclass(frozen=True)
class TextFile:
    """One document that is too long to be held in memory."""

    path: Path

    def pieces(self) -> Iterator[str]:
        with _opened_text(self.path) as text:
            while piece := text.read(PIECE_CHARACTERS):
                yield piece


Document = str | TextFile | TokenRow


class Documents:
    """The documents of one split, read anew whenever they are iterated. The counts are those of the last iteration."""

    def __init__(self, read: Callable[[Documents], Iterator[tuple[str, Document | None]]], origin: str, num_bytes: int) -> None:
        self._read = read
        self.origin = origin
        self.num_bytes = num_bytes  # of the files
        self.num_documents = 0
        self.num_empty = 0
        self.binary: list[str] = []

    def __iter__(self) -> Iterator[Document]:
        self.num_documents, self.num_empty, self.binary = 0, 0, []
        is_tokenized: bool | None = None
        try:
            for place, document in self._read(self):
                if document is None:
                    self.num_empty += 1
                    continue
                if is_tokenized is None:
                    is_tokenized = isinstance(document, TokenRow)
                if is_tokenized != isinstance(document, TokenRow):
                    this, before = ("text", "token ids") if is_tokenized else ("token ids", "text")
                    raise RequestError(f"{place} holds {this}, the rows before it hold {before}; give one of the two")
                self.num_documents += 1
                yield document
        except OSError as error:
            reason = error.strerror or error
            raise RequestError(f"cannot read {error.filename or self.origin}: {reason}; check the path and its rights") from None
        except DAMAGED as error:
            raise RequestError(f"{self.origin} is not a complete compressed file ({error}); copy or write it again") from None
        self._say_left_out()

    def first(self) -> Document | None:
        """Return the first document that is not empty, or None if there is none."""
        return next(iter(self), None)

    def _say_left_out(self) -> None:
        if self.num_empty and self.num_documents:
            say_once(f"{self.origin}: {self.num_empty} empty or null rows or files are left out")
        if self.binary and self.num_documents:
            names = ", ".join(self.binary[:5]) + (f" and {len(self.binary) - 5} more" if len(self.binary) > 5 else "")
            say_once(f"{self.origin}: left out, not UTF-8 text: {names}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """A corpus of documents.

    ``evaluation`` is the split that the data has for it. None means that it has none, and that documents of the training are
    held out.
    """

    origin: str
    documents: Documents
    evaluation: Documents | None
    is_tokenized: bool

    def summary(self) -> CorpusSummary:
        """Return the counts. The documents must have been iterated."""
        return CorpusSummary(
            origin=self.origin,
            num_documents=self.documents.num_documents,
            num_evaluation_documents=self.evaluation.num_documents if self.evaluation else 0,
            num_skipped_empty=self.documents.num_empty,
            num_skipped_binary=len(self.documents.binary),
        )


def read_corpus(path: Path | str, *, text_column: str | None = None, pattern: str | None = None) -> Corpus:
    """Find the documents under ``path`` and read the first. ``pattern`` is a glob that selects the files of a folder of texts.

    Raise RequestError here over a path without data, and while documents are iterated over a row that cannot be used.
    """
    path = Path(path)
    if not path.exists():
        raise RequestError(
            f"{path} does not exist; give a text file, a folder of texts, .jsonl, .csv, .parquet, or a datasets directory"
        )
    is_saved = path.is_dir() and ((path / "dataset_dict.json").exists() or (path / "state.json").exists())
    documents, evaluation = (_saved if is_saved else _in_files)(path, text_column, pattern)
    first = documents.first()
    if first is None:
        raise RequestError(
            f"{path} holds no documents ({documents.num_empty} empty, {len(documents.binary)} not UTF-8 text); "
            "give at least one with text"
        )
    held_out = None if evaluation is None else evaluation.first()
    if held_out is None and evaluation is not None:
        say_once(f"{evaluation.origin} is empty; documents of the training are held out for evaluation instead")
        evaluation = None
    if held_out is not None and isinstance(held_out, TokenRow) != isinstance(first, TokenRow):
        raise RequestError(f"{path}: one of train and {EVALUATION_SPLIT} holds text, the other token ids; give one of the two")
    return Corpus(origin=str(path), documents=documents, evaluation=evaluation, is_tokenized=isinstance(first, TokenRow))


def _in_files(path: Path, text_column: str | None, pattern: str | None) -> tuple[Documents, Documents | None]:
    try:
        found = find_data_files(path, pattern=pattern)
    except OSError as error:
        raise RequestError(f"cannot read {error.filename or path}: {error.strerror}; check the path and its rights") from None
    if found.kind == "text" and text_column is not None:
        raise RequestError(
            f"--text-column {text_column} is for tables (JSON, CSV, TSV, Parquet, Arrow, a saved datasets directory), "
            f"and {path} is plain text; leave it out"
        )

    def of_files(files: tuple[Path, ...], origin: str) -> Documents:
        def read(documents: Documents) -> Iterator[tuple[str, Document | None]]:
            if found.kind == "text":
                return _texts(files, documents, is_alone=path.is_file())
            return _rows(files, found.kind, text_column)

        return Documents(read, origin, sum(file.stat().st_size for file in files))

    evaluation = of_files(found.evaluation, f"{path} split {EVALUATION_SPLIT}") if found.evaluation else None
    return of_files(found.training, str(path)), evaluation


def _texts(files: tuple[Path, ...], documents: Documents, *, is_alone: bool) -> Iterator[tuple[str, Document | None]]:
    for file in files:
        try:
            yield str(file), _text_of(file)
        except UnicodeDecodeError:
            if is_alone:
                raise RequestError(f"{file} is not UTF-8 text; convert it, or give .jsonl, .csv or .parquet") from None
            documents.binary.append(file.name)


def _text_of(file: Path) -> str | TextFile | None:
    """Return the text, a TextFile if it is long, or None if it is empty. Raise UnicodeDecodeError over other bytes."""
    with _opened_text(file) as text:
        start = text.read(PIECE_CHARACTERS)
        piece, num_pieces, is_empty = start, 0, True
        while piece:
            if "\0" in piece:
                raise UnicodeDecodeError("utf-8", b"\0", 0, 1, "a text has no zero bytes")
            num_pieces += 1
            is_empty = is_empty and piece.isspace()
            piece = text.read(PIECE_CHARACTERS)
    if is_empty:
        return None
    return start if num_pieces == 1 else TextFile(file)


def _opened_text(file: Path) -> io.TextIOWrapper:
    return io.TextIOWrapper(open_data(file), encoding="utf-8-sig", newline="")


class _Chooser:
    """A chooser of the columns that are read: chosen at the first row or schema, the same for all files."""

    def __init__(self, text_column: str | None) -> None:
        self._text_column = text_column
        self.columns: Columns | None = None

    def of(self, names: Collection[str], empty: Collection[str], origin: str) -> Columns:
        if self.columns is None:
            name = choose_column(names, asked=self._text_column, empty=empty, origin=origin)
            self.columns = columns_of(names, name)
        return self.columns

    def wanted(self, schema: Any, origin: str) -> list[str]:
        """Return the columns of an Arrow schema that a row needs: the chosen one, and all with a number for each token."""
        import pyarrow.types as kinds

        check_column_names(schema.names, origin)
        columns = self.of(schema.names, [field.name for field in schema if kinds.is_null(field.type)], origin)
        if columns.name not in schema.names:
            choose_column(schema.names, asked=columns.name, origin=origin)
        if not is_number_list(schema.field(columns.name).type):
            return [columns.name]
        others = [name for name in schema.names if name not in (columns.name, OF_TOKENIZER)]
        return [columns.name, *(name for name in others if name in (LABELS, MASK) or is_number_list(schema.field(name).type))]


def _rows(files: tuple[Path, ...], kind: Kind, text_column: str | None) -> Iterator[tuple[str, Document | None]]:
    chooser = _Chooser(text_column)
    for file in files:
        if kind == "parquet":
            rows = read_parquet(file, chooser.wanted)
        elif kind == "arrow":
            rows = read_arrow(file, chooser.wanted)
        else:
            rows = (read_csv if kind == "csv" else read_json)(file)
        yield from _documents_of(rows, chooser)


def _documents_of(rows: Iterator[Row], chooser: _Chooser) -> Iterator[tuple[str, Document | None]]:
    for place, row in rows:
        columns = chooser.of(row, [name for name, value in row.items() if value is None], place)
        yield place, document_of(row, columns, place)


def _saved(path: Path, text_column: str | None, pattern: str | None) -> tuple[Documents, Documents | None]:
    """Return train and, if it is present, validation of a directory written by `save_to_disk`."""
    try:
        import datasets
    except ImportError:
        raise MissingExtra(library="datasets", extra="data", purpose="reading a saved datasets directory") from None
    try:
        saved = datasets.load_from_disk(str(path))
    except Exception as error:  # datasets raises plain and Arrow errors of many types for a damaged directory
        raise RequestError(f"{path} is not a complete datasets directory ({str(error)[:120]}); save it again") from None
    if not isinstance(saved, datasets.DatasetDict):
        return _saved_split(saved, text_column, str(path)), None
    if "train" not in saved:
        raise RequestError(f"{path} has no split 'train'; it has {', '.join(saved)}; give the folder of one split")
    evaluation = next((name for name in SPLIT_WORDS[EVALUATION_SPLIT] if name in saved), None)
    others = [name for name in saved if name not in ("train", evaluation)]
    if others:
        say_once(f"{path}: not trained on: split {', '.join(others)}, which is left alone")
    held_out = None if evaluation is None else _saved_split(saved[evaluation], text_column, f"{path} split {evaluation}")
    return _saved_split(saved["train"], text_column, f"{path} split train"), held_out


def _saved_split(dataset: Any, text_column: str | None, origin: str) -> Documents:
    def read(_: Documents) -> Iterator[tuple[str, Document | None]]:
        chooser = _Chooser(text_column)
        columns = chooser.wanted(dataset.features.arrow_schema, origin)
        tables = dataset.select_columns(columns).with_format("arrow").iter(batch_size=1024)
        yield from _documents_of(rows_of(tables, origin), chooser)

    return Documents(read, origin, dataset.dataset_size or 0)
