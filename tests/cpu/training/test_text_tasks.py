"""Training on words with tags, questions with answers and texts with labels: losses of a plain loop, and bad rows by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from command import Command
from plain_loop import plain_losses
from task_runs import RATE, STEPS, train, write_rows
from text_models import PIECES, SPECIAL, named, save_text_model
from transformers import AutoTokenizer

from upshift.errors import RequestError

TAGS = ("B-LOC", "B-PER", "O")
SENTENCES = (  # words of several pieces, and rows of different lengths
    ("anna lives in rome", ("B-PER", "O", "O", "B-LOC")),
    ("bob and annas", ("B-PER", "O", "B-PER")),
    ("paris", ("B-LOC",)),
)
CONTEXT = "bob lives in paris and anna lives in rome . annas"
ROMES = {
    "question": "  where is anna",
    "context": CONTEXT,
    "answers": {"text": ["rome"], "answer_start": [CONTEXT.index("rome")]},
}
NOWHERE = {"question": "who is good", "context": "bob lives in paris .", "answers": {"text": [], "answer_start": []}}


def word_rows(name: str, tags: Sequence[Any] = TAGS) -> list[dict[str, Any]]:
    numbers = {tag: value for tag, value in zip(TAGS, tags, strict=True)}
    return [{"tokens": text.split(), name: [numbers[tag] for tag in row]} for text, row in SENTENCES]


def word_inputs(folder: Path) -> Any:
    """The batch of transformers' run_ner.py: its labels by words, and its collator."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encodings = []
    for text, tags in SENTENCES:
        encoding = tokenizer(text.split(), is_split_into_words=True, truncation=True)
        labels = []
        previous = None
        for word in encoding.word_ids():
            labels.append(-100 if word is None or word == previous else TAGS.index(tags[word]))
            previous = word
        encodings.append({**encoding, "labels": labels})
    return transformers.DataCollatorForTokenClassification(tokenizer)(encodings)


@pytest.mark.parametrize("name", ["BertForTokenClassification", "DistilBertForTokenClassification"])
def test_the_first_piece_of_a_word_learns_its_tag(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save_text_model(tmp_path / "model", name, **named(*TAGS))
    inputs = word_inputs(folder)
    model = transformers.AutoModelForTokenClassification.from_pretrained(folder)
    expected = plain_losses(model, inputs, steps=STEPS, rate=RATE)
    data = write_rows(tmp_path / "rows.jsonl", *word_rows("ner_tags"))
    losses = train(folder, data, tmp_path / "out", rows=3)
    assert losses == pytest.approx(expected, rel=2e-4)
    assert "token classification, the words of 'tokens' with the tags of 'ner_tags' (3 labels" in caplog.text
    saved = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        trained, reference = (each.eval()(**inputs).loss.item() for each in (saved, model))
    assert trained == pytest.approx(reference, rel=1e-3)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").vocab_size == len(SPECIAL) + len(PIECES)
    assert train(folder, data, tmp_path / "cut", rows=3, fixed=("per_device_train_batch_size=1",)) == pytest.approx(
        expected, rel=2e-4
    )  # rows have other numbers of tags, so that a mean of the rows' losses is another number


def qa_inputs(folder: Path, *, length: int) -> dict[str, Any]:
    """The rows of a question, as the texts of their tokens say where the answer is."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = []
    for question, context in (("where is anna", CONTEXT), (NOWHERE["question"], NOWHERE["context"])):
        rows += tokenizer(
            question, context, truncation="only_second", max_length=length, stride=length // 3, return_overflowing_tokens=True
        ).encodings
    inputs = tokenizer.pad(
        {name: [getattr(row, part) for row in rows] for name, part in (("input_ids", "ids"), ("token_type_ids", "type_ids"))},
        return_tensors="pt",
    )
    places = [row.tokens.index("rome") if "rome" in row.tokens else 0 for row in rows]
    assert len(rows) > 2 and any(places) and not all(places[:-1])  # a row of the long context lacks the answer
    return {**inputs, "start_positions": torch.tensor(places), "end_positions": torch.tensor(places)}


def test_answers_are_found_in_the_rows_of_a_long_context(tmp_path: Path) -> None:
    folder = save_text_model(tmp_path / "model", "BertForQuestionAnswering")
    inputs = qa_inputs(folder, length=12)
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(folder)
    expected = plain_losses(model, inputs, steps=STEPS, rate=RATE)
    data = write_rows(tmp_path / "rows.jsonl", ROMES, NOWHERE)
    losses = train(folder, data, tmp_path / "out", rows=len(inputs["input_ids"]), sequence_length=12)
    assert losses == pytest.approx(expected, rel=2e-4)


LABELLED: dict[str, tuple[list[Any], Any, dict[str, Any]]] = {  # the column, what is learned of it, and the config of the head
    "names": (["no", "yes", "no"], torch.tensor([0, 1, 0]), named("no", "yes")),
    "numbers": ([0, 2, 1], torch.tensor([0, 2, 1]), named("a", "b", "c")),
    "regression": ([0.5, 2, -1], torch.tensor([0.5, 2.0, -1.0]), named("LABEL_0")),
    "indicators": ([[0, 1, 1], [1, 0, 0], [0, 0, 0]], torch.tensor([[0.0, 1, 1], [1, 0, 0], [0, 0, 0]]), named("a", "b", "c")),
    "several names": ([["b"], [], ["a", "c"]], torch.tensor([[0.0, 1, 0], [0, 0, 0], [1, 0, 1]]), named("a", "b", "c")),
}


@pytest.mark.parametrize("kind", LABELLED)
def test_texts_with_labels(kind: str, tmp_path: Path) -> None:
    column, labels, config = LABELLED[kind]
    if labels.ndim == 2:
        config = {**config, "problem_type": "multi_label_classification"}
    folder = save_text_model(tmp_path / "model", "DistilBertForSequenceClassification", **config)
    pairs = [("anna lives", "in rome"), ("bob", "and annas ."), ("paris is good", "bad")]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer([first for first, _ in pairs], [second for _, second in pairs], padding=True, return_tensors="pt")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    expected = plain_losses(model, {**inputs, "labels": labels}, steps=STEPS, rate=RATE)
    rows = (
        {"premise": first, "hypothesis": second, "label": value} for (first, second), value in zip(pairs, column, strict=True)
    )
    losses = train(folder, write_rows(tmp_path / "rows.jsonl", *rows), tmp_path / "out", rows=3)
    assert losses == pytest.approx(expected, rel=2e-4)


def test_a_model_of_masked_words_gets_a_head_for_the_tags_of_a_table(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    datasets = pytest.importorskip("datasets")
    folder = save_text_model(tmp_path / "model", "BertForMaskedLM")
    names = ("O", "B-PER", "B-LOC")
    feature = datasets.List(datasets.ClassLabel(names=list(names)))
    features = datasets.Features({"tokens": datasets.List(datasets.Value("string")), "ner_tags": feature})
    rows = word_rows("ner_tags", [names.index(tag) for tag in TAGS])
    datasets.Dataset.from_list(rows, features=features).to_parquet(tmp_path / "rows.parquet")
    train(folder, tmp_path / "rows.parquet", tmp_path / "out", rows=3)
    assert "gets a new head for 3 labels (O, B-PER, B-LOC), whose weights are random" in caplog.text
    saved = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "out")
    assert saved.config.id2label == dict(enumerate(names))


def test_the_objective_chooses_between_texts_and_their_labels(
    tmp_path: Path, upshift: Command, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_text_model(tmp_path / "model", "BertForMaskedLM")
    data = write_rows(tmp_path / "rows.jsonl", {"text": "anna is good", "label": "yes"}, {"text": "bob is bad", "label": "no"})
    texts, labels = (
        upshift("data", "show", folder, "--data", data, "--eval-size", 0, *options)
        for options in ((), ("--objective", "sequence-classification"))
    )
    assert "--objective sequence-classification learns their labels" in caplog.text and texts.code == 0
    assert "[CLS] an ##na is good [SEP] [[yes]]" in labels.out and "2 rows to train on" in labels.out


WORDS = {"tokens": ["anna", "lives"]}
BAD_ROWS: list[tuple[str, dict[str, Any], str]] = [
    ("BertForTokenClassification", {**WORDS, "tags": ["O"]}, "rows.jsonl:2 has 2 words and 1 tags"),
    ("BertForTokenClassification", {**WORDS, "tags": ["O", None]}, "rows.jsonl:2 has the label None"),
    ("BertForTokenClassification", {"tokens": ["anna", 3], "tags": ["O", "O"]}, "rows.jsonl:2 has the word 3"),
    ("BertForTokenClassification", {"tokens": "anna", "tags": ["O"]}, "rows.jsonl:2 has tokens 'anna'"),
    ("BertForTokenClassification", {"text": "anna"}, "rows.jsonl:2 has no columns 'tokens' and 'ner_tags' or 'tags'"),
    ("BertForQuestionAnswering", {**ROMES, "answers": {"text": ["rome"], "answer_start": [1]}},
     "the answer 'rome' at character 1, where its context has 'ob l'"),
    ("BertForQuestionAnswering", {**ROMES, "answers": "rome"}, "rows.jsonl:2 has answers 'rome'"),
    ("BertForQuestionAnswering", {**ROMES, "answers": {"text": ["rome"], "answer_start": []}}, "rows.jsonl:2 has 1 texts"),
    ("BertForQuestionAnswering", {**ROMES, "question": "who " * 60}, "rows.jsonl:2 has a question of 60 tokens"),
    ("BertForSequenceClassification", {"text": 3, "label": "yes"}, "rows.jsonl:2 has text 3"),
    ("BertForSequenceClassification", {"text": "anna", "label": {}}, "rows.jsonl:2 has the label {}"),
    ("BertForSequenceClassification", {"text": "anna", "label": ["yes"]}, "rows.jsonl:2 has the label ['yes']"),
    ("BertForSequenceClassification", {"text": "anna"}, "rows.jsonl:2 has no column 'label'"),
]  # fmt: skip
GOOD_ROWS = {
    "BertForTokenClassification": {**WORDS, "tags": ["B-PER", "O"]},
    "BertForQuestionAnswering": ROMES,
    "BertForSequenceClassification": {"text": "anna is good", "label": "yes"},
}


@pytest.fixture(scope="module")
def models_by_name(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_text_model(tmp_path_factory.mktemp("model"), name) for name in GOOD_ROWS}


@pytest.mark.parametrize(("name", "row", "words"), BAD_ROWS)
def test_bad_rows_are_named(name: str, row: dict[str, Any], words: str, models_by_name: dict[str, Path], tmp_path: Path) -> None:
    other = {"label": "no"} if "label" in GOOD_ROWS[name] else {}
    data = write_rows(tmp_path / "rows.jsonl", GOOD_ROWS[name], row, {**GOOD_ROWS[name], **other})
    with pytest.raises(RequestError) as raised:
        train(models_by_name[name], data, tmp_path / "out", rows=2)
    assert words in str(raised.value) and "\n" not in str(raised.value)
