"""JSON records in every writing: the values are those of ``json.loads``, and only a part of the file is in memory."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from upshift.errors import RequestError
from upshift.training.data import records
from upshift.training.data.records import read_json
from upshift.units import MIB

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
ROWS = st.lists(st.dictionaries(st.text(max_size=5), VALUES, max_size=4), min_size=1, max_size=12)
WRITERS: dict[str, Callable[..., str]] = {
    "array in one line": lambda rows, **how: json.dumps(rows, **how),
    "array in lines": lambda rows, **how: json.dumps(rows, indent=1, **how),
    "lines": lambda rows, **how: "\n".join(json.dumps(row, **how) for row in rows),
    "objects in lines": lambda rows, **how: "\n\n".join(json.dumps(row, indent=2, **how) for row in rows),
}


@pytest.mark.parametrize("writing", WRITERS)
@pytest.mark.parametrize("block", [1, 7, 64, 2**20])
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(rows=ROWS, is_ascii=st.booleans(), before=st.sampled_from(["", " \n", "\ufeff", "\ufeff \r\n\t", "\n" * 100]))
def test_records_are_those_of_json(writing, block, rows, is_ascii, before, tmp_path, monkeypatch):
    monkeypatch.setattr(records, "READ_CHARACTERS", block)
    monkeypatch.setattr(records, "READ_BYTES", block)
    assume(rows[0])  # an empty object takes one line, and then each line is read as one object
    path = tmp_path / "a.json"
    if block < 3:
        before = before.replace("\ufeff", "")  # a byte order mark has three bytes
    text = WRITERS[writing](rows, ensure_ascii=is_ascii)
    path.write_text(before + text + "\n", encoding="utf-8", errors="surrogatepass")
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        with pytest.raises(RequestError, match="not UTF-8"):
            list(read_json(path))
        return
    read = [row for _, row in read_json(path)]
    assert json.dumps(read) == json.dumps(rows)  # NaN is not equal to itself


def peak_of(read: Callable[[], Any]) -> int:
    """Return the most bytes that Python held at once while ``read`` ran."""
    tracemalloc.start()
    try:
        read()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def big_array(path: Path, second: str) -> Path:
    """Write an array of 32 MiB in one line, with ``second`` as the second record."""
    record = json.dumps({"text": "word" * 2**16})
    path.write_text("[" + ",".join([record, second] + [record] * (32 * MIB // len(record))) + "]")
    return path


def test_an_array_in_one_line_is_read_in_parts(tmp_path):
    path = big_array(tmp_path / "a.json", '{"text": "two"}')
    assert peak_of(lambda: sum(1 for _ in read_json(path))) < 12 * MIB


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ('{"text": "two" "three"}', "a comma or a closing bracket is missing"),
        ('{"text": "two\nthree"}', "a text holds a line break"),
        ('{text: "two"}', "a name in double quotes is missing"),
        ('{"text": "two", "text": "three"}', "'text' is given twice"),
        ('{"text": two}', "a value is missing"),
        ('{"text": "two}', "a comma or a closing bracket is missing"),
        ('{"text": "\\x"}', "that begins no character of JSON"),
        ('{"text": "two"', "a name in double quotes is missing"),
    ],
)
def test_a_mistake_is_found_without_reading_on(second, reason, tmp_path):
    path = big_array(tmp_path / "a.json", second)

    def read() -> None:
        with pytest.raises(RequestError, match=reason) as refusal:
            list(read_json(path))
        assert "\n" not in str(refusal.value) and str(path) in str(refusal.value)

    assert peak_of(read) < 12 * MIB


@pytest.mark.parametrize("block", [1, 50, 2**20])
def test_a_mistake_is_named_with_its_line_and_column(block, tmp_path, monkeypatch):
    monkeypatch.setattr(records, "READ_CHARACTERS", block)
    lines = ["[", *(json.dumps({"text": f"record {number}"}) + "," for number in range(9)), '{"a": 1}, {"text": "two" 3}]']
    path = tmp_path / "a.json"
    path.write_text("\n".join(lines))
    with pytest.raises(json.JSONDecodeError) as expected:
        json.loads(path.read_text())
    with pytest.raises(RequestError, match=f"line {expected.value.lineno} column {expected.value.colno}\\)"):
        list(read_json(path))


@pytest.mark.parametrize("text", ["plain", "\U0001f600"])
def test_many_small_records_of_an_array_cost_what_lines_cost(text, tmp_path):
    rows = [{"text": text * 20}] * 20_000
    array = tmp_path / "a.json"
    lines = tmp_path / "a.jsonl"
    array.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    with lines.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

    def seconds(path: Path) -> float:
        start = time.process_time()
        assert sum(1 for _ in read_json(path)) == len(rows)
        return time.process_time() - start

    fastest = {path: min(seconds(path) for _ in range(2)) for path in (array, lines)}
    assert fastest[array] < 10 * fastest[lines]
