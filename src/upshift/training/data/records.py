"""Read the rows of tables one after another: JSON, CSV, Parquet, Arrow. A table may be larger than memory.

Each reader yields (place, row). The place names the file and the row for messages. A reader of a file with a schema first calls
``choose_columns`` with the schema, and then reads the columns that it returns.
"""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from upshift.errors import MissingExtra, RequestError
from upshift.training.data.data_files import data_suffix, open_data
from upshift.training.data.file_content import FIRST_BYTES, describe_no_text

if TYPE_CHECKING:
    import pyarrow

Row = tuple[str, dict[str, Any]]
ChooseColumns = Callable[["pyarrow.Schema", str], list[str]]
READ_BYTES = 2**16
READ_CHARACTERS = 2**20
LONGEST_MARK = 16  # characters that a JSON mark may have, such as -Infinity or \ud83d\ude00
WHITE_SPACE = re.compile(r"[ \t\r\n]*")
ARROW_ROWS = 1024  # rows in memory at once
JSON_REASONS = {  # what a message of json.JSONDecodeError begins with -> the same in plain words
    "Unterminated string": 'the closing " of a text is missing',
    "Invalid control character": "a text holds a line break, a tab or another control character; write it as \\n or \\t",
    "Invalid \\": "a text holds a \\ that begins no character of JSON; write \\\\ for a \\",
    "Expecting ',' delimiter": 'a comma or a closing bracket is missing, or a " within a text has no \\ before it',
    "Expecting ':' delimiter": "the colon after a name is missing",
    "Expecting property name": "a name in double quotes is missing",
    "Expecting value": 'a value is missing, or is none of JSON\'s: "text", 1, true, false, null, [..], {..}',
    "Illegal trailing comma": "a comma stands before the closing bracket",
    "Extra data": "more follows after the value",
}
FEATHER_V1 = b"FEA1"  # the first bytes of a file of the older format, which Arrow's readers do not read


def read_json(file: Path) -> Iterator[Row]:
    """Yield one object for each line, or the objects of one array, or objects of several lines each."""
    is_array = _begins_array(file)
    if not is_array:
        with open_data(file) as handle:
            is_first = True
            for number, line in enumerate(handle, start=1):
                content = line.removeprefix(BOM_UTF8).strip()
                if not content:
                    continue
                if is_first and _goes_on(content):
                    break
                is_first = False
                place = f"{file}:{number}"
                yield place, _check_object(_parse(file, line, place), place)
            else:
                return
    with open_data(file) as handle:
        values = _JsonValues(handle)
        with _checking_json(file, str(file), "write an array of objects, or one object per line"):
            for number, record in enumerate(values.of_array() if is_array else values.in_sequence(), start=1):
                place = f"{file} (record {number})"
                yield place, _check_object(record, place)


def _begins_array(file: Path) -> bool:
    """Return whether the first character that is not white space opens an array. The first line may be the whole file."""
    with open_data(file) as handle:
        block = handle.read(READ_BYTES).removeprefix(BOM_UTF8)
        while block.isspace():
            block = handle.read(READ_BYTES)
    return block.lstrip().startswith(b"[")


def _goes_on(line: bytes) -> bool:
    """Return whether a line begins a JSON object that does not end in it."""
    try:
        json.loads(line)
    except json.JSONDecodeError as error:
        return line.startswith(b"{") and error.pos >= len(error.doc)
    except (ValueError, RecursionError):
        return False
    return False


def _check_object(record: Any, place: str) -> dict[str, Any]:
    """Return the record. Raise RequestError if it is not a JSON object."""
    if not isinstance(record, dict):
        shown = json.dumps(record)[:60]
        raise RequestError(f'{place} is not a JSON object: {shown}; write one object per line, as {{"text": ".."}}')
    return record


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs. Raise ValueError if a key is repeated."""
    record = dict(pairs)
    if len(record) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {repeated!r} is given twice")
    return record


def _parse(file: Path, text: bytes, place: str) -> Any:
    with _checking_json(file, place, "write one JSON object per line"):
        return json.loads(text.decode("utf-8-sig").rstrip(), object_pairs_hook=_unique_keys)


@contextmanager
def _checking_json(file: Path, place: str, advice: str) -> Iterator[None]:
    """Raise RequestError for bytes that are not UTF-8 text, and for text that is not JSON."""
    try:
        yield
    except RequestError:
        raise
    except UnicodeDecodeError:
        raise _no_text(file) from None
    except json.JSONDecodeError as error:
        if "\0" in error.doc:
            raise _no_text(file) from None
        ends = error.pos >= len(error.doc) or error.msg.startswith("Unterminated string")
        reason = "the line ends before the value does; it may be cut off" if ends else plain_reason(error)
        raise RequestError(f"{place} is not valid JSON (at character {error.colno}: {reason}); {advice}") from None
    except ValueError as error:
        raise RequestError(f"{place} is not valid JSON ({error}); {advice}") from None
    except RecursionError:
        raise RequestError(f"{place} is nested too deeply for JSON; write flat objects") from None


def plain_reason(error: json.JSONDecodeError) -> str:
    """Return in plain words what is wrong with a JSON text."""
    return next((plain for reason, plain in JSON_REASONS.items() if error.msg.startswith(reason)), error.msg)


class _JsonValues:
    """Read the values of a JSON text one after another. Only the part that is decoded is in memory.

    The buffer holds a part of the text. The next value begins at a position in it, because cutting the buffer after each value
    would copy it for each.
    """

    def __init__(self, handle: BinaryIO) -> None:
        self._text = io.TextIOWrapper(handle, encoding="utf-8-sig")
        self._decoder = json.JSONDecoder(object_pairs_hook=_unique_keys)
        self._buffer = ""
        self._position = 0
        self._is_at_end = False
        self._num_lines = 0  # line breaks before the buffer
        self._num_columns = 0  # characters before the buffer in the line in which it begins

    def of_array(self) -> Iterator[Any]:
        """Yield the values of one array. Raise ValueError if it is not valid, or if more follows."""
        self._skip("[")
        if not self._skip("]"):
            while True:
                yield self._decode()
                if self._skip("]"):
                    break
                if not self._skip(","):
                    following = self._peek()
                    raise ValueError(f"Expecting ',' or ']' before {following!r}" if following else "the array does not end")
        if self._peek():
            raise ValueError("more follows after the array")

    def in_sequence(self) -> Iterator[Any]:
        """Yield values that follow each other with white space between them. Raise ValueError for text that is none."""
        while self._peek():
            yield self._decode()

    def _peek(self) -> str:
        """Return the next characters that are not white space, at most 20, or nothing at the end."""
        self._fill(20)
        return self._buffer[self._position : self._position + 20]

    def _skip(self, mark: str) -> bool:
        """Skip the mark and return True if it comes next."""
        is_next = self._peek().startswith(mark)
        if is_next:
            self._position += len(mark)
        return is_next

    def _fill(self, num_characters: int) -> None:
        """Skip white space. Read on if fewer characters follow in the buffer and the text does not end."""
        self._skip_white_space()
        while len(self._buffer) - self._position < num_characters and not self._is_at_end:
            self._drop_read_part()
            added = self._text.read(max(num_characters, READ_CHARACTERS) - len(self._buffer))
            self._is_at_end = not added
            self._buffer += added
            self._skip_white_space()

    def _skip_white_space(self) -> None:
        match = WHITE_SPACE.match(self._buffer, self._position)
        assert match is not None  # also no character is a match
        self._position = match.end()

    def _drop_read_part(self) -> None:
        """Remove what was read from the buffer, and count its lines for messages."""
        num_lines = self._buffer.count("\n", 0, self._position)
        if num_lines:
            self._num_columns = self._position - self._buffer.rindex("\n", 0, self._position) - 1
        else:
            self._num_columns += self._position
        self._num_lines += num_lines
        self._buffer = self._buffer[self._position :]
        self._position = 0

    def _decode(self) -> Any:
        """Return the next value. A value that is longer than the buffer is tried again with more text."""
        self._fill(READ_CHARACTERS // 2)
        while True:
            try:
                value, end = self._decoder.raw_decode(self._buffer, self._position)
            except json.JSONDecodeError as error:
                if self._is_at_end or not self._is_cut_off(error):
                    raise self._placed(error) from None
            else:
                if end < len(self._buffer) or self._is_at_end:  # the digits of a number could go on
                    self._position = end
                    return value
            self._fill(2 * (len(self._buffer) - self._position) + READ_CHARACTERS)

    def _is_cut_off(self, error: json.JSONDecodeError) -> bool:
        """Return whether an error may come from the end of the buffer. Otherwise more text does not mend it."""
        return error.msg.startswith("Unterminated string") or error.pos >= len(self._buffer) - LONGEST_MARK

    def _placed(self, error: json.JSONDecodeError) -> ValueError:
        """Return the error with the line and the column of the file."""
        column = error.colno + (self._num_columns if error.lineno == 1 else 0)
        ends = error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated string")
        reason = "the file ends before the value does; it may be cut off" if ends else plain_reason(error)
        return ValueError(f"{reason}: line {self._num_lines + error.lineno} column {column}")


def read_csv(file: Path) -> Iterator[Row]:
    """Yield the rows of a table whose first line names the columns. The fields of a .tsv file are divided by tabs."""
    csv.field_size_limit(sys.maxsize)
    with open_data(file) as handle:
        text = io.TextIOWrapper(handle, encoding="utf-8-sig", newline="")
        rows = csv.reader(text, delimiter="\t" if data_suffix(file) == ".tsv" else ",", strict=True)
        header: list[str] | None = None
        num_read = 0  # lines up to the end of the last row
        try:
            for row in rows:
                place = f"{file}:{rows.line_num}"
                num_read = rows.line_num
                is_blank = not row or (header is None and row[0].isspace() and len(row) == 1)
                if is_blank:
                    continue
                if header is None:
                    if any("\0" in name for name in row):
                        raise _no_text(file)
                    check_column_names(row, place)
                    _check_delimiter(row, place)
                    header = row
                    continue
                if len(row) != len(header):
                    raise RequestError(
                        f"{place}: the row has {len(row)} fields, the header {len(header)}; put fields with a comma, a tab or a "
                        "line break into double quotes"
                    )
                yield place, dict(zip(header, row, strict=True))
        except UnicodeDecodeError:
            raise _no_text(file) from None
        except csv.Error as error:
            reason = 'the closing " of a field is missing' if str(error) == "unexpected end of data" else str(error)
            raise RequestError(f"{file}:{num_read + 1} is no row of a table ({reason}); write the file again") from None


def _check_delimiter(header: Sequence[str], place: str) -> None:
    """Raise RequestError for a header of one column that has other delimiters in it."""
    mark = next((mark for mark in ";\t|," if mark in header[0]), None)
    if len(header) == 1 and mark is not None:
        raise RequestError(
            f"{place}: the first line names one column, {header[0][:60]!r}; if {mark!r} divides the columns, write a comma in "
            "its place, or a tab in a .tsv file"
        )


def _no_text(file: Path) -> RequestError:
    """Return the error about a file that is not UTF-8 text, with its first line that is none."""
    with open_data(file) as handle:
        number = next((number for number, line in enumerate(handle, start=1) if not _is_utf8(line)), 1)
    with open_data(file) as handle:
        return RequestError(describe_no_text(f"{file}:{number}", handle.read(FIRST_BYTES)))


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def check_column_names(names: Sequence[str], place: str) -> None:
    """Raise RequestError if two columns have the same name, because then it is not clear which one is meant."""
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise RequestError(f"{place}: the header names column {repeated!r} twice; give each column a name of its own")


def need_pyarrow(purpose: str) -> Any:
    """Import pyarrow. Raise MissingExtra if it is not installed."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise MissingExtra(library="pyarrow", extra="data", purpose=purpose) from None
    return pyarrow


def read_parquet(file: Path, choose_columns: ChooseColumns) -> Iterator[Row]:
    """Yield the rows of a Parquet file."""
    arrow = need_pyarrow("reading parquet")
    try:
        with open_data(file) as opened:
            source = opened if data_suffix(file) == file.suffix.lower() else arrow.BufferReader(opened.read())
            handle = arrow.parquet.ParquetFile(source, pre_buffer=False)
            columns = choose_columns(handle.schema_arrow, str(file))
            batches = handle.iter_batches(columns=columns, batch_size=ARROW_ROWS, use_threads=False)
            yield from rows_of_batches(batches, str(file))
    except arrow.ArrowException as error:
        raise _damaged(file, "parquet", error) from None


def read_arrow(file: Path, choose_columns: ChooseColumns) -> Iterator[Row]:
    """Yield the rows of a file in Arrow's stream format, which datasets writes, or in its file format."""
    arrow = need_pyarrow("reading .arrow files")
    try:
        with open_data(file) as opened:
            first_bytes = opened.peek(6)  # type: ignore[attr-defined]
            if first_bytes[: len(FEATHER_V1)] == FEATHER_V1:
                raise _feather_v1(file)
            is_file_format = first_bytes[:6] == b"ARROW1"
            if is_file_format:
                reader = arrow.ipc.open_file(opened)
                batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
            else:
                reader = arrow.ipc.open_stream(opened)
                batches = iter(reader)
            columns = choose_columns(reader.schema, str(file))
            yield from rows_of_batches((batch.select(columns) for batch in batches), str(file))
    except arrow.ArrowException as error:
        raise _damaged(file, "arrow", error) from None


def _feather_v1(file: Path) -> RequestError:
    """Return the error about a file of Feather's first version, with the line of Python that converts it."""
    names = f"{file.name!r}), {file.name.split('.')[0] + '.parquet'!r}"
    unpack = "" if data_suffix(file) == file.suffix.lower() else "decompress it, and "
    return RequestError(
        f"{file} is a Feather V1 file, and Upshift reads Parquet and Arrow files (Feather V2); {unpack}convert it in Python: "
        f"import pyarrow.feather, pyarrow.parquet; pyarrow.parquet.write_table(pyarrow.feather.read_table({names})"
    )


def _damaged(file: Path, kind: str, error: Exception) -> RequestError:
    reason = (str(error) or type(error).__name__).splitlines()[0][:120]
    return RequestError(f"{file} is not a complete {kind} file ({reason}); copy or write it again")


def rows_of_batches(batches: Iterator[Any], origin: str) -> Iterator[Row]:
    """Yield the rows of Arrow batches, with texts as str and lists of numbers as arrays."""
    number = 0
    for batch in batches:
        for start in range(0, batch.num_rows, ARROW_ROWS):
            rows = batch.slice(start, ARROW_ROWS)
            names = rows.schema.names
            place = f"{origin} row {number + 1} or later"
            columns = [_column_values(rows.column(name), name, place) for name in names]
            for values in zip(*columns, strict=True):
                number += 1
                yield f"{origin} row {number}", dict(zip(names, values, strict=True))


def _column_values(column: Any, name: str, place: str) -> list[Any]:
    """Return the values of an Arrow column, lists of numbers as arrays."""
    import pyarrow
    import pyarrow.types as kinds

    if isinstance(column, pyarrow.ChunkedArray):
        column = column.combine_chunks()
    if not is_number_list(column.type) or not (kinds.is_list(column.type) or kinds.is_large_list(column.type)):
        try:  # also for the other kinds of lists: Arrow 26 casts a list_view of bytes to half of its rows
            values: list[Any] = column.to_pylist()
        except UnicodeDecodeError:  # Arrow reads files without checking their bytes
            raise RequestError(f"{place}: column {name!r} holds bytes that are not UTF-8; write them again as text") from None
        is_plain = is_number_list(column.type) or not (kinds.is_nested(column.type) or _is_json(column.type))
        if is_plain:
            return values
        try:
            return [_plain_value(value, column.type) for value in values]
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{place}: column {name!r} holds text that is not valid JSON ({error}); write it again") from None
    numbers = column.flatten()
    flat = numbers.to_numpy(zero_copy_only=False)
    lengths = np.array(column.value_lengths().fill_null(0), np.int64)
    arrays: list[Any] = np.split(flat, np.cumsum(lengths)[:-1])
    if numbers.null_count and kinds.is_boolean(numbers.type):  # numpy has no missing truth value, so all became objects
        arrays = [array.tolist() if None in array else array.astype(np.bool_) for array in arrays]
    elif numbers.null_count and not kinds.is_floating(numbers.type):  # nor a missing integer, so all became floats
        arrays = [array if np.isnan(array).any() else array.astype(np.int64) for array in arrays]
    return [None if is_null else array for is_null, array in zip(column.is_null().to_pylist(), arrays, strict=True)]


def _plain_value(value: Any, kind: Any) -> Any:
    """Return a value of an Arrow column as JSON would hold it.

    Values of the type Json of datasets are decoded. Keys that are null are left out of objects, because Arrow gives each object
    the keys of all objects.
    """
    import pyarrow.types as kinds

    if value is None:
        return None
    if _is_json(kind):
        return json.loads(value)
    if kinds.is_struct(kind):
        names = (kind.field(index).name for index in range(kind.num_fields))
        return {name: _plain_value(value[name], kind.field(name).type) for name in names if value[name] is not None}
    if isinstance(value, list) and kinds.is_nested(kind) and not kinds.is_map(kind):
        return [_plain_value(item, kind.value_type) for item in value]
    return value


def _is_json(kind: Any) -> bool:
    return getattr(kind, "extension_name", None) == "arrow.json"


def is_number_list(kind: Any) -> bool:
    """Return whether an Arrow type is a list of numbers."""
    import pyarrow.types as kinds

    number_checks = (kinds.is_integer, kinds.is_floating, kinds.is_boolean)
    return is_list(kind) and any(check(kind.value_type) for check in number_checks)


def is_list(kind: Any) -> bool:
    """Return whether an Arrow type is any kind of list."""
    import pyarrow.types as kinds

    list_checks = (kinds.is_list, kinds.is_large_list, kinds.is_fixed_size_list, kinds.is_list_view, kinds.is_large_list_view)
    return any(check(kind) for check in list_checks)


def is_text(kind: Any) -> bool:
    """Return whether an Arrow type is text, or has no values."""
    import pyarrow.types as kinds

    if kinds.is_dictionary(kind) or kinds.is_run_end_encoded(kind):
        return is_text(kind.value_type)
    return any(check(kind) for check in (kinds.is_string, kinds.is_large_string, kinds.is_string_view, kinds.is_null))
