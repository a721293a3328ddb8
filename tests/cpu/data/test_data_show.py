"""``upshift data show``: it marks as learned what a batch of the training has as labels, for each kind of model."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import BertConfig, LlamaConfig, T5Config

from upshift.models.source import find_model
from upshift.training.batches.collate import fill_micro_batch
from upshift.training.batches.layout import Layout, RowGroup
from upshift.training.batches.objective import IGNORED
from upshift.training.data.dataset import TrainingData, prepare_data
from upshift.training.data.show import count_tokens, show_sequences

BLOCK = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 90}
CONFIGS: dict[str, Any] = {
    "causal-lm": LlamaConfig(**BLOCK, architectures=["LlamaForCausalLM"]),
    "masked-lm": BertConfig(**BLOCK, architectures=["BertForMaskedLM"]),
    "seq2seq-lm": T5Config(
        d_model=16, num_layers=2, num_heads=2, d_kv=8, d_ff=16, vocab_size=90, decoder_start_token_id=0,
        architectures=["T5ForConditionalGeneration"],
    ),
}
LENGTH = 8


def token_rows(kind: str, *, has_labels: bool) -> list[dict[str, list[int]]]:
    """Return rows whose labels are other ids than their tokens, shorter and longer than a sequence."""
    draws = random.Random(0)
    rows = []
    for number in range(40):
        ids = [draws.randrange(3, 40) for _ in range(draws.randrange(2, 14))]
        row = {"input_ids": ids}
        if has_labels:
            size = draws.randrange(2, 14) if kind == "seq2seq-lm" else len(ids)
            row["labels"] = [draws.randrange(50, 90) if draws.random() < 0.6 else IGNORED for _ in range(size)]
            row["labels"][1 if number % 2 else -1] = 60
        rows.append(row)
    return rows


def prepare(kind: str, folder: Path, *, has_labels: bool) -> TrainingData:
    CONFIGS[kind].save_pretrained(folder / "model")
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in token_rows(kind, has_labels=has_labels)))
    data = prepare_data(find_model(str(folder / "model" / "config.json")), path, sequence_length=LENGTH)
    return replace(data, tokenizer=None)  # the parts are ids then


def shown_ids(parts: Any, *, is_learned: bool | None) -> list[int]:
    return [int(word) for part in parts if part.is_learned is is_learned for word in part.text.split()]


@pytest.mark.parametrize(
    ("kind", "has_labels"),
    [("causal-lm", False), ("causal-lm", True), ("masked-lm", True), ("seq2seq-lm", False), ("seq2seq-lm", True)],
)
def test_what_is_shown_as_learned_is_what_a_batch_has_as_labels(kind, has_labels, tmp_path):
    data = prepare(kind, tmp_path, has_labels=has_labels)
    sequences = data.training
    num_learned = 0
    shown = list(show_sequences(data, len(sequences)))
    assert len(shown) == len(sequences) > 20
    for index, parts in enumerate(shown):
        group = RowGroup(((index,),), int(sequences.lengths[index]))
        micro = fill_micro_batch(group, sequences, Layout(micro_batch=1), data.objective, seed=0, epoch=0)
        inputs = micro.arrays["input_ids"][0]
        if "attention_mask" in micro.arrays:
            inputs = inputs[micro.arrays["attention_mask"][0] == 1]
        labels = micro.arrays["labels"][0]
        is_counted = labels != IGNORED
        assert shown_ids(parts, is_learned=True) == labels[is_counted].tolist()
        others = inputs if kind == "seq2seq-lm" else inputs[~is_counted[: len(inputs)]]
        assert shown_ids(parts, is_learned=False) == others.tolist()
        if kind != "seq2seq-lm":
            in_order = [int(word) for part in parts for word in part.text.split()]
            assert in_order == np.where(is_counted, labels, inputs).tolist()
        num_learned += micro.num_label_tokens
    assert count_tokens(data).num_learned == num_learned > 0
    assert len(list(show_sequences(data, 3))) == 3


def test_what_is_drawn_while_the_model_is_trained_has_no_mark(tmp_path):
    data = prepare("masked-lm", tmp_path, has_labels=True)
    without = replace(data, training=replace(data.training, labels=None))
    assert count_tokens(without).num_learned is None
    (parts,) = show_sequences(without, 1)
    start, length = int(data.training.starts[0]), int(data.training.lengths[0])
    assert shown_ids(parts, is_learned=None) == data.training.tokens[start : start + length].tolist()
