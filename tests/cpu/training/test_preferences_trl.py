"""Pairs become the same tokens, masks, losses and rewards as in TRL's DPOTrainer, where TRL is installed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from chat_models import byte_level_tokenizer, make_chats, save_model, words, write_jsonl

from upshift.models.source import find_model
from upshift.planning.plan import Plan
from upshift.training.arguments import Arguments
from upshift.training.batches.layout import Layout
from upshift.training.batches.sampler import BatchSource
from upshift.training.data.data_options import DataOptions
from upshift.training.data.dataset import TrainingData, prepare_data
from upshift.training.job.job import Job, run_job

trl = pytest.importorskip("trl", reason="trl is not installed, so its DPOTrainer cannot be compared")
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


def trl_trainer(model: Path, rows: Rows, folder: Path, **options: Any) -> Any:
    import datasets

    class Watched(trl.DPOTrainer):  # type: ignore[name-defined, misc]
        def compute_loss(self, *args: Any, **named: Any) -> Any:
            loss = super().compute_loss(*args, **named)
            if self.model.training:
                self.losses = [*getattr(self, "losses", []), float(loss.detach())]
            return loss

    settings = {"bf16": False, "gradient_checkpointing": False, "report_to": [], "use_cpu": True, "save_strategy": "no"}
    config = trl.DPOConfig(output_dir=str(folder / "trl"), max_length=LENGTH, **(settings | options))
    dataset = datasets.Dataset.from_list(rows)
    return Watched(model=str(model), args=config, train_dataset=dataset, eval_dataset=dataset.select(range(5)))


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
    theirs = trl_rows(trl_trainer(model, CASES[name], tmp_path))
    assert ours == theirs and len(ours) > 40
    if name == "long texts":
        assert any(len(ids) == LENGTH for ids, _ in ours)


@pytest.mark.parametrize("name", ["texts", "messages"])
def test_losses_and_rewards_of_an_epoch_equal_those_of_trl(name: str, model: Path, tmp_path: Path) -> None:
    """Eleven steps of four pairs, the last one of a single pair. Ours accumulates two micro-batches, and pads differently."""
    rows = CASES[name]
    data = our_data(model, rows, tmp_path)
    assert len(data.training) == 2 * len(rows) == 82
    plan = Plan(
        device="cpu", host="test", model="test", sequence_length=LENGTH, optim="adamw_torch", per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
    )  # fmt: skip
    arguments = Arguments(max_steps=11, learning_rate=3e-3, warmup_steps=2, weight_decay=0.1, dpo_beta=0.2, eval_steps=11)
    job = Job(
        model_reference=str(model), plan=plan, arguments=arguments, data=str(tmp_path / "data"), data_options=DPO, global_batch=8,
        output=str(tmp_path / "out"),
    )  # fmt: skip
    details = run_job(job, data).details
    layout = Layout(micro_batch=4, rows_together=2)
    source = BatchSource(sequences=data.training, global_batch=8, layout=layout, objective=data.objective, seed=arguments.seed)
    order = (source.epoch_order(0)[::2] // 2).tolist()
    trainer = trl_trainer(
        model, rows, tmp_path, learning_rate=3e-3, warmup_steps=2, weight_decay=0.1, beta=0.2, per_device_train_batch_size=4,
        num_train_epochs=1, optim="adamw_torch", max_grad_norm=1.0, logging_steps=1, precompute_ref_log_probs=True,
        eval_strategy="epoch", lr_scheduler_type="linear", per_device_eval_batch_size=5, disable_tqdm=True,
    )  # fmt: skip
    trainer.train_dataset = trainer.train_dataset.select(order)
    trainer._get_train_sampler = lambda *_: range(len(order))
    trainer.train()
    ours = [loss for _, loss in details["loss_curve"]]
    print(name, max(abs(one - other) for one, other in zip(ours, trainer.losses, strict=True)))
    assert len(ours) == 11 and ours == pytest.approx(trainer.losses, abs=1e-5)
    steps = [entry for entry in trainer.state.log_history if "rewards/margins" in entry]
    assert [accuracy for _, accuracy, _ in details["rewards"]] == pytest.approx([step["rewards/accuracies"] for step in steps])
    assert [margin for _, _, margin in details["rewards"]] == pytest.approx([step["rewards/margins"] for step in steps], abs=1e-4)
    (evaluation,) = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    ((_, accuracy, margin),) = details["evaluation_rewards"]
    assert details["evaluations"][-1][1] == pytest.approx(evaluation["eval_loss"], abs=1e-4)
    assert (accuracy, margin) == pytest.approx(
        (evaluation["eval_rewards/accuracies"], evaluation["eval_rewards/margins"]), abs=1e-4
    )
