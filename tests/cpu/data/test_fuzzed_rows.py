"""Rows of any JSON are learned or rejected in one line that names the file, whatever the description of the data says."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from helpers.chat_models import byte_level_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from upshift.errors import RequestError
from upshift.training.data.data_options import DataOptions
from upshift.training.data.rows.joined import read_data
from upshift.training.data.tokenizer import tokenize

TOKENIZER = byte_level_tokenizer()
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    ["", "\u2028", "\r\n", "\ufeff", "\x00", "{", "[1", "user", "assistant", "<s>"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**70) | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
ANY = TEXTS | VALUES
ROLES = st.sampled_from(["user", "assistant", "system", "tool", "human", "gpt"]) | VALUES
MESSAGES = st.one_of(
    st.tuples(TEXTS, TEXTS).map(lambda turn: [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]),
    st.lists(
        st.fixed_dictionaries({"role": ROLES, "content": ANY}, optional={"weight": VALUES, "tool_calls": VALUES})
        | st.fixed_dictionaries({"from": ROLES, "value": ANY})
        | VALUES,
        max_size=4,
    ),
    VALUES,
)
SEGMENTS = st.lists(st.fixed_dictionaries({"text": ANY, "label": st.booleans() | VALUES}) | VALUES, max_size=3)
ROWS = st.one_of(
    st.fixed_dictionaries({"messages": MESSAGES}, optional={"tools": VALUES, "system": VALUES, "chat_template_kwargs": VALUES}),
    st.fixed_dictionaries({"conversations": MESSAGES}),
    st.fixed_dictionaries({"prompt": MESSAGES | TEXTS, "completion": MESSAGES | TEXTS}),
    st.fixed_dictionaries({"prompt": MESSAGES | TEXTS, "chosen": MESSAGES | TEXTS, "rejected": MESSAGES | TEXTS}),
    st.fixed_dictionaries({"instruction": ANY, "output": ANY}, optional={"input": ANY, "history": VALUES}),
    st.fixed_dictionaries({"segments": SEGMENTS}),
    st.fixed_dictionaries({"input_ids": VALUES}, optional={"labels": VALUES, "attention_mask": VALUES}),
    st.dictionaries(TEXTS, VALUES, max_size=3),
    VALUES,
)
DESCRIPTIONS: list[dict[str, Any]] = [
    {}, {"template": "axolotl/alpaca"}, {"template": "llama-factory/default", "thinks": False}, {"loss_on": "content"},
    {"split": "train[-50%:]"},
    {"format": "messages", "columns": {"messages": "conversations"}, "message_fields": {"role": "from", "content": "value"}},
]  # fmt: skip


@settings(max_examples=30, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.lists(ROWS, min_size=1, max_size=3),
    st.sampled_from(DESCRIPTIONS),
    st.sampled_from([None, None, "dpo", "reward"]),
    st.sampled_from(["plain", "array", "gz", "crlf", "bom"]),
)
def test_rows_are_learned_or_rejected_in_one_line(
    folder: Path, rows: list[Any], description: dict[str, Any], objective: Any, form: str
) -> None:
    path = folder / {"array": "rows.json", "gz": "rows.jsonl.gz"}.get(form, "rows.jsonl")
    text = json.dumps(rows) if form == "array" else ("\r\n" if form == "crlf" else "\n").join(map(_line, rows))
    content = ("\ufeff" * (form == "bom") + text).encode()
    path.write_bytes(gzip.compress(content) if form == "gz" else content)
    try:
        corpus = read_data(json.dumps([{"path": str(path), **description}]), DataOptions(objective=objective), has_decoder=False)
        tokenized = tokenize(corpus.documents, TOKENIZER)
    except RequestError as error:
        assert "\n" not in str(error)
        assert path.name in str(error) or "<unk>" in str(error)
    else:
        assert tokenized.offsets[-1] == len(tokenized.tokens)
        assert tokenized.labels is None or len(tokenized.labels) == len(tokenized.tokens)


def _line(row: Any) -> str:
    return json.dumps(row, ensure_ascii=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")
