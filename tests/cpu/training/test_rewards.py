"""Reward models: tokens, losses and rewards equal TRL's, no plan changes them, and what is rejected before a run starts."""

from __future__ import annotations

import json
import math
import os
import random
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chat_models import byte_level_tokenizer, save_model, words, write_jsonl
from pair_runs import EPOCH_OF_TRL, check_equals_trl, losses, pair_job, train_in_our_order, trl_trainer
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    LlamaForSequenceClassification,
)

import upshift
from upshift.cli.train import parse, request_of
from upshift.errors import Interrupted, RequestError
from upshift.models.ops.sequence_loss import check_rewards
from upshift.models.source import AdapterOptions, find_model, find_model_to_train
from upshift.record import Record
from upshift.training.batches.layout import Layout
from upshift.training.batches.sampler import BatchSource
from upshift.training.data.data_options import DataOptions
from upshift.training.data.dataset import TrainingData, prepare_data
from upshift.training.job.job import Job, run_job
from upshift.training.loop.events import Event, StepDone
from upshift.training.out_of_memory import halve, stand_in
from upshift.training.prepare import load_or_build
from upshift.training.run import prepare_run

LENGTH = 64
REWARD = DataOptions(objective="reward")
Rows = list[dict[str, Any]]


def text_rows(number: int, *, with_prompts: bool = True, with_margins: bool = False, seed: int = 1) -> Rows:
    draws = random.Random(seed)
    rows: Rows = []
    for _ in range(number):
        row: dict[str, Any] = {name: " " + words(draws, draws.randint(1, 8)) + f" {name}" for name in ("chosen", "rejected")}
        if with_prompts:
            row["prompt"] = words(draws, draws.randint(1, 5))
        if with_margins:
            row["margin"] = draws.choice([0, 0.5, 1.25])
        rows.append(row)
    return rows


def chat_rows(number: int, *, with_prompts: bool) -> Rows:
    draws = random.Random(3)
    rows: Rows = []
    for _ in range(number):
        prompt = [{"role": "user", "content": words(draws, draws.randint(1, 5))}]
        answers = [[{"role": "assistant", "content": words(draws, draws.randint(1, 6)) + end}] for end in (" well", " badly")]
        if with_prompts:
            rows.append({"prompt": prompt, "chosen": answers[0], "rejected": answers[1]})
        else:
            rows.append({"chosen": prompt + answers[0], "rejected": [{"role": "user", "content": "roads"}, *answers[1]]})
    return rows


CASES = {
    "texts with margins": text_rows(41, with_margins=True),
    "texts without prompts": text_rows(41, with_prompts=False),
    "messages": chat_rows(41, with_prompts=True),
    "messages without prompts": chat_rows(41, with_prompts=False),
}


def tokenizer_of(name: str) -> Any:
    """A tokenizer without a padding token for one of the cases, so that EOS ends a text and pads it, too."""
    tokenizer = byte_level_tokenizer()
    if name == "texts without prompts":
        tokenizer.pad_token = None
    return tokenizer


def save_reward_model(folder: Path, tokenizer: Any) -> Path:
    """Save a tiny reward model on a tiny language model. Its config names no padding token."""
    save_model(folder / "language-model", tokenizer)
    torch.manual_seed(1)
    model = LlamaForSequenceClassification.from_pretrained(folder / "language-model", num_labels=1)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model, a reward model on it, and pairs to train on and to hold out."""
    folder = tmp_path_factory.mktemp("rewards")
    save_reward_model(folder, tokenizer_of("texts without prompts"))
    write_jsonl(folder / "pairs" / "train.jsonl", text_rows(41, with_margins=True))
    write_jsonl(folder / "pairs" / "validation.jsonl", text_rows(6, with_margins=True, seed=2))
    return folder


@pytest.fixture(scope="module")
def data(home: Path) -> TrainingData:
    return prepare_data(find_model(str(home / "model")), home / "pairs", sequence_length=LENGTH, options=REWARD)


def a_job(
    home: Path, output: Path, *, plan: dict[str, Any] | None = None, arguments: dict[str, Any] | None = None, **fields: Any
) -> Job:
    settings = {"max_steps": 11, "learning_rate": 3e-3, "warmup_steps": 2, "weight_decay": 0.1} | (arguments or {})
    return pair_job(
        home / "model", home / "pairs", output, length=LENGTH, options=REWARD, settings=settings, plan=plan or {}, **fields
    )


@pytest.fixture(scope="module")
def plain(home: Path, data: TrainingData, tmp_path_factory: pytest.TempPathFactory) -> Record:
    return run_job(a_job(home, tmp_path_factory.mktemp("plain") / "out"), data)


@pytest.mark.parametrize("name", CASES)
def test_tokens_losses_and_rewards_of_an_epoch_equal_those_of_trl(name: str, tmp_path: Path) -> None:
    """Eleven steps of four pairs, the last one of a single pair. Ours accumulates two micro-batches, and pads differently."""
    rows = CASES[name]
    model = save_reward_model(tmp_path, tokenizer_of(name))
    write_jsonl(tmp_path / "pairs" / "train.jsonl", rows)
    write_jsonl(tmp_path / "pairs" / "validation.jsonl", rows[:5])
    data = prepare_data(find_model(str(model)), tmp_path / "pairs", sequence_length=LENGTH, options=REWARD)
    center = 0.1 if name == "messages" else 0.0
    arguments = {"eval_steps": 11, "center_rewards_coefficient": center}
    details = run_job(a_job(tmp_path, tmp_path / "out", arguments=arguments), data).details
    options = EPOCH_OF_TRL | {"center_rewards_coefficient": center or None}
    trainer = trl_trainer("Reward", model, rows, tmp_path, length=LENGTH, **options)
    sequences = data.training
    ours = [
        sequences.tokens[start : start + length].tolist()
        for start, length in zip(sequences.starts, sequences.lengths, strict=True)
    ]
    theirs = [ids for row in trainer.train_dataset for ids in (row["chosen_ids"], row["rejected_ids"])]
    assert ours == theirs and len(ours) == 82
    train_in_our_order(trainer, data, seed=42)
    check_equals_trl(details, trainer, accuracy="accuracy", margin="margin")
    found = [loss for _, loss in details["loss_curve"]]
    assert max(found) - min(found) > 0.05


@pytest.mark.parametrize(
    ("plan", "tolerance"),
    [
        ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}, 1e-5),
        ({"activation_checkpointing": 2}, 1e-5),
        ({"precision": "bf16"}, 5e-2),
        ({"num_processes": 2, "gradient_accumulation_steps": 1}, 1e-5),
        ({"num_processes": 2, "gradient_accumulation_steps": 1, "layout": {"fully_shard": "weights", "shard_size": 2}}, 1e-5),
    ],
    ids=str,
)
def test_no_plan_changes_the_losses(
    plan: dict[str, Any], tolerance: float, home: Path, data: TrainingData, plain: Record, tmp_path: Path
) -> None:
    """The last batch has one pair, so one of two ranks has none."""
    record = run_job(a_job(home, tmp_path / "out", plan=plan), data)
    assert losses(record) == pytest.approx(losses(plain), abs=tolerance)
    if tolerance < 1e-3:
        assert np.allclose(record.details["evaluation_rewards"], plain.details["evaluation_rewards"], atol=1e-4)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["pad_token_id"] == 2 and len(config["id2label"]) == 1


@pytest.fixture(scope="module")
def turns(home: Path) -> TrainingData:
    """Pairs with EOS between two turns, so that later tokens see its embedding."""
    rows = text_rows(41)
    for row in rows:
        row["prompt"] += "</s> roads"
    write_jsonl(home / "turns" / "train.jsonl", rows)
    data = prepare_data(find_model(str(home / "model")), home / "turns", sequence_length=LENGTH, options=REWARD)
    assert np.count_nonzero(data.training.tokens == data.objective.pad_token_id) >= 2 * len(data.training)
    return data


@pytest.mark.parametrize("lora_rank", [None, 4])
@pytest.mark.parametrize("name", ["model", "language-model"])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(
    name: str, lora_rank: int | None, home: Path, turns: TrainingData, tmp_path: Path
) -> None:
    """EOS pads here, and ends turns and texts. A checkpoint names it as padding, and yet its embedding is trained on."""
    data = turns
    settings: dict[str, Any] = {"model_reference": str(home / name), "adapter": AdapterOptions(lora_rank=lora_rank)}
    whole = run_job(a_job(home, tmp_path / "whole", **settings), data)
    assert losses(whole)[0] != losses(whole)[-1]

    def stop(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 5:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="checkpoint-5"):
        run_job(a_job(home, tmp_path / "two", **settings), data, on_event=stop)
    margins = np.ones(len(data.training), np.float32)
    others = replace(data, training=replace(data.training, margins=margins))
    with pytest.raises(RequestError, match=r"^data=\d+ sequences \w+ differs from the run in"):
        run_job(a_job(home, tmp_path / "two", resume=True, **settings), others)
    resumed = run_job(a_job(home, tmp_path / "two", resume=True, **settings), data)
    assert losses(resumed) == losses(whole)


def test_a_language_model_gets_a_new_head_and_keeps_its_weights(home: Path, data: TrainingData, tmp_path: Path) -> None:
    source = find_model_to_train(str(home / "language-model"), has_reward_head=True)
    plan = a_job(home, tmp_path).plan
    expected = dict(LlamaForSequenceClassification.from_pretrained(home / "model").named_parameters())
    same = dict(load_or_build(source, plan, from_config=False, seed=1).named_parameters())  # the seed of the head of ``model``
    assert same.keys() == expected.keys() and all(torch.equal(weight, expected[name]) for name, weight in same.items())
    other = dict(load_or_build(source, plan, from_config=False, seed=2).named_parameters())
    assert [name for name, weight in other.items() if not torch.equal(weight, expected[name])] == ["score.weight"]
    record = run_job(a_job(home, tmp_path / "out", model_reference=str(home / "language-model")), data)
    trained = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert type(trained) is LlamaForSequenceClassification and trained.config.num_labels == 1
    scores = upshift.Encoder(str(tmp_path / "out"), engine="torch").encode(["the model writes", "a"])
    assert data.tokenizer is not None
    ids = [torch.tensor([trained_ids]) for trained_ids in data.tokenizer(["the model writes", "a"])["input_ids"]]
    with torch.no_grad():
        rewards = np.array([trained(input_ids=row).logits[0].tolist() for row in ids])
    assert np.allclose(np.asarray(scores), rewards, atol=1e-4) and math.isfinite(losses(record)[-1])


def test_files_without_a_layer_are_not_taken_for_a_model_with_a_new_head(home: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from upshift.training.prepare import check_weights

    for file in (home / "language-model").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    check_weights(find_model_to_train(str(tmp_path), has_reward_head=True))
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RequestError, match="model.layers.1.mlp.up_proj.weight"):
        check_weights(find_model_to_train(str(tmp_path), has_reward_head=True))


def test_parts_of_a_micro_batch_hold_whole_pairs_with_their_margins(data: TrainingData) -> None:
    source = BatchSource(
        sequences=data.training, global_batch=6, layout=Layout(micro_batch=6, rows_together=2), objective=data.objective
    )
    (whole,) = next(source.batches()).micro_batches
    halves = halve(whole)
    assert halves is not None and [half.shape[0] for half in halves] == [4, 2] and whole.margins is not None
    assert [half.num_label_tokens for half in halves] == [2, 1]
    assert np.array_equal(np.concatenate([half.margins for half in halves]), whole.margins)
    assert stand_in(whole).shape[0] == 2 and stand_in(whole).num_label_tokens == 0


def refusal(home: Path, folder: Path, rows: Rows | None = None, **options: Any) -> str:
    """The message of ``upshift train``, before anything slow starts."""
    model = str(options.pop("model", home / "language-model"))
    pairs = write_jsonl(folder / "rows.jsonl", rows or text_rows(12))
    command = [model, "--data", str(pairs), "--objective", "reward", "-o", str(folder / "out"), "--trial-seconds", "0"]
    for name, value in options.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    with pytest.raises(RequestError) as caught:
        prepare_run(request_of(parse(command)))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_margins_are_numbers_in_all_rows_or_in_none(home: Path, tmp_path: Path) -> None:
    rows = text_rows(12)
    message = refusal(home, tmp_path, [rows[0] | {"margin": 1}, *rows[1:]])
    assert "rows.jsonl:2 has no margin" in message and "rows.jsonl:1 has margin 1;" in message
    for value in ("large", [1], True, math.nan):
        message = refusal(home, tmp_path, [row | {"margin": value} for row in rows])
        assert "rows.jsonl:1" in message and "'margin'" in message and "number" in message


@pytest.mark.parametrize("in_training", [True, False])
def test_margins_are_in_both_parts_of_the_data_or_in_none(in_training: bool, home: Path, tmp_path: Path) -> None:
    evaluation = write_jsonl(tmp_path / "evaluation.jsonl", text_rows(4, with_margins=not in_training, seed=2))
    message = refusal(home, tmp_path, text_rows(12, with_margins=in_training), eval_data=evaluation)
    assert "rows.jsonl" in message and "evaluation.jsonl" in message and "'margin'" in message


def test_what_gives_no_reward_is_rejected_by_name(home: Path, tmp_path: Path) -> None:
    LlamaForSequenceClassification.from_pretrained(home / "model", num_labels=3, ignore_mismatched_sizes=True).save_pretrained(
        tmp_path / "three"
    )
    assert "3 labels" in refusal(home, tmp_path, model=tmp_path / "three")
    assert "--dpo-beta" in refusal(home, tmp_path, dpo_beta=0.5)
    assert "--objective reward" in refusal(home, tmp_path, loss_on="all")
    assert "--objective reward" in refusal(home, tmp_path, long_rows="split")
    assert "--lora-dropout" in refusal(home, tmp_path, lora_rank=4, lora_dropout=0.1)
    assert "'rejected'" in refusal(home, tmp_path, [{"prompt": "a", "chosen": "b"}] * 3)
    nameless = byte_level_tokenizer()
    nameless.pad_token = nameless.eos_token = None
    save_model(tmp_path / "nameless", nameless)
    assert "no padding token and no EOS" in refusal(home, tmp_path, model=tmp_path / "nameless")


def test_an_encoder_may_give_rewards(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 400,
    }
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**sizes | {"num_labels": 1}))
    model.save_pretrained(tmp_path)
    check_rewards(find_model_to_train(str(tmp_path), has_reward_head=True))
