"""Random tables in every file format against a reference: each row's text or tokens are equal, or one line names what is wrong.

The reference reads the files with datasets, pyarrow and json, and decides in plain Python which rows can be trained on.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import logging
import os
import socket
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from upshift.errors import RequestError
from upshift.training.data.corpus import MAX_COLUMN_NAMES, read_corpus
from upshift.training.data.data_files import say_once
from upshift.training.data.data_options import DataOptions
from upshift.training.data.records import read_parquet
from upshift.training.data.rows.joined import read_data
from upshift.training.data.tokenizer import tokenize

datasets.disable_progress_bars()

IGNORED = -100
LAST_ID = 2**31 - 1
TEXTS = st.sampled_from(["one", "two\nlines", "é, ü", '"quoted"', "a;b\tc", "x" * 300])
NO_TEXTS: Any = st.sampled_from([3, 1.5, True, ["a"], {"a": 1}, [1, "a"], [[1]]])
EMPTY = st.sampled_from([None, "", " \n"])
IDS = st.lists(st.integers(0, 9) | st.sampled_from([300, 70_000, LAST_ID]), min_size=1, max_size=6)
NO_IDS: Any = st.sampled_from(
    [[1.0, 2.0], [1.5], [True, False], [-1], [2**31], [2**63 - 1], [2**63 + 5], [1, None], "1 2", 7, [[1, 2]], ["a"], {"a": [1]}]
)
EMPTY_IDS: Any = st.sampled_from([None, []])
EXTRA_COLUMNS: Any = st.dictionaries(
    st.sampled_from(
        ["tags", "label", "score", "meta", "spans", "position_ids", "token_type_ids", "special_tokens_mask", "zeros"]
    ),
    st.sampled_from(["strings", "integer", "float", "struct", "nested", "numbers", "zeros", "truths", "none"]),
    max_size=2,
)


def extra_value(kind: str, length: int) -> Any:
    """Return the value of a column that is beside the tokens."""
    values: dict[str, Any] = {
        "strings": ["tag"] * length, "integer": 1, "float": 0.5, "struct": {"a": "b"}, "nested": [[1, 2]] * length,
        "numbers": list(range(1, length + 1)), "zeros": [0] * length, "truths": [True] * length, "none": None,
    }  # fmt: skip
    return values[kind]


@st.composite
def text_tables(draw: Any) -> list[dict[str, Any]]:
    values = TEXTS | EMPTY if draw(st.booleans()) else TEXTS | EMPTY | NO_TEXTS
    extra = draw(EXTRA_COLUMNS)
    texts = draw(st.lists(values, min_size=1, max_size=5))
    return [{"text": text, **{name: extra_value(kind, 2) for name, kind in extra.items()}} for text in texts]


@st.composite
def token_tables(draw: Any) -> list[dict[str, Any]]:
    values = IDS | EMPTY_IDS if draw(st.booleans()) else IDS | EMPTY_IDS | NO_IDS
    extra = draw(EXTRA_COLUMNS)
    has_labels = draw(st.booleans())
    has_mask = draw(st.booleans())
    rows = []
    for ids in draw(st.lists(values, min_size=1, max_size=5)):
        length = len(ids) if isinstance(ids, list) else 1
        row: dict[str, Any] = {"input_ids": ids, **{name: extra_value(kind, length) for name, kind in extra.items()}}
        wrong = draw(st.integers(0, 15)) == 0
        if has_labels:
            labels = st.lists(st.sampled_from([IGNORED, 0, 5, 70_000]), min_size=length + wrong, max_size=length + wrong)
            row["labels"] = draw(labels)
        if has_mask:
            marks = st.sampled_from([0, 1, 1, 1, 2] if wrong else [0, 1, 1, 1])
            row["attention_mask"] = draw(st.lists(marks, min_size=length, max_size=length))
        rows.append(row)
    return rows


def write_json_lines(path: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    path.write_text("".join(f"{json.dumps(row)}\n\n" for row in rows), encoding="utf-8")
    return rows


def write_json_array(path: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    path.write_text(json.dumps(rows, indent=len(rows) % 2), encoding="utf-8-sig")
    return rows


def write_json_objects(path: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    path.write_text("\n".join(json.dumps(row, indent=2) for row in rows), encoding="utf-8")
    return rows


def write_compressed(path: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    compress = gzip.compress if path.suffix == ".gz" else bz2.compress
    path.write_bytes(compress("\r\n".join(map(json.dumps, rows)).encode()))
    return rows


def write_csv(path: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write a table of texts. The reference is Python's own reader."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",", quoting=csv.QUOTE_ALL)
        writer.writeheader()
        writer.writerows(rows)
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ","))


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    pq.write_table(table_of(rows), path, row_group_size=2)
    return pq.read_table(path).to_pylist()


def write_arrow(path: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    table = table_of(rows)
    with (pa.ipc.new_file if len(rows) % 2 else pa.ipc.new_stream)(str(path), table.schema) as file:
        file.write_table(table)
    return table.to_pylist()


def write_feather(path: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    pyarrow.feather.write_feather(table_of(rows), str(path))
    return pyarrow.feather.read_table(str(path)).to_pylist()


def write_saved(path: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    datasets.Dataset(table_of(rows)).save_to_disk(path)
    return list(datasets.load_from_disk(str(path)))


def table_of(rows: list[dict[str, Any]]) -> pa.Table:
    """Return the rows as a table. The number of rows decides the type of its lists and texts."""
    table = pa.Table.from_pylist(rows)
    for number, field in enumerate(table.schema):
        kinds: list[Any] = [field.type]
        if pa.types.is_list(field.type) and pa.types.is_integer(field.type.value_type):
            kinds += [pa.large_list(pa.int64()), pa.list_(pa.uint64()), pa.list_view(pa.int64()), pa.list_(pa.int32())]
        if pa.types.is_string(field.type):
            kinds += [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
        kind = kinds[len(rows) % len(kinds)]
        try:
            table = table.set_column(number, pa.field(field.name, kind), pa.array(table.column(number).to_pylist(), kind))
        except (pa.ArrowException, OverflowError):
            continue  # such as a negative number in a list of uint64: the table keeps its own type
    return table


WRITERS = {
    "a.jsonl": write_json_lines,
    "a.json": write_json_array,
    "b.json": write_json_objects,
    "a.jsonl.gz": write_compressed,
    "a.ndjson.bz2": write_compressed,
    "a.csv": write_csv,
    "a.tsv": write_csv,
    "a.parquet": write_parquet,
    "a.arrow": write_arrow,
    "a.feather": write_feather,
    "saved": write_saved,
}


def is_numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, int | float) or is_numbers(item) for item in value)


def integers(value: Any) -> list[int] | None:
    """Return a list of integers, or None for anything else."""
    return value if isinstance(value, list) and all(type(item) is int for item in value) else None


class Unusable(Exception):
    """A table that must be refused."""


def reference(rows: list[dict[str, Any]], column: str) -> list[str | tuple[list[int], list[int] | None]]:
    """Return what each row is trained on. Raise Unusable if a row has no such meaning."""
    documents: list[str | tuple[list[int], list[int] | None]] = []
    for row in rows:
        value = row[column]
        if column == "input_ids" and isinstance(value, str):
            raise Unusable
        if value is None or (isinstance(value, str) and not value.strip()):
            continue
        documents += [value] if isinstance(value, str) else token_document(row, column)
    if not documents or len({type(document) for document in documents}) > 1:
        raise Unusable
    return documents


def token_document(row: dict[str, Any], column: str) -> list[tuple[list[int], list[int] | None]]:
    ids = integers(row[column])
    if ids is None or any(not 0 <= token <= LAST_ID for token in ids):
        raise Unusable
    for name, value in row.items():
        is_used = name in (column, "labels", "attention_mask", "special_tokens_mask")
        if not is_used and is_numbers(value) and not (name == "token_type_ids" and value == [0] * len(value)):
            raise Unusable
    labels = integers(row["labels"]) if "labels" in row else ids
    mask = row.get("attention_mask", [1] * len(ids))
    if labels is None or len(labels) != len(ids) or not isinstance(mask, list) or len(mask) != len(ids) or set(mask) - {0, 1}:
        raise Unusable
    if "01" in "".join(map(str, mask)).lstrip("0"):
        raise Unusable
    seen = [position for position, mark in enumerate(mask) if mark]
    if not seen:
        return []
    return [([ids[position] for position in seen], [labels[position] for position in seen] if "labels" in row else None)]


def check(name: str, rows: list[dict[str, Any]], column: str) -> None:
    """Check that the file is read as the reference says, or refused in one line that names the place."""
    say_once.cache_clear()
    with TemporaryDirectory() as folder:
        path = Path(folder) / name
        try:
            written = WRITERS[name](path, rows)
        except (pa.ArrowException, ValueError, OverflowError, TypeError):
            assume(False)  # the format cannot hold such a table
        try:
            expected = reference(written, column)
        except Unusable:
            with pytest.raises(RequestError) as caught:
                list(read_corpus(path).documents)
            message = str(caught.value)
            assert "\n" not in message
            assert str(path) in message and (
                "row " in message or "record " in message or ":" in message or "no documents" in message
            )
            return
        messages: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
        logger = logging.getLogger("upshift.training.data.data_files")
        logger.addHandler(handler)
        try:
            documents = list(read_corpus(path).documents)
        finally:
            logger.removeHandler(handler)
        if isinstance(expected[0], str):
            assert documents == expected
        else:
            rows_read = [(row.ids.tolist(), None if row.labels is None else row.labels.tolist()) for row in documents]
            assert rows_read == expected
            tokens = tokenize(documents, None)
            assert (tokens.num_documents, tokens.num_tokens) == (len(expected), sum(len(ids) for ids, _ in expected))
        used = {column} | ({"labels", "attention_mask", "token_type_ids"} if not isinstance(expected[0], str) else set())
        for unused in written[0].keys() - used:
            assert any("columns that are not used: " in text and unused in text for text in messages), (unused, messages)


PROFILE = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("name", WRITERS)
@PROFILE
@given(rows=text_tables())
def test_a_table_of_texts_is_read_as_it_is_or_refused(name, rows):
    check(name, rows, "text")


@pytest.mark.parametrize("name", [name for name in WRITERS if not name.endswith(("csv", "tsv"))])
@PROFILE
@given(rows=token_tables())
def test_a_table_of_tokens_is_read_as_it_is_or_refused(name, rows):
    check(name, rows, "input_ids")


ONE_ROW = b'{"text": "one"}\n'
TWO_ROWS = b'{"text": "one"}\n{"text": "two"}\n'


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.json", b'{\n "text": "one",\n "meta": {"a": [1, 2]}\n}\n', ["one"]),
        ("a.json", b'{\n "text": "one"\n}\n{\n "text": "two"\n}', ["one", "two"]),
        ("a.jsonl", b'\n[{"text": "one"},\n{"text": "two"}]\n', ["one", "two"]),
        ("a.jsonlines", TWO_ROWS, ["one", "two"]),
        ("a.JSONL", TWO_ROWS, ["one", "two"]),
        ("a.jsonl.gz", gzip.compress(ONE_ROW) + gzip.compress(ONE_ROW), ["one", "one"]),
        ("a.csv", b" \n\ntext\none\n", ["one"]),
        ("a.txt", b'{"a": 1} is an object\nin a text', ['{"a": 1} is an object\nin a text']),
        ("a.txt", b'{\n "a": 1\n} is an object', ['{\n "a": 1\n} is an object']),
        ("a.txt", b"x" * 2**19, None),
    ],
)
def test_files_are_read_as_their_content_says(name, content, expected, tmp_path):
    (tmp_path / name).write_bytes(content)
    documents = list(read_corpus(tmp_path / name).documents)
    assert documents == expected if expected else ["".join(document.pieces()) for document in documents] == [content.decode()]


def saved_without_rows(folder: Path) -> Path:
    datasets.Dataset.from_dict({"text": []}).save_to_disk(folder / "saved")
    return folder / "saved"


def saved_without_splits(folder: Path) -> Path:
    datasets.DatasetDict({}).save_to_disk(folder / "saved")
    return folder / "saved"


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "a.jsonl")
    return folder / "a.jsonl"


def socket_file(folder: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "s"))
    return folder / "s"


def kinds_of_splits(folder: Path) -> Path:
    (folder / "train.csv").write_text("text\na\n")
    (folder / "validation.jsonl").write_bytes(ONE_ROW)
    return folder


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (saved_without_rows, ["no documents"]),
        (saved_without_splits, ["no split 'train'", "has none"]),
        (pipe, ["a.jsonl is a pipe", "to a file"]),
        (socket_file, ["a socket"]),
        (kinds_of_splits, ["no split 'train'", "train.csv is of another kind"]),
        (lambda folder: "", ["'' does not exist"]),
        (lambda folder: "x" * 5000, ["does not exist"]),
        (lambda folder: "a\0b", ["does not exist"]),
        (lambda folder: "https://host/a.jsonl", ["'https://host/a.jsonl' does not exist on this machine"]),
    ],
)
def test_paths_without_data_are_refused(make, words, tmp_path):
    with pytest.raises(RequestError) as caught:
        list(read_corpus(make(tmp_path)).documents)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        *((name, TWO_ROWS, [name, "JSON objects", ".jsonl"]) for name in ("a.txt", "a", "a.jsonl.txt", "a.md")),
        ("a.gz", gzip.compress(ONE_ROW), ["JSON objects"]),
        ("a.txt", "one".encode("utf-16"), ["UTF-16", "iconv"]),
        ("a.jsonl", ONE_ROW.decode().encode("utf-16"), ["a.jsonl:1 is UTF-16 text"]),
        ("a.csv", b"\xff\xfet\0", ["a.csv:1 is UTF-16 text"]),
        ("a.csv", "id,text\n1,a\n".encode("utf-16-le"), ["a.csv:1 is UTF-16 text", "iconv -f UTF-16LE"]),
        ("a.jsonl", ONE_ROW.decode().encode("utf-16-be"), ["a.jsonl:1 is UTF-16 text", "iconv -f UTF-16BE"]),
        ("a.csv", b"id,text\n1,a\n2,b\xe9\n", ["a.csv:3 is not UTF-8 text", "iconv -f CP1252"]),
        ("a.csv", b"id,text\n" + b"1,abc\n" * 5000 + b"2,b\xe9\n", ["a.csv:5002 is not UTF-8 text"]),
        ("a.json", b'[\n{"text": "a"},\n{"text": "\xe9"}]', ["a.json:3 is not UTF-8 text"]),
        ("a.csv", b'id,text\n1,a\n2,"b\n3,c\n', ["a.csv:3 is no row", 'the closing " of a field is missing']),
        ("a.jsonl", ONE_ROW + b'{"text": "a cut lin\n' + ONE_ROW, ["a.jsonl:2", "the line ends before the value does"]),
        ("a.jsonl", ONE_ROW + b'{"text": "a cut"\n' + ONE_ROW, ["a.jsonl:2", "the line ends before the value does"]),
        ("a.jsonl", b'{"text": "a\tb"}\n', ["a.jsonl:1", "at character 12", "a tab"]),
        ("a.json", b'[{"text": "a"}, {"text": "b', ["a.json", "the file ends before the value does"]),
        ("a.jsonl", ONE_ROW + b'{"text": "\xe9"}', ["a.jsonl:2 is not UTF-8", "CP1252"]),
        ("a.txt", b"a\0b", ["zero bytes"]),
        ("a.jsonl", gzip.compress(ONE_ROW), ["a gzip file", ".gz"]),
        ("a.csv", gzip.compress(b"text"), ["a gzip file", ".gz"]),
        ("a.jsonl", bz2.compress(ONE_ROW), ["a bzip2 file"]),
        ("a.txt", b"PAR1\xff", ["a Parquet file", ".parquet"]),
        ("a.jsonl.gz", ONE_ROW, ["a.jsonl.gz is not a .gz file"]),
        ("a.txt.bz2", b"text", ["a.txt.bz2 is not a .bz2 file"]),
        ("a.jsonl.gz", gzip.compress(ONE_ROW) + b"more", ["not a complete compressed file"]),
        ("a.json", b'{"version": 1, "data": [{"text": "a"}]}', ["'data' holds the records", "jq .data"]),
        ("a.json", b'{\n"text": "a",\n}', ["a.json", "not valid JSON"]),
        ("a.json", b'{\n"text": "a"\n},\n{\n"text": "b"\n}', ["a.json", "not valid JSON"]),
        ("a.jsonl", b'{"text": "a"},\n{"text": "b"},\n', ["a.jsonl:1", "not valid JSON"]),
        ("a.json", b'["a", "b"]', ["a.json (record 1) is not a JSON object"]),
        *(("a.csv", f"id{mark}text\n1{mark}a".encode(), ["a.csv:1", repr(mark), "divides"]) for mark in ";|\t"),
        ("a.tsv", b"id,text\n1,a", ["a.tsv:1", "','", "tab"]),
    ],
)
def test_files_that_are_not_what_their_names_say_are_refused(name, content, words, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RequestError) as caught:
        list(read_corpus(tmp_path / name).documents)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a.yaml", "a.html", "a.psv", "a.XML.gz", "a.txt", "a.py"])
def test_a_text_of_another_syntax_is_said_to_be_read_with_its_marks(name, tmp_path, caplog):
    say_once.cache_clear()
    content = b"text: one\n"
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert list(read_corpus(tmp_path / name).documents) == [content.decode()]
    assert ("with all marks of its syntax" in caplog.text) is not name.endswith((".txt", ".py"))


def test_a_folder_names_the_pipes_in_it(tmp_path, caplog):
    say_once.cache_clear()
    os.mkfifo(tmp_path / "b.jsonl")
    (tmp_path / "a.jsonl").write_bytes(TWO_ROWS)
    assert list(read_corpus(tmp_path).documents) == ["one", "two"]
    assert "b.jsonl (pipes" in caplog.text


def test_an_empty_validation_split_is_said_and_not_used(tmp_path, caplog):
    say_once.cache_clear()
    texts = {"train": ["one", "two"], "validation": []}
    splits = {name: datasets.Dataset.from_dict({"text": values}) for name, values in texts.items()}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    corpus = read_corpus(tmp_path / "saved")
    assert (list(corpus.documents), corpus.evaluation) == (["one", "two"], None)
    assert "split validation is empty" in caplog.text


@pytest.mark.parametrize("suffix", [".parquet", ".feather", ".jsonl"])
def test_files_of_a_folder_may_have_other_columns_that_are_named(suffix, tmp_path, caplog):
    say_once.cache_clear()
    write = {".parquet": write_parquet, ".feather": write_feather, ".jsonl": write_json_lines}[suffix]
    write(tmp_path / f"1{suffix}", [{"input_ids": [1, 2]}])
    write(tmp_path / f"2{suffix}", [{"input_ids": [3], "tags": ["a"], "source": "web"}])
    assert [row.ids.tolist() for row in read_corpus(tmp_path).documents] == [[1, 2], [3]]
    assert "columns that are not used: tags, source" in caplog.text


FORM_ROWS: list[dict[str, Any]] = [
    {"text": "one"},
    {"input_ids": [1, 2]},
    {"messages": [{"role": "user", "content": "one"}]},
    {"conversations": [{"from": "human", "value": "one"}]},
    {"prompt": "one", "completion": "two"},
    {"instruction": "one", "output": "two"},
]


@pytest.mark.parametrize("reader", [{}, {"columns": "our names"}], ids=["alone", "described"])
@pytest.mark.parametrize("suffix", [".parquet", ".feather", ".jsonl"])
def test_a_file_without_the_columns_of_the_others_is_refused(suffix, reader, tmp_path):
    """Arrow returns no row if no column is read, so such a file would be left out without a word."""
    write = {".parquet": write_parquet, ".feather": write_feather, ".jsonl": write_json_lines}[suffix]
    for number, row in enumerate(FORM_ROWS):
        other = FORM_ROWS[number - 1]
        folder = tmp_path / str(number)
        folder.mkdir()
        write(folder / f"1{suffix}", [row])
        write(folder / f"2{suffix}", [other])
        description = {"path": str(folder)} | ({"columns": {name: name for name in row}} if reader else {})
        with pytest.raises(RequestError) as caught:
            list(read_data(json.dumps([description]), DataOptions(), has_decoder=False).documents)
        assert f"2{suffix}" in str(caught.value) and f"its columns are {', '.join(other)}" in str(caught.value)


@pytest.mark.parametrize("row", FORM_ROWS, ids=lambda row: "-".join(row))
def test_a_column_of_later_rows_is_named_in_every_form(row, tmp_path, caplog):
    say_once.cache_clear()
    later = {f"later{number}": "x" for number in range(9)}
    write_json_lines(tmp_path / "a.jsonl", [row] * 3 + [row | later])
    assert len(list(read_corpus(tmp_path / "a.jsonl").documents)) == 4
    (line,) = (record.getMessage() for record in caplog.records if "not used" in record.getMessage())
    assert line.endswith("columns that are not used: later0, later1, later2, later3, later4 and 4 more")


@pytest.mark.parametrize("name", ["labels", "attention_mask"])
def test_a_column_that_says_something_of_each_token_must_be_a_list(name, tmp_path):
    """It is read where a table knows its types in advance, too, and never left out."""
    table = pa.table({"input_ids": [[5, 6, 7], [5, 6]], name: [1, 0]})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(RequestError, match=f"column '{name}' holds 1; it must be a list"):
        list(read_corpus(tmp_path / "a.parquet").documents)


def test_the_names_of_columns_do_not_fill_the_memory(tmp_path, caplog):
    say_once.cache_clear()
    write_json_lines(tmp_path / "a.jsonl", [{"text": "one", f"key{number}": "x"} for number in range(3000)])
    documents = read_corpus(tmp_path / "a.jsonl").documents
    assert len(list(documents)) == 3000 and len(documents.column_names) <= MAX_COLUMN_NAMES
    assert "key0, key1, key2, key3, key4 and " in caplog.text and "and others in later rows" in caplog.text


def test_a_column_that_the_user_names_is_read_whatever_stands_beside_it(tmp_path):
    row = {"body": "one", "data": [{"text": "two"}], "dialogue": [{"text": "three"}]}
    (tmp_path / "a.json").write_text(json.dumps(row))
    assert list(read_corpus(tmp_path / "a.json", text_column="body").documents) == ["one"]
    (tmp_path / "b.jsonl").write_text(json.dumps({"dialogue": row["dialogue"]}))
    with pytest.raises(RequestError, match="dialogue") as refusal:
        read_corpus(tmp_path / "b.jsonl")
    assert "holds the records" not in str(refusal.value)


@pytest.mark.parametrize("kind", [pa.bool_(), pa.int64(), pa.float32(), pa.uint8()])
def test_a_null_inside_a_list_stays_in_its_list_alone(kind, tmp_path):
    """numpy has no null for most types: the lists beside one with a null keep their values."""
    numbers = [[1, None, 0], [1, 0], None, []]
    lists = [row and [None if item is None else pa.scalar(item).cast(kind).as_py() for item in row] for row in numbers]
    pq.write_table(pa.table({"a": pa.array(lists, pa.list_(kind))}), tmp_path / "a.parquet")
    values = [row["a"] for _, row in read_parquet(tmp_path / "a.parquet", lambda schema, origin: schema.names)]
    assert values[2] is None and len(values[3]) == 0
    assert list(values[1]) == lists[1]
    assert [item is None or item != item for item in values[0]] == [False, True, False]


def test_a_mask_with_a_null_is_refused(tmp_path):
    table = pa.table({"input_ids": [[1, 2, 3]], "attention_mask": pa.array([[True, None, True]], pa.list_(pa.bool_()))})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(RequestError, match="attention_mask"):
        list(read_corpus(tmp_path / "a.parquet").documents)
