"""Pairs become the same tokens, masks, losses and rewards as in TRL's DPOTrainer, where TRL is installed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from chat_models import byte_level_tokenizer, make_chats, save_model, words, write_jsonl
from pair_runs import EPOCH_OF_TRL, check_equals_trl, pair_job, train_in_our_order, trl_trainer

from upshift.models.source import find_model
from upshift.training.data.data_options import DataOptions
from upshift.training.data.dataset import TrainingData, prepare_data
from upshift.training.job.job import run_job

LENGTH = 128
DPO = DataOptions(objective="dpo")
Rows = list[dict[str, Any]]


def text_rows(number: int, *, longest: int) -> Rows:
    draws = random.Random(3)
    rows = []
    for _ in range(number):
        chosen, rejected = (" " + words(draws, draws.randint(1, longest)) + end for end in ("", " roads"))
        rows.append({"prompt": words(draws, draws.randint(1, 6)), "chosen": chosen, "rejected": rejected})
    return rows


def without_prompt(rows: Rows) -> Rows:
    return [{name: row["prompt"] + row[name] for name in ("chosen", "rejected")} for row in rows]


def message_rows(number: int) -> Rows:
    draws = random.Random(4)
    rows = []
    for chat in make_chats(number, seed=6):
        *prompt, answer = chat["messages"]
        other = {"role": "assistant", "content": words(draws, draws.randint(1, 9)) + " no"}
        rows.append({"prompt": prompt, "chosen": [answer], "rejected": [other]})
    return rows


def empty_prompts(rows: Rows) -> Rows:
    return [row | {"prompt": ""} for row in rows]


CASES: dict[str, Rows] = {
    "texts": text_rows(41, longest=12),
    "long texts": text_rows(41, longest=190),
    "texts without prompt": without_prompt(text_rows(41, longest=12)),
    "texts with empty prompts": empty_prompts(text_rows(41, longest=12)),
    "messages": message_rows(41),
    "messages without prompt": without_prompt(message_rows(41)),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), byte_level_tokenizer())


def our_data(model: Path, rows: Rows, folder: Path) -> TrainingData:
    write_jsonl(folder / "data" / "train.jsonl", rows)
    write_jsonl(folder / "data" / "validation.jsonl", rows[:5])
    return prepare_data(find_model(str(model)), folder / "data", sequence_length=LENGTH, options=DPO)


def our_rows(data: TrainingData) -> list[tuple[list[int], list[int]]]:
    """Ids, and 1 for each token of an answer, of each sequence."""
    sequences = data.training
    assert sequences.labels is not None
    rows = []
    for start, length in zip(sequences.starts.tolist(), sequences.lengths.tolist(), strict=True):
        labels = sequences.labels[start : start + length]
        rows.append((sequences.tokens[start : start + length].tolist(), (labels != -100).astype(int).tolist()))
    return rows


def trl_rows(trainer: Any) -> list[tuple[list[int], list[int]]]:
    """What TRL's collator gives of each pair: chosen, rejected."""
    rows = []
    for row in trainer.train_dataset:
        batch = trainer.data_collator([row])
        for ids, mask, attention in zip(batch["input_ids"], batch["completion_mask"], batch["attention_mask"], strict=True):
            real = attention.bool()
            rows.append((ids[real].tolist(), mask[real].tolist()))
    return rows


@pytest.mark.parametrize("name", CASES)
def test_ids_and_masks_of_pairs_equal_those_of_trl(name: str, model: Path, tmp_path: Path) -> None:
    ours = our_rows(our_data(model, CASES[name], tmp_path))
    theirs = trl_rows(trl_trainer("DPO", model, CASES[name], tmp_path, length=LENGTH))
    assert ours == theirs and len(ours) > 40
    if name == "long texts":
        assert any(len(ids) == LENGTH for ids, _ in ours)


@pytest.mark.parametrize("name", ["texts", "messages"])
def test_losses_and_rewards_of_an_epoch_equal_those_of_trl(name: str, model: Path, tmp_path: Path) -> None:
    """Eleven steps of four pairs, the last one of a single pair. Ours accumulates two micro-batches, and pads differently."""
    rows = CASES[name]
    data = our_data(model, rows, tmp_path)
    assert len(data.training) == 2 * len(rows) == 82
    settings = {
        "max_steps": 11, "learning_rate": 3e-3, "warmup_steps": 2, "weight_decay": 0.1, "dpo_beta": 0.2, "eval_steps": 11,
    }  # fmt: skip
    job = pair_job(model, tmp_path / "data", tmp_path / "out", length=LENGTH, options=DPO, settings=settings, plan={})
    details = run_job(job, data).details
    options = {"beta": 0.2, "precompute_ref_log_probs": True}
    trainer = trl_trainer("DPO", model, rows, tmp_path, length=LENGTH, **options, **EPOCH_OF_TRL)
    train_in_our_order(trainer, data, seed=job.arguments.seed)
    check_equals_trl(details, trainer, accuracy="rewards/accuracies", margin="rewards/margins")
