"""Columns with other names than Upshift's: the message says which renaming fits, and the renamed table is read."""

from __future__ import annotations

import re
from typing import Any

import pytest

from upshift.errors import RequestError
from upshift.training.data.row_formats import find_format

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
SHAREGPT = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
RENAMED: dict[str, tuple[dict[str, Any], str]] = {  # a row -> the format that the message leads to
    "question, answer": ({"question": "a", "answer": "b"}, "alpaca"),
    "user, assistant": ({"user": "a", "assistant": "b", "id": 1}, "alpaca"),
    "capitals": ({"Question": "a", "Answer": "b"}, "alpaca"),
    "input, output": ({"input": "a", "output": "b"}, "alpaca"),
    "instruction, response": ({"instruction": "a", "input": "c", "response": "b"}, "alpaca"),
    "prompt, response": ({"prompt": "a", "response": "b"}, "prompt-completion"),
    "query, completion": ({"query": "a", "completion": "b"}, "prompt-completion"),
    "Prompt, Completion": ({"Prompt": "a", "Completion": "b"}, "prompt-completion"),
    "Text": ({"Text": "a", "id": 1}, "text"),
    "a blank": ({" text": "a"}, "text"),
    "chat": ({"id": 1, "chat": CHAT}, "messages"),
    "talk as JSON text": ({"talk": '[{"role": "user", "content": "a"}]', "question": "a", "answer": "b"}, "messages"),
    "dialog": ({"dialog": SHAREGPT}, "conversations"),
}


def format_of(row: dict[str, Any]) -> str:
    return find_format(row, text_column=None, data_format=None, empty=(), origin="rows.csv:2", sample=row).format


@pytest.mark.parametrize("name", RENAMED)
def test_the_message_names_the_renaming_that_fits(name: str) -> None:
    row, expected = RENAMED[name]
    with pytest.raises(RequestError, match="^rows.csv:2 has no column that Upshift knows by its name; ") as caught:
        format_of(row)
    message = str(caught.value)
    renames = dict(re.findall(r"'([^']+)' to '([^']+)'", message))
    assert renames and "\n" not in message and "--text-column" not in message
    assert "columns: {" + ", ".join(f"{ours}: {theirs}" for theirs, ours in renames.items()) + "}" in message
    assert format_of({renames.get(column, column): value for column, value in row.items()}) == expected


@pytest.mark.parametrize("row", [{"content": "a"}, {"question": "a"}, {"tags": ["a"]}, {"talk": "[not JSON"}, {"a": [{"b": 1}]}])
def test_columns_that_say_nothing_are_listed(row: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="its columns are .*--text-column"):
        format_of(row)
