"""Read a training corpus: text files, JSON lines, CSV, Parquet, Arrow, or a directory saved by datasets.

Every command that trains or plans on data uses this reader. It decides what one document is: a text file, a JSON line, or a
table row. Documents are read while they are iterated, and are never all in memory. docs/data.md states the rules.

A table is trained on by the column that the user names, else by its columns (row_formats.py). No other column is taken for text.
Beside token ids, `labels` and `attention_mask` are used. Any other column with lists of numbers is rejected by name, because it
may say something of each token. The user is told the names of all other columns, which are left out.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from upshift.errors import MissingExtra, RequestError
from upshift.text import join_names
from upshift.training.data.chat_rows import Chat, PreferencePair, PromptCompletion, read_chat
from upshift.training.data.data_files import (
    EVALUATION_SPLIT,
    Kind,
    find_data_files,
    find_split,
    find_validation_split,
    first_names,
    say_once,
)
from upshift.training.data.data_options import LossOn
from upshift.training.data.records import (
    ChooseColumns,
    Row,
    check_column_names,
    is_list,
    is_text,
    read_arrow,
    read_csv,
    read_json,
    read_parquet,
    rows_of_batches,
)
from upshift.training.data.row_formats import (
    SIMILAR_COLUMNS,
    Columns,
    PairObjective,
    RowFormat,
    check_data_format,
    find_format,
    list_columns,
    no_table_of_preferences,
    refuse_wrapped,
)
from upshift.training.data.rows.data_set import read_description
from upshift.training.data.rows.described_rows import RowReader
from upshift.training.data.rows.row_slice import RowSlice, pick_split
from upshift.training.data.rows.segments import SegmentRow
from upshift.training.data.rows.token_rows import LABELS, MASK, SEGMENTS, SPECIAL_TOKENS_MASK, TokenRow, read_document
from upshift.training.data.text_files import TextFile, checking_compression, read_texts
from upshift.value import Value

MAX_COLUMN_NAMES = 1000  # names in memory, if each row of a JSON file has other fields


class CorpusSummary(Value):
    """The counts of a corpus."""

    origin: str
    num_documents: int
    num_evaluation_documents: int
    num_skipped_empty: int
    num_skipped_binary: int  # files that are not UTF-8 text


Document = str | TextFile | TokenRow | Chat | PromptCompletion | PreferencePair | SegmentRow


def content_of(document: Document) -> str:
    """Return what a document is, for messages."""
    if isinstance(document, TokenRow):
        return "token ids"
    if isinstance(document, PreferencePair):
        return "two texts to compare" if isinstance(document.chosen, PromptCompletion) else "two chats to compare"
    if isinstance(document, SegmentRow):
        return "texts in segments"
    if isinstance(document, PromptCompletion):
        return "a prompt and a completion of plain text"
    if isinstance(document, Chat):
        return "a chat" if document.num_prompt_messages is None else "a prompt and a completion of messages"
    return "text"


def has_chats(document: Document | None) -> bool:
    """Return whether the tokenizer's chat template writes a document."""
    return isinstance(document.chosen if isinstance(document, PreferencePair) else document, Chat)


class Documents:
    """The documents of one split. They are read again whenever they are iterated. The counts are those of the last time."""

    def __init__(self, read: Callable[[Documents], Iterator[tuple[str, Document | None]]], origin: str, num_bytes: int) -> None:
        self._read = read
        self.origin = origin
        self.num_bytes = num_bytes  # size of the files
        self.num_documents = 0
        self.num_empty = 0
        self.binary: list[str] = []
        self.columns: Columns | None = None  # of tables, once a row was read
        self.column_names: dict[str, None] = {}  # of tables, in the order in which they were met, about MAX_COLUMN_NAMES at most
        self.is_tokenized = False  # whether the last document had token ids
        self.may_mix_answers = False  # whether chats may stand beside other rows with an answer

    def __iter__(self) -> Iterator[Document]:
        return (document for _, document in self.with_places())

    def with_places(self) -> Iterator[tuple[str, Document]]:
        """Yield each document with the file and the row that hold it."""
        self.num_documents = 0
        self.num_empty = 0
        self.binary = []
        self.column_names = {}
        previous: str | None = None
        try:
            for place, document in self._read(self):
                if document is None:
                    self.num_empty += 1
                    continue
                content = content_of(document)
                has_answer = isinstance(document, Chat | PromptCompletion | SegmentRow)
                if content != (previous or content) and not (self.may_mix_answers and has_answer):
                    raise RequestError(f"{place} holds {content}, the rows before it hold {previous}; give one of the two")
                previous = content
                self.is_tokenized = isinstance(document, TokenRow)
                self.num_documents += 1
                yield place, document
        except OSError as error:
            reason = error.strerror or error
            raise RequestError(f"cannot read {error.filename or self.origin}: {reason}; check the path and its rights") from None
        self._report_left_out()

    def first(self) -> Document | None:
        """Return the first document that is not empty, or None if there is none."""
        return next(iter(self), None)

    def add_column_names(self, names: Collection[str]) -> None:
        """Remember the columns of a row or a file, to name those that are not used."""
        if len(self.column_names) < MAX_COLUMN_NAMES:
            self.column_names.update(dict.fromkeys(names))

    @property
    def unused_columns(self) -> tuple[str, ...]:
        """Return the columns of tables that are not read. Later rows may have more of them."""
        if self.columns is None:
            return ()
        names = list(self.column_names)
        used = {self.columns.name}
        if self.columns.is_chat:
            used.update(self.columns.of_chat(names))
        elif self.is_tokenized:
            used |= {LABELS, MASK, SEGMENTS}  # other token_type_ids than 0 are rejected
        return tuple(name for name in names if name not in used)

    def _report_left_out(self) -> None:
        if not self.num_documents:
            return
        if self.num_empty:
            say_once(f"{self.origin}: {self.num_empty} empty or null rows or files are left out")
        if self.binary:
            say_once(f"{self.origin}: left out, not UTF-8 text: {first_names(self.binary)}")
        if self.unused_columns:
            names = first_names([name or "(without a name)" for name in self.unused_columns])
            others = ", and others in later rows" if len(self.column_names) >= MAX_COLUMN_NAMES else ""
            say_once(f"{self.origin}: columns that are not used: {names}{others}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """A corpus of documents."""

    origin: str
    documents: Documents  # of the training split
    evaluation: Documents | None  # None: the data has no such split, and documents of the training are held out
    is_tokenized: bool
    columns: Columns | None  # of tables
    loss_on: LossOn | None = None  # None: that of the run
    parts: tuple[Corpus, ...] = ()  # of several data sets: each of them

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
    path: Path | str,
    *,
    text_column: str | None = None,
    data_format: RowFormat | None = None,
    pattern: str | None = None,
    has_decoder: bool = False,
    is_evaluation: bool = False,
    pair_objective: PairObjective | None = None,
    rows: RowSlice | None = None,
    reader: RowReader | None = None,
    writes_turns: bool = False,
) -> Corpus:
    """Find the documents under ``path`` and read the first one.

    Raise RequestError for a path without data. Iterating the documents raises it for a row that cannot be used.

    Args:
        path: a file, a folder, or a directory that datasets saved.
        text_column: the column of a table that holds the text.
        data_format: what the rows of a table are.
        pattern: a glob that selects the files of a folder of texts.
        has_decoder: whether an encoder-decoder is trained, so that labels beside token ids are those of its decoder.
        is_evaluation: read the split for validation in place of the one for training. Data with a single split is read whole.
        pair_objective: the objective that learns from pairs of answers, if the rows are such pairs.
        rows: the split to train on, or a part of it. None: the split for training, or all rows.
        reader: what reads the rows of a described data set.
        writes_turns: the chat template writes plain texts of a prompt and an answer as turns. False: they are joined.
    """
    check_data_format(text_column, data_format, pair_objective=pair_objective)
    path = existing_path(path)
    selection = _Selection(text_column, data_format, has_decoder, pair_objective, rows, reader, writes_turns)
    if is_saved_dataset(path):
        documents, evaluation = _open_saved_dataset(path, selection, is_evaluation=is_evaluation)
    else:
        documents, evaluation = _open_files(path, selection, pattern, is_evaluation=is_evaluation)
    first = documents.first()
    if first is None and rows is not None and not rows.is_whole:
        raise RequestError(f"{path}: the range of rows in its split holds no document; name another, such as train[:10%]")
    if first is None:
        raise RequestError(
            f"{path} holds no documents ({documents.num_empty} empty, {len(documents.binary)} not UTF-8 text); "
            "give at least one with text"
        )
    _refuse_lost_prompt(first, documents)
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


def _refuse_lost_prompt(first: Document, documents: Documents) -> None:
    """Raise RequestError for two answers of plain text whose question is in a column that is not read."""
    if not isinstance(first, PreferencePair) or not isinstance(first.chosen, PromptCompletion):
        return
    questions = [name for name in documents.unused_columns if name in SIMILAR_COLUMNS]
    if questions and "prompt" not in documents.column_names:
        raise RequestError(
            f"{first.place} has no column 'prompt', and has {join_names(questions)}, which would not be learned from; rename the "
            "question to prompt, name its column in a YAML file of data sets (key columns), or remove these columns"
        )


def existing_path(path: Path | str) -> Path:
    """Return the path. Raise RequestError if nothing is there."""
    try:
        exists = bool(str(path)) and Path(path).exists()
    except PermissionError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}; check the rights of its folders") from None
    except (OSError, ValueError):  # the name is too long, or holds a zero byte
        exists = False
    if not exists:
        raise RequestError(
            f"the data {str(path)[:200]!r} does not exist on this machine; give a text file, a folder of texts, .jsonl, .csv, "
            ".parquet, or the folder to which datasets' save_to_disk saved a data set of the Hub"
        )
    return Path(path)


def check_paths(data: Path | str) -> None:
    """Raise RequestError unless the path, or each path that it describes, exists. Read no rows."""
    described = read_description(data)
    for path in (data,) if described is None else (data_set.path for data_set in described.data_sets):
        existing_path(path)


class _Selection(NamedTuple):
    """Hold what the user says of the rows of a table."""

    text_column: str | None
    data_format: RowFormat | None
    has_decoder: bool
    pair_objective: PairObjective | None
    rows: RowSlice | None = None  # None: all of the split that is meant
    reader: RowReader | None = None
    writes_turns: bool = False

    @property
    def split(self) -> str | None:
        """Return the name of the split that the user wants, or None."""
        return None if self.rows is None else self.rows.split


def _open_files(
    path: Path, selection: _Selection, pattern: str | None, *, is_evaluation: bool
) -> tuple[Documents, Documents | None]:
    """Return the training and evaluation documents of a file or a folder."""
    try:
        data_files = find_data_files(path, pattern=pattern, is_evaluation=is_evaluation, wanted_split=selection.split)
    except OSError as error:
        raise RequestError(f"cannot read {error.filename or path}: {error.strerror}; check the path and its rights") from None
    if data_files.kind == "text" and (selection.text_column or selection.data_format):
        option = f"--text-column {selection.text_column}" if selection.text_column else f"--data-format {selection.data_format}"
        raise RequestError(
            f"{option} is for tables (JSON, CSV, TSV, Parquet, Arrow, a saved datasets directory), "
            f"and {path} is plain text; leave it out"
        )

    if data_files.kind == "text" and selection.rows is not None and not selection.rows.is_whole:
        raise RequestError(f"a range of rows is for tables, and {path} is plain text; name the files to train on, or a folder")
    if data_files.kind == "text" and selection.pair_objective is not None:
        raise no_table_of_preferences(path, selection.pair_objective)

    def make_documents(files: tuple[Path, ...], origin: str, selection: _Selection) -> Documents:
        def read(documents: Documents) -> Iterator[tuple[str, Document | None]]:
            if data_files.kind == "text":
                return read_texts(files, documents.binary, is_alone=path.is_file())
            return _read_tables(files, data_files.kind, _ColumnChooser(selection, documents))

        return Documents(read, origin, sum(file.stat().st_size for file in files))

    evaluation = None
    if data_files.evaluation:
        whole = selection._replace(rows=None)
        evaluation = make_documents(data_files.evaluation, f"{path} split {EVALUATION_SPLIT}", whole)
    return make_documents(data_files.training, str(path), selection), evaluation


class _ColumnChooser:
    """Choose the columns to read at the first row or schema. The choice holds for all files."""

    def __init__(self, selection: _Selection, documents: Documents) -> None:
        self._selection = selection
        self._documents = documents
        self.columns: Columns | None = None

    @property
    def is_named(self) -> bool:
        """Return whether the user says which columns to read."""
        return self._selection.text_column is not None or self._selection.data_format is not None

    @property
    def rows(self) -> RowSlice | None:
        return self._selection.rows

    def read_row(self, row: Mapping[str, Any], columns: Columns, place: str) -> Document | None:
        """Return the document of a row. Raise RequestError, with the place, for a row that cannot be used."""
        if not columns.is_chat:
            return read_document(row, columns, place)
        reader = self._selection.reader
        if reader is None:
            return read_chat(row, columns, place)
        renamed = reader.rename(row, place)
        if not renamed:
            raise _nothing_to_read(row, place)
        return reader.read(renamed, columns, place)

    def choose(
        self, names: Collection[str], empty: Collection[str], origin: str, sample: Mapping[str, Any] | None = None
    ) -> Columns:
        """Return the columns to read. ``empty`` has the columns without a value. ``sample``: a row, for messages."""
        reader = self._selection.reader
        data_names = names
        if reader is not None:
            renamed = reader.renamed(names)
            names = list(renamed.values())
            empty = [renamed[name] for name in empty if name in renamed]
            used = [name for name in names if not reader.makes_prompt_of(name)]  # such a column is not left over in a row
            data_names = [*used, *(name for name in data_names if name not in renamed)]
        if self.columns is None and reader is not None and reader.prompt_columns is not None:
            reader.check_columns(names, origin)
            fields = reader.prompt_columns
            self.columns = Columns(format="alpaca", name=fields[0], fields=fields)
            self._documents.columns = self.columns
        elif self.columns is None:
            found = find_format(
                names,
                text_column=self._selection.text_column,
                data_format=self._selection.data_format,
                empty=empty,
                origin=origin,
                pair_objective=self._selection.pair_objective,
                sample=sample,
            )
            has_labels = LABELS in names
            is_pair = has_labels and self._selection.has_decoder
            self.columns = replace(
                found,
                has_labels=has_labels,
                has_mask=MASK in names,
                is_pair=is_pair,
                writes_turns=self._selection.writes_turns,
            )
            self._documents.columns = self.columns
        assert self.columns is not None
        self._documents.add_column_names(data_names)
        return self.columns

    def choose_from_schema(self, schema: Any, origin: str) -> list[str]:
        """Return the columns of an Arrow schema to read: the chosen ones, and those that may say something of each token."""
        import pyarrow.types as kinds

        check_column_names(schema.names, origin)
        empty = [field.name for field in schema if kinds.is_null(field.type)]
        columns = self.choose(schema.names, empty, origin, _messages_of_schema(schema))
        reader = self._selection.reader
        if columns.is_chat:
            needed = columns.of_chat(schema.names) if reader is None else reader.needed_of(schema.names, columns)
            if not needed:  # of another form than the files before it; Arrow reads no rows if it reads no columns
                raise _nothing_to_read(schema.names, origin)
            return needed
        if columns.name not in schema.names:
            raise RequestError(f"{origin} has no column {columns.name!r}; {list_columns(schema.names)}; name one that holds text")
        if is_text(schema.field(columns.name).type):
            return [columns.name]
        lists = [field.name for field in schema if is_list(field.type) or field.name in (LABELS, MASK)]
        return [columns.name, *(name for name in lists if name not in (columns.name, SPECIAL_TOKENS_MASK))]


def _messages_of_schema(schema: Any) -> dict[str, Any]:
    """Return a message with the fields of each column of lists of structs."""
    import pyarrow.types as kinds

    structs = {field.name: field.type.value_type for field in schema if is_list(field.type)}
    return {name: [{field.name: "" for field in kind}] for name, kind in structs.items() if kinds.is_struct(kind)}


def _nothing_to_read(names: Collection[str], origin: str) -> RequestError:
    """Return the error about a file or a row without any of the columns that are read."""
    return RequestError(
        f"{origin} has none of the columns that are read; {list_columns(names)}; give it those of the others, or leave it out"
    )


def rows_of_files(files: tuple[Path, ...], kind: Kind, choose_columns: ChooseColumns) -> Iterator[Row]:
    """Yield the rows of the files of a table. ``choose_columns`` is asked for the columns of a file with a schema."""
    for file in files:
        with checking_compression(file):
            if kind == "parquet":
                yield from read_parquet(file, choose_columns)
            elif kind == "arrow":
                yield from read_arrow(file, choose_columns)
            else:
                yield from read_csv(file) if kind == "csv" else read_json(file)


def _read_tables(files: tuple[Path, ...], kind: Kind, chooser: _ColumnChooser) -> Iterator[tuple[str, Document | None]]:
    def read_rows() -> Iterator[Row]:
        return rows_of_files(files, kind, chooser.choose_from_schema)

    rows = chooser.rows
    selected = read_rows() if rows is None or rows.is_whole else rows.select(read_rows)
    return _read_documents(selected, chooser, has_schema=kind in ("parquet", "arrow"))


def _read_documents(rows: Iterator[Row], chooser: _ColumnChooser, *, has_schema: bool) -> Iterator[tuple[str, Document | None]]:
    """Yield the documents of rows. Without a schema, each row may have other columns."""
    for place, row in rows:
        if has_schema and chooser.columns is not None:
            yield place, chooser.read_row(row, chooser.columns, place)
            continue
        if chooser.columns is None and not chooser.is_named:
            refuse_wrapped(row, place)
        empty = [name for name, value in row.items() if value is None]
        yield place, chooser.read_row(row, chooser.choose(row, empty, place, row), place)


def is_saved_dataset(path: Path) -> bool:
    """Return whether `save_to_disk` wrote a directory."""
    return path.is_dir() and ((path / "dataset_dict.json").exists() or (path / "state.json").exists())


class SavedSplit(NamedTuple):
    """One split of a directory that `save_to_disk` wrote, and its name for messages."""

    folder: Path
    origin: str

    def rows(self) -> Iterator[Row]:
        """Yield the rows with all their columns."""
        dataset = _load_saved(self.folder)
        if dataset is not None:
            yield from rows_of_batches(dataset.with_format("arrow").iter(batch_size=1024), self.origin)


def find_saved_splits(path: Path, wanted: str | None, *, is_evaluation: bool) -> tuple[SavedSplit, SavedSplit | None]:
    """Return the split to read and, for training data, the validation split of a directory that `save_to_disk` wrote.

    ``wanted``: the split that the user wants, or None."""
    if importlib.util.find_spec("datasets") is None:
        raise MissingExtra(library="datasets", extra="data", purpose="reading a saved datasets directory")
    if not (path / "dataset_dict.json").exists():
        pick_split(["train"], wanted or "train", path)
        return SavedSplit(path, str(path)), None
    try:
        names = list(json.loads((path / "dataset_dict.json").read_bytes())["splits"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _incomplete_dataset(path, error) from None
    split = find_split(names, is_evaluation=is_evaluation)
    if wanted is not None:
        split = pick_split(names, wanted, path)
    if split is None:
        missing = f"{EVALUATION_SPLIT!r} to evaluate on" if is_evaluation else "'train'"
        advice = "give the folder of one split" if is_evaluation or not names else "name one of them with --split"
        raise RequestError(f"{path} has no split {missing}; it has {', '.join(names) or 'none'}; {advice}")
    evaluation_name = None if is_evaluation else find_validation_split(names)
    if evaluation_name == split:
        evaluation_name = None
    other_names = [name for name in names if name not in (split, evaluation_name)]
    if other_names:
        say_once(f"{path}: not trained on: split {', '.join(other_names)}, which is left alone")
    evaluation = None
    if evaluation_name is not None:
        evaluation = SavedSplit(path / evaluation_name, f"{path} split {evaluation_name}")
    return SavedSplit(path / split, f"{path} split {split}"), evaluation


def _open_saved_dataset(path: Path, selection: _Selection, *, is_evaluation: bool) -> tuple[Documents, Documents | None]:
    """Return the split to read and, for training data, the validation split of a directory that `save_to_disk` wrote."""
    split, evaluation = find_saved_splits(path, selection.split, is_evaluation=is_evaluation)
    documents = None
    if evaluation is not None:
        documents = _saved_split(_load_saved(evaluation.folder), selection._replace(rows=None), evaluation.origin)
    return _saved_split(_load_saved(split.folder), selection, split.origin), documents


def _load_saved(folder: Path) -> Any | None:
    """Return the data set of a folder that `save_to_disk` wrote, or None if it has no rows, for which no file is written."""
    import datasets

    try:
        if not json.loads((folder / "state.json").read_bytes())["_data_files"]:
            return None
        return datasets.load_from_disk(str(folder))
    except Exception as error:  # for a damaged directory datasets raises errors of many types
        raise _incomplete_dataset(folder, error) from None


def _incomplete_dataset(path: Path, error: Exception) -> RequestError:
    reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
    return RequestError(f"{path} is not a complete datasets directory ({reason}); save it again")


def _saved_split(dataset: Any | None, selection: _Selection, origin: str) -> Documents:
    """Return the documents of a data set, none for None."""

    def read(documents: Documents) -> Iterator[tuple[str, Document | None]]:
        if dataset is None:
            return
        chooser = _ColumnChooser(selection, documents)
        columns = chooser.choose_from_schema(dataset.features.arrow_schema, origin)
        selected = dataset.select_columns(columns)
        if selection.rows is not None and not selection.rows.is_whole:
            ranges = [slice(*borders).indices(len(dataset)) for borders in selection.rows.ranges(len(dataset))]
            selected = selected.select([index for borders in ranges for index in range(*borders)])
        tables = selected.with_format("arrow").iter(batch_size=1024)
        yield from _read_documents(rows_of_batches(tables, origin), chooser, has_schema=True)

    return Documents(read, origin, 0 if dataset is None else dataset.dataset_size or 0)
