"""Documents out of records with columns: JSON lines, parquet files and directories saved by datasets.

Decides which column holds the text: the one asked for, else `input_ids` (already tokenized), else `text`, else the
only column of strings. Anything else is an error that names the columns.
"""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from upshift.characters import half_of_pair
from upshift.errors import MissingExtra, RequestError

if TYPE_CHECKING:
    import pyarrow

TOKEN_COLUMN = "input_ids"
EVALUATION_SPLITS = ("validation", "valid", "dev", "eval", "test")


@dataclass(kw_only=True)
class Documents:
    """Documents while they are being read."""

    items: list[Any]
    num_skipped_empty: int = 0
    num_skipped_binary: int = 0

    def add_text(self, text: str | None) -> None:
        if not text or text.isspace():
            self.num_skipped_empty += 1
        else:
            self.items.append(text)

    def add_tokens(self, tokens: Any) -> None:
        if tokens is None or not len(tokens):
            self.num_skipped_empty += 1
        else:
            self.items.append(tokens)


def choose_column(
    columns: Sequence[str], text_columns: Sequence[str], token_columns: Sequence[str], *, asked: str | None, origin: str
) -> str:
    found = f"its columns are {', '.join(map(str, columns)) or 'none'}"
    if asked is not None:
        if asked in text_columns or asked in token_columns:
            return asked
        problem = "has no column" if asked not in columns else "has no text in column"
        raise RequestError(f"{origin} {problem} {asked!r}; {found}; name one that holds text")
    if TOKEN_COLUMN in token_columns:
        return TOKEN_COLUMN
    if "text" in text_columns:
        return "text"
    if len(text_columns) == 1:
        return text_columns[0]
    problem = "has no text column" if not text_columns else f"has several text columns ({', '.join(text_columns)})"
    raise RequestError(f"{origin} {problem}; {found}; name the one that holds the text with text_column")


def read_json_lines(files: Sequence[Path], *, text_column: str | None) -> Documents:
    documents = Documents(items=[])
    column = None
    for place, record in _records(files):
        if not isinstance(record, dict):
            shown = json.dumps(record)[:60]
            raise RequestError(f'{place} is not a JSON object: {shown}; write one object per line, as {{"text": ".."}}')
        column = column or _column_of(record, text_column, place)
        value = None if column is None else record.get(column)
        if value is None or isinstance(value, str):
            if (half := half_of_pair(value or "")) is not None:
                raise RequestError(f"{place} holds {half}, half of a surrogate pair, which is no text; write the file again")
            documents.add_text(value)
        elif _is_token_list(value):
            documents.add_tokens(np.array(value, np.int64))
        else:
            shown = json.dumps(value)[:60]
            raise RequestError(f"{place}: column {column!r} holds {shown}; it must be text or a list of token ids")
    if column is None and documents.num_skipped_empty:
        raise RequestError(f"{files[0]} has no text in any record; name the column that holds it with text_column")
    _refuse_mixture(documents, files[0])
    return documents


def _column_of(record: dict[str, Any], asked: str | None, place: str) -> str | None:
    """None: what would be the column is empty here, and a later record says what is in it."""
    texts = [name for name, value in record.items() if isinstance(value, str)]
    tokens = [name for name, value in record.items() if _is_token_list(value)]
    known = (TOKEN_COLUMN, "text") if asked is None else (asked,)
    there = [name for name in known if name in record] or list(record)
    if any(record[name] is None for name in there) and not {*there} & {*texts, *tokens}:
        return None
    return choose_column(list(record), texts, tokens, asked=asked, origin=place)


def _records(files: Sequence[Path]) -> Iterator[tuple[str, Any]]:
    for file in files:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if number == 1 and file.suffix.lower() == ".json" and line.removeprefix(BOM_UTF8).lstrip().startswith(b"["):
                    yield from _records_of_array(file)
                    break
                if line.strip():
                    yield f"{file}:{number}", _parse(line, f"{file}:{number}")


def _records_of_array(file: Path) -> Iterator[tuple[str, Any]]:
    for number, record in enumerate(_parse(file.read_bytes(), str(file)), start=1):
        yield f"{file} (record {number})", record


def _parse(text: bytes, place: str) -> Any:
    try:
        return json.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise RequestError(f"{place} is not UTF-8 text; convert the file") from None
    except ValueError as error:
        raise RequestError(f"{place} is not valid JSON ({error}); write one JSON object per line") from None
    except RecursionError:
        raise RequestError(f"{place} is nested too deeply for JSON; write one flat object per line") from None


def _is_token_list(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and abs(item) < 2**63 for item in value)


def read_parquet(files: Sequence[Path], *, text_column: str | None) -> Documents:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise MissingExtra(library="pyarrow", extra="data", purpose="reading parquet") from None
    documents = Documents(items=[])
    for file in files:
        try:
            handle = parquet.ParquetFile(file)
            column = choose_arrow_column(handle.schema_arrow, asked=text_column, origin=str(file))
            for batch in handle.iter_batches(columns=[column]):
                add_arrow(documents, batch.column(batch.schema.names.index(column)))
        except (pyarrow.ArrowException, OSError) as error:
            reason = str(error).splitlines()[0][:120]
            raise RequestError(f"{file} is not a complete parquet file ({reason}); copy or write it again") from None
    _refuse_mixture(documents, files[0].parent)
    return documents


def read_saved_datasets(path: Path, *, text_column: str | None) -> tuple[Documents, Documents | None]:
    """The train split and, where one is present, the evaluation split of a directory written by `save_to_disk`."""
    try:
        import datasets
    except ImportError:
        raise MissingExtra(library="datasets", extra="data", purpose="reading a saved datasets directory") from None
    try:
        saved = datasets.load_from_disk(str(path))
    except Exception as error:  # datasets raises plain and Arrow errors of many types for a damaged directory
        raise RequestError(f"{path} is not a complete datasets directory ({str(error)[:120]}); save it again") from None
    if not isinstance(saved, datasets.DatasetDict):
        return _dataset_documents(saved, text_column, str(path)), None
    if "train" not in saved:
        raise RequestError(f"{path} has no split 'train'; it has {', '.join(saved)}; give the folder of one split")
    evaluation = next((name for name in EVALUATION_SPLITS if name in saved), None)
    documents = _dataset_documents(saved["train"], text_column, f"{path} split train")
    if evaluation is None:
        return documents, None
    return documents, _dataset_documents(saved[evaluation], text_column, f"{path} split {evaluation}")


def _dataset_documents(dataset: Any, text_column: str | None, origin: str) -> Documents:
    column = choose_arrow_column(dataset.features.arrow_schema, asked=text_column, origin=origin)
    documents = Documents(items=[])
    for table in dataset.select_columns([column]).with_format("arrow").iter(batch_size=4096):
        for chunk in table.column(column).chunks:
            add_arrow(documents, chunk)
    return documents


def choose_arrow_column(schema: pyarrow.Schema, *, asked: str | None, origin: str) -> str:
    import pyarrow.types as kinds

    def is_text(kind: Any) -> bool:
        return bool(kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_string_view(kind))

    def is_token_list(kind: Any) -> bool:
        is_list = kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind)
        return bool(is_list and kinds.is_integer(kind.value_type))

    texts = [field.name for field in schema if is_text(field.type)]
    tokens = [field.name for field in schema if is_token_list(field.type)]
    return choose_column(schema.names, texts, tokens, asked=asked, origin=origin)


def add_arrow(documents: Documents, array: pyarrow.Array) -> None:
    """Texts as str, token lists as views of one numpy array per chunk."""
    import pyarrow.types as kinds

    if not kinds.is_nested(array.type):
        try:
            _each(documents.add_text, array.to_pylist())
        except UnicodeDecodeError:  # Arrow's files are read without a look at their bytes
            raise RequestError("a text column in the data holds bytes that are not UTF-8; write them again as text") from None
        return
    tokens = array.flatten().to_numpy(zero_copy_only=False)
    lengths = np.array(array.value_lengths().fill_null(0), np.int64)
    if tokens.dtype.kind == "f":
        raise RequestError("a token list in the data holds an empty value; tokenize the text again")
    _each(documents.add_tokens, np.split(tokens, np.cumsum(lengths)[:-1]))


def _each(add: Any, items: Iterable[Any]) -> None:
    for item in items:
        add(item)


def _refuse_mixture(documents: Documents, origin: Path) -> None:
    if len({isinstance(item, str) for item in documents.items}) > 1:
        raise RequestError(f"{origin} holds text in some places and token ids in others; give one of the two")
