"""Rows of chats become the same tokens and labels as in TRL's SFTTrainer, where TRL is installed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_models import CHATML, MARKED, byte_level_tokenizer, make_chats, save_model, words, write_jsonl

from upshift.models.source import find_model
from upshift.training.batches.layout import Layout
from upshift.training.batches.sampler import BatchSource
from upshift.training.data.corpus import read_corpus
from upshift.training.data.data_options import DataOptions
from upshift.training.data.dataset import TrainingData, prepare_data
from upshift.training.data.tokenizer import tokenize

trl = pytest.importorskip("trl", reason="trl is not installed, so its data handling cannot be compared")
LENGTH = 48


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    templates = {"plain": CHATML, "marked": MARKED}
    return {name: save_model(tmp_path_factory.mktemp(name), byte_level_tokenizer(text)) for name, text in templates.items()}


def trl_rows(
    model: Path, rows: list[dict[str, Any]], folder: Path, **options: Any
) -> tuple[Any, list[tuple[list[int], list[int]]]]:
    """TRL's trainer, and the ids and labels that it trains on."""
    import datasets

    config = trl.SFTConfig(output_dir=str(folder / "trl"), max_length=LENGTH, report_to=[], use_cpu=True, **options)
    trainer = trl.SFTTrainer(model=str(model), args=config, train_dataset=datasets.Dataset.from_list(rows))
    return trainer, [(list(row["input_ids"]), list(row["labels"])) for row in trainer.train_dataset]


def our_data(model: Path, rows: list[dict[str, Any]], folder: Path, **options: Any) -> TrainingData:
    write_jsonl(folder / "data" / "train.jsonl", rows)
    write_jsonl(folder / "data" / "validation.jsonl", rows[:3])
    return prepare_data(find_model(str(model)), folder / "data", sequence_length=LENGTH, options=DataOptions(**options))


def our_rows(data: TrainingData) -> list[tuple[list[int], list[int]]]:
    training = data.training
    labels = training.tokens if training.labels is None else training.labels
    spans = [(start, start + length) for start, length in zip(training.starts.tolist(), training.lengths.tolist(), strict=True)]
    return [(training.tokens[start:end].tolist(), labels[start:end].tolist()) for start, end in spans]


def pairs() -> list[dict[str, Any]]:
    draws = random.Random(7)
    return [{"prompt": words(draws, 6), "completion": " " + words(draws, draws.randint(1, 70))} for _ in range(20)]


def message_pairs() -> list[dict[str, Any]]:
    return [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in make_chats(30, seed=6)]


def turns(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"conversations": [{"from": m["role"], "value": m["content"]} for m in row["messages"]]} for row in rows]


CASES: dict[str, tuple[str, list[dict[str, Any]], dict[str, Any], dict[str, Any]]] = {  # model, rows, options of TRL, and ours
    "messages": ("marked", make_chats(30), {"assistant_only_loss": True}, {}),
    "messages, all tokens": ("plain", make_chats(30), {}, {"loss_on": "all"}),
    "conversations": ("plain", turns(make_chats(30)), {}, {"loss_on": "all"}),  # TRL learns all tokens of these alone
    "texts": ("plain", pairs(), {}, {}),
    "texts, all tokens": ("plain", pairs(), {"completion_only_loss": False}, {"loss_on": "all"}),
    "prompts of messages": ("plain", message_pairs(), {}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_ids_and_labels_equal_those_of_trl(name, models, tmp_path):
    kind, rows, trl_options, options = CASES[name]
    _, expected = trl_rows(models[kind], rows, tmp_path, **trl_options)
    found = our_rows(our_data(models[kind], rows, tmp_path, **options))
    assert found == [row for row in expected if any(label != -100 for label in row[1][1:])] and len(found) > 10
    assert any(len(ids) == LENGTH for ids, _ in found)


def test_prefixes_of_a_plain_template_equal_the_marks_of_trls_template(tmp_path):
    """TRL has for many published templates one that marks the assistant's turns. Ours has the unmarked one alone."""
    folder = Path(trl.__file__).parent / "chat_templates"
    rows = make_chats(12, system=False)
    same_text = []
    for marked in sorted(folder.glob("*_training.jinja")):
        plain = folder / marked.name.replace("_training", "")
        if not plain.exists():
            continue
        path = write_jsonl(tmp_path / f"{plain.stem}.jsonl", rows)
        with_marks = tokenize(read_corpus(path).documents, byte_level_tokenizer(marked.read_text(encoding="utf-8")))
        by_prefixes = tokenize(read_corpus(path).documents, byte_level_tokenizer(plain.read_text(encoding="utf-8")))
        assert with_marks.labels is not None and by_prefixes.labels is not None
        if np.array_equal(with_marks.tokens, by_prefixes.tokens):
            share = float(np.mean(with_marks.labels == by_prefixes.labels))
            print(f"{plain.stem}: {share:.3f} of the labels are equal")
            same_text += [plain.stem] if share == 1 else []
    assert {"llama3", "phi3", "gemma", "gemma3", "cohere", "qwen3_vl"} <= set(same_text) and len(same_text) >= 15


@pytest.mark.parametrize("packing", [False, True])
def test_padded_and_packed_batches_learn_the_tokens_that_trls_collator_gives(packing, models, tmp_path):
    rows = make_chats(32, seed=8)
    options = {"assistant_only_loss": True, "packing": packing, "packing_strategy": "bfd"}
    trainer, expected = trl_rows(models["marked"], rows, tmp_path, **options)
    collated = trainer.data_collator([dict(row) for row in trainer.train_dataset])
    labels = collated["labels"]
    learned = sorted(labels[:, 1:][labels[:, 1:] != -100].tolist())
    data = our_data(models["marked"], rows, tmp_path, long_rows="cut")
    layout = Layout(micro_batch=4, packing=packing, pad_multiple=8)
    source = BatchSource(sequences=data.training, global_batch=8, layout=layout, objective=data.objective)
    batches = source.batches()
    found: list[int] = []
    for _ in range(source.batches_per_epoch):
        for micro in next(batches).micro_batches:
            counted = micro.arrays["labels"][:, 1:]
            found += counted[counted != -100].tolist()
    assert sorted(found) == learned and expected
