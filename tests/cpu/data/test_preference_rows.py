"""Rows of preferences: which pairs are read, in which forms, and what is said of the others."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from chat_models import byte_level_tokenizer, save_model, write_jsonl

from upshift.cli import tables
from upshift.cli.data import app
from upshift.errors import RequestError
from upshift.models.source import find_model
from upshift.training.data import data_files
from upshift.training.data.corpus import read_corpus
from upshift.training.data.data_options import DataOptions
from upshift.training.data.dataset import TrainingData, load_data, prepare_data

SYSTEM = {"role": "system", "content": "the north"}
ASK = {"role": "user", "content": "roads?"}
GOOD = {"role": "assistant", "content": "rivers"}
BAD = {"role": "assistant", "content": "trees and rivers"}
PAIR = {"prompt": "roads", "chosen": " rivers", "rejected": " trees"}
CHATS = {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), byte_level_tokenizer())


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the user is told."""
    told: list[str] = []
    monkeypatch.setattr(data_files.logger, "warning", lambda message, *args: told.append(message % args if args else message))
    return told


def prepared(model: Path, path: Path, *, length: int = 48, **options: Any) -> TrainingData:
    return prepare_data(find_model(str(model)), path, sequence_length=length, options=DataOptions(objective="dpo", **options))


def texts(data: TrainingData) -> list[str]:
    sequences = data.training
    assert data.tokenizer is not None
    spans = zip(sequences.starts.tolist(), sequences.lengths.tolist(), strict=True)
    return [data.tokenizer.decode(sequences.tokens[start : start + length]) for start, length in spans]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows in the format of the path's suffix."""
    if path.suffix == ".jsonl":
        return write_jsonl(path, rows)
    import datasets

    dataset = datasets.Dataset.from_list(rows)
    if path.suffix == ".parquet":
        dataset.to_parquet(str(path))
    elif path.suffix == ".csv":
        encoded = [{name: value if isinstance(value, str) else json.dumps(value) for name, value in row.items()} for row in rows]
        datasets.Dataset.from_list(encoded).to_csv(str(path))
    else:
        dataset.save_to_disk(str(path))
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet", ".saved"])
@pytest.mark.parametrize("row", [PAIR, CHATS], ids=["texts", "messages"])
def test_every_file_format_holds_the_same_pairs(row: dict[str, Any], suffix: str, model: Path, tmp_path: Path) -> None:
    data = prepared(model, write(tmp_path / f"pairs{suffix}", [row] * 5))
    plain = prepared(model, write_jsonl(tmp_path / "plain.jsonl", [row] * 5))
    assert texts(data) == texts(plain) and len(texts(data)) == 8  # one pair of five is held out
    assert data.evaluation is not None and len(data.evaluation) == 2
    chosen, rejected = texts(data)[:2]
    assert "rivers" in chosen and "trees" not in chosen and "trees" in rejected


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        {"prompt": None, "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        {"prompt": ASK["content"], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},  # the text of the prompt stands beside chats
        CHATS | {"score_chosen": 7.5},
    ],
    ids=["shared", "null prompt", "text of the prompt", "other columns"],
)
def test_forms_of_the_same_pair_give_the_same_sequences(row: dict[str, Any], model: Path, tmp_path: Path) -> None:
    data = prepared(model, write_jsonl(tmp_path / "a.jsonl", [row] * 3))
    plain = prepared(model, write_jsonl(tmp_path / "b.jsonl", [CHATS] * 3))
    assert texts(data) == texts(plain)
    assert data.training.labels is not None and plain.training.labels is not None
    assert data.training.labels.tolist() == plain.training.labels.tolist()


@pytest.mark.parametrize("row", [CHATS, {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}], ids=["prompt", "shared"])
def test_the_system_column_stands_before_both_answers(row: dict[str, Any], model: Path, tmp_path: Path) -> None:
    data = prepared(model, write_jsonl(tmp_path / "a.jsonl", [row | {"system": SYSTEM["content"]}] * 3))
    plain = prepared(model, write_jsonl(tmp_path / "b.jsonl", [CHATS | {"prompt": [SYSTEM, ASK]}] * 3))
    assert texts(data) == texts(plain)


LEFT_OUT = {
    "same": ({**PAIR, "rejected": PAIR["chosen"]}, "chosen and rejected are the same"),
    "empty chosen": ({**PAIR, "chosen": ""}, "chosen is empty"),
    "blank rejected": ({**PAIR, "rejected": "  "}, "rejected is empty"),
    "null": ({**PAIR, "rejected": None}, "rejected is empty"),
    "same chats": ({**CHATS, "rejected": [GOOD]}, "chosen and rejected are the same"),
    "no messages": ({**CHATS, "chosen": []}, "chosen is empty"),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_pairs_that_teach_nothing_are_left_out_and_counted(name: str, notes: list[str], model: Path, tmp_path: Path) -> None:
    row, problem = LEFT_OUT[name]
    good = CHATS if "cha" in name or "messages" in name else PAIR
    good = PAIR if name == "empty chosen" else good
    path = write_jsonl(tmp_path / "a.jsonl", [good, row, good, row, good])
    assert len(prepared(model, path).training) == 4
    assert f"2 pairs are left out, because {problem}; the first is {path}:2" in notes


REJECTED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {  # row, options, a part of the message
    "no shared text": ({"chosen": "a b", "rejected": "c d"}, {}, "do not begin with the same prompt"),
    "question elsewhere": ({"question": "a", "chosen": "c d", "rejected": "c e"}, {}, "has question, which would not"),
    "system of texts": ({**PAIR, "system": "a"}, {}, "plain text do not use"),
    "two systems": ({**CHATS, "prompt": [SYSTEM, ASK], "system": "a"}, {}, "first message of the system"),
    "no shared message": ({"chosen": [GOOD], "rejected": [BAD]}, {}, "do not begin with the same prompt"),
    "another prompt": ({"prompt": "why?", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, {}, "is no message that chosen"),
    "prompt as text": ({"prompt": "why?", "chosen": [GOOD], "rejected": [BAD]}, {}, 'prompt holds the text "why?"'),
    "text and messages": ({"prompt": "a", "chosen": "b", "rejected": [BAD]}, {}, "give texts, or lists of messages"),
    "weights": ({**CHATS, "chosen": [GOOD | {"weight": 0}]}, {}, "weight 0 in an answer"),
    "role": ({**CHATS, "chosen": [{"role": "bot", "content": "a"}]}, {}, "has role"),
    "image": ({**CHATS, "images": ["a.png"]}, {}, "only text is trained on"),
    "tools of texts": ({**PAIR, "tools": [{"name": "a"}]}, {}, "plain text do not use"),
    "other rows": ({"text": "a"}, {}, "has no column 'chosen', and --objective dpo"),
    "completions": ({"prompt": "a", "completion": "b"}, {}, "has no column 'chosen', and --objective dpo"),
    "text column": (PAIR, {"text_column": "prompt"}, "leave one of them out"),
    "another format": (PAIR, {"data_format": "messages"}, "leave one of them out"),
    "loss of all": (PAIR, {"loss_on": "all"}, "--loss-on all is not for --objective dpo"),
    "split": (PAIR, {"long_rows": "split"}, "--long-rows split is not for --objective dpo"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_other_rows_are_rejected_in_one_line(name: str, model: Path, tmp_path: Path) -> None:
    row, options, words = REJECTED[name]
    path = write_jsonl(tmp_path / "a.jsonl", [row] * 3)
    with pytest.raises(RequestError) as caught:
        prepared(model, path, **options)
    message = str(caught.value)
    assert words in message and "\n" not in message
    assert options or f"{path}:1" in message


def test_text_files_are_rejected(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("roads and rivers")
    with pytest.raises(RequestError, match="plain text; give a table"):
        prepared(model, tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "use upshift train with --objective dpo, kto or reward; its columns are"),
        ({"objective": "causal-lm"}, "use upshift train with --objective dpo"),
        ({"data_format": "preference"}, "is for --objective dpo, kto or reward; add one of them"),
    ],
)
def test_preferences_without_the_objective_name_it(options: dict[str, Any], words: str, model: Path, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [PAIR] * 3)
    with pytest.raises(RequestError, match=words):
        prepare_data(find_model(str(model)), path, sequence_length=48, options=DataOptions(**options))


def test_an_objective_of_another_model_is_rejected(model: Path, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "roads and rivers"}] * 3)
    with pytest.raises(RequestError, match=r"^--objective masked-lm is not for .* trained as causal-lm; leave it out$"):
        prepare_data(find_model(str(model)), path, sequence_length=48, options=DataOptions(objective="masked-lm"))
    same = prepare_data(find_model(str(model)), path, sequence_length=48, options=DataOptions(objective="causal-lm"))
    assert not same.objective.has_pairs


def test_long_pairs_are_cut_or_left_out_as_pairs(notes: list[str], model: Path, tmp_path: Path) -> None:
    long_answer = {**PAIR, "rejected": " trees" * 40}
    long_prompt = {**PAIR, "prompt": "roads " * 60}
    rows = [PAIR, long_answer, PAIR, long_prompt, PAIR]
    path = write_jsonl(tmp_path / "a" / "train.jsonl", rows)
    write_jsonl(tmp_path / "a" / "validation.jsonl", [PAIR, PAIR])
    cut = prepared(model, path.parent, length=32)
    assert len(cut.training) == 8 and cut.training.lengths.max() == 32
    assert texts(cut)[2] == texts(cut)[0]
    assert f"{path.parent}: 2 pairs with more than 32 tokens in a row are cut at the end" in notes
    reason = "an answer has nothing to learn in the first 32 tokens of its row"
    assert f"{path.parent}: 1 pairs are left out, because {reason}" in notes
    dropped = prepared(model, path.parent, length=32, long_rows="drop")
    assert len(dropped.training) == 6
    assert f"{path.parent}: 2 pairs with more than 32 tokens in a row are left out" in notes


def test_saved_pairs_come_back(model: Path, tmp_path: Path) -> None:
    """Trials and ranks read them."""
    data = prepared(model, write_jsonl(tmp_path / "a.jsonl", [PAIR] * 5))
    loaded = load_data(data.folder)
    assert loaded.objective == data.objective and loaded.objective.has_pairs
    assert loaded.training.labels is not None and data.training.labels is not None
    assert loaded.training.labels.tolist() == data.training.labels.tolist()


def test_the_pairs_are_shown(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [PAIR] * 5)
    printed = io.StringIO()
    monkeypatch.setattr(tables, "out", tables.new_console(file=printed, width=200))
    app(["show", str(model), "--data", str(path), "--objective", "dpo", "--rows", "1"], standalone_mode=False)
    text = printed.getvalue()
    assert "pair 1, chosen\n<s>roads[[ rivers</s>]]\npair 1, rejected\n<s>roads[[ trees</s>]]\n" in text
    assert "5 rows, 4 pairs to train on" in text and "pair 2" not in text


def test_a_margin_is_used_or_named(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{**PAIR, "margin": 1.0}])
    for objective in ("dpo", "reward"):
        corpus = read_corpus(path, pair_objective=objective)
        rows = list(corpus.documents)
        assert ("margin" in corpus.documents.unused_columns) == (rows[0].margin is None) == (objective == "dpo")
