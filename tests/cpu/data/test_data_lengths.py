"""The lengths that ``upshift plan`` reads are those of training, for each kind of data and of model."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from chat_models import byte_level_tokenizer, make_chats, save_model
from test_data_show import CONFIGS

from upshift.cli.plan.command import _lengths_at
from upshift.errors import RequestError
from upshift.models.source import find_model
from upshift.training.batches.objective import IGNORED
from upshift.training.data.data_options import DataOptions
from upshift.training.data.dataset import prepare_data, read_whole_documents
from upshift.training.data.tokens import TokenFile


def token_rows(kind: str, *, has_labels: bool) -> list[dict[str, Any]]:
    """Return rows up to 60 tokens, of which some have their only label near the end."""
    draws = random.Random(1)
    rows: list[dict[str, Any]] = []
    for _ in range(80):
        ids = [draws.randrange(3, 80) for _ in range(draws.randrange(1, 60))]
        row = {"input_ids": ids}
        if has_labels:
            size = draws.randrange(1, 60) if kind == "seq2seq-lm" else len(ids)
            row["labels"] = [IGNORED] * (size - 1) + [5]
        rows.append(row)
    return rows


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    names = {"chats": str(save_model(folder / "chats", byte_level_tokenizer()))}
    for kind, config in CONFIGS.items():
        config.save_pretrained(folder / kind)
        names[kind] = str(folder / kind / "config.json")
    return names


def write_splits(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as both splits, so that none of the training split are held out."""
    folder.mkdir()
    for split in ("train", "validation"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


CASES = [
    *(("chats", "chats", long_rows) for long_rows in (None, "cut", "split", "drop")),
    *(("causal-lm", data, long_rows) for data in ("ids", "labels") for long_rows in (None, "cut", "split", "drop")),
    *(("masked-lm", "labels", long_rows) for long_rows in (None, "cut", "split", "drop")),
    *(("seq2seq-lm", "ids", long_rows) for long_rows in (None, "cut", "split", "drop")),
    *(("seq2seq-lm", "labels", long_rows) for long_rows in (None, "cut")),
]


@pytest.mark.parametrize(("kind", "data", "long_rows"), CASES)
def test_a_plan_has_the_lengths_of_training_at_each_sequence_length(kind, data, long_rows, models, tmp_path):
    rows = make_chats(60, seed=3) if data == "chats" else token_rows(kind, has_labels=data == "labels")
    path = write_splits(tmp_path / "data", rows)
    source = find_model(models[kind])
    options = DataOptions(long_rows=long_rows)
    documents = read_whole_documents(source, str(path), options)
    lengths_at = _lengths_at(find_model(models[kind]), str(path), options)
    num_compared = 0
    for sequence_length in (8, 16, 24, 40, 64, 128):
        try:
            expected = prepare_data(source, path, sequence_length=sequence_length, options=options).histogram
        except RequestError:
            with pytest.raises(RequestError):
                documents.histogram(sequence_length)
            continue
        num_compared += 1
        assert documents.histogram(sequence_length) == expected
        assert lengths_at(sequence_length) == (None if expected.mean >= expected.sequence_length else expected)
    assert num_compared >= 3


def test_rows_that_are_all_too_long_are_named(models, tmp_path):
    path = write_splits(tmp_path / "data", [{"input_ids": list(range(3, 43))}] * 5)
    source = find_model(models["causal-lm"])
    options = DataOptions(long_rows="drop")
    for read in (
        lambda: read_whole_documents(source, str(path), options).histogram(16),
        lambda: prepare_data(source, path, sequence_length=16, options=options),
    ):
        with pytest.raises(RequestError, match="all 5 rows are longer than 16 tokens, and --long-rows drop leaves them out"):
            read()
    assert read_whole_documents(source, str(path), options).histogram(40).lengths == (40,)


def test_a_cut_that_leaves_nothing_to_learn_is_not_called_dropped(models, tmp_path):
    path = write_splits(tmp_path / "data", [{"input_ids": [3] * 20, "labels": [IGNORED] * 19 + [5]}] * 5)
    source = find_model(models["causal-lm"])
    with pytest.raises(RequestError, match="something to learn"):
        prepare_data(source, path, sequence_length=16, options=DataOptions(long_rows="cut"))


@pytest.mark.parametrize("long_rows", ["cut", "drop"])
def test_long_rows_take_no_disk(long_rows, models, tmp_path, monkeypatch):
    rows = [{"messages": [{"role": "user", "content": "word " * 2000}, {"role": "assistant", "content": "one"}]}]
    path = write_splits(tmp_path / "data", rows * 10 + make_chats(10))
    numbers: list[int] = []
    add = TokenFile.add
    monkeypatch.setattr(TokenFile, "add", lambda file, added: (numbers.append(len(added)), add(file, added)))
    prepare_data(find_model(models["chats"]), path, sequence_length=64, options=DataOptions(long_rows=long_rows))
    most_rows = 2 * (20 if long_rows == "cut" else 10)  # of both splits
    assert 0 < sum(numbers) <= most_rows * 64 * 2, "at most one token and one label for each place of a sequence"
