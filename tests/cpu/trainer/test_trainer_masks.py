"""A mask of every query and key, and ids without an embedding, are used or refused in words before the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM, TrainingArguments

import upshift
from upshift.errors import RequestError
from upshift.planning.plan import Plan

LENGTH = 16
SIZES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
MODELS = {
    "opt": lambda: OPTForCausalLM(OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32, dropout=0.0, pad_token_id=1)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=48, num_key_value_heads=4)),
}
GENERATOR = torch.Generator().manual_seed(3)
DATA = [{"input_ids": torch.randint(3, 96, (LENGTH,), generator=GENERATOR)} for _ in range(8)]
PLAN = Plan(device="cpu", host="", model="", sequence_length=LENGTH, per_device_train_batch_size=2, optim="adamw_torch")


def with_window(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return a batch whose tokens see themselves and two tokens before them."""
    ids = torch.stack([row["input_ids"] for row in rows])
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().triu(-2)
    return {"input_ids": ids, "labels": ids, "attention_mask": seen.expand(len(rows), 1, LENGTH, LENGTH)}


def train(trainer_class: Any, name: str, folder: Path, *, collator: Any = with_window, **options: Any) -> tuple[int, list[float]]:
    """Return the steps that ran, and their losses."""
    torch.manual_seed(0)
    arguments = TrainingArguments(
        str(folder), max_steps=3, logging_steps=1, report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True,
        per_device_train_batch_size=2, seed=7,
    )  # fmt: skip
    trainer = trainer_class(model=MODELS[name](), args=arguments, train_dataset=DATA, data_collator=collator, **options)
    try:
        trainer.train()
    finally:
        steps = trainer.state.global_step
    return steps, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("options", [{"plan": PLAN}, {}], ids=["a given plan", "no plan"])
def test_a_model_that_takes_no_such_mask_refuses_it_by_its_shape(options: dict[str, Any], tmp_path: Path) -> None:
    words = r"OPTForCausalLM does not compute with attention_mask of shape \[2, 1, 16, 16\] .*; give a mask of shape"
    with pytest.raises(RequestError, match=words) as refusal:
        train(upshift.Trainer, "opt", tmp_path, **options)
    assert "\n" not in str(refusal.value)


def test_a_model_that_takes_such_a_mask_trains_with_it(tmp_path: Path) -> None:
    theirs = train(transformers.Trainer, "llama", tmp_path / "theirs")
    assert train(upshift.Trainer, "llama", tmp_path / "ours", plan=PLAN)[1] == pytest.approx(theirs[1], rel=1e-5)


class OwnLoss(upshift.Trainer):
    """A script's own loss, which makes the mask itself."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        inputs = dict(inputs)
        inputs["attention_mask"] = inputs["attention_mask"][:, None, None, :].expand(-1, 1, LENGTH, LENGTH).tril()
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def without_window(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = torch.stack([row["input_ids"] for row in rows])
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def inseparable(rows: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Return a batch with an entry that is of no row."""
    return with_window(rows) | {"names": ["a", "b", "c"]}


def of_logits(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())


class DropsNames(upshift.Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        inputs = {name: value for name, value in inputs.items() if name != "names"}
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


@pytest.mark.parametrize(
    ("trainer_class", "collator", "options"),
    [
        (OwnLoss, without_window, {}), (OwnLoss, without_window, {"plan": PLAN}),
        (upshift.Trainer, with_window, {"compute_loss_func": of_logits}), (DropsNames, inseparable, {}),
        (DropsNames, inseparable, {"plan": PLAN}),
    ],
    ids=["own loss", "own loss, a given plan", "a function", "no rows", "no rows, a given plan"],
)  # fmt: skip
def test_a_script_whose_model_takes_no_such_mask_reads_why(
    trainer_class: Any, collator: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    """Also where the loss itself makes the mask, and where a batch cannot be cut into rows."""
    words = r"OPT\w+ does not compute with attention_mask of shape \[2, 1, 16, 16\] .*; give a mask of shape"
    with pytest.raises(RequestError, match=words) as refusal:
        train(trainer_class, "opt", tmp_path, collator=collator, **options)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("number", [96, -1])
@pytest.mark.parametrize("options", [{"plan": PLAN}, {}, {"compute_loss_func": of_logits}], ids=["plan", "no plan", "a function"])
def test_an_id_without_an_embedding_is_named(options: dict[str, Any], number: int, tmp_path: Path) -> None:
    def with_other_ids(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        batch = without_window(rows)
        ids = batch["input_ids"].clone()
        ids[0, 3] = number
        return batch | {"input_ids": ids}

    with pytest.raises(RequestError, match=f"input_ids hold {number}, and \\w+ has embeddings for 0 to 95") as refusal:
        train(upshift.Trainer, "llama", tmp_path, collator=with_other_ids, **options)
    assert "\n" not in str(refusal.value)


def test_a_row_that_is_longer_than_the_positions_is_named(tmp_path: Path) -> None:
    def doubled(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        ids = torch.cat([torch.stack([row["input_ids"] for row in rows])] * 5, dim=1)
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}

    with pytest.raises(RequestError, match=r"a row has 80 tokens, and OPT\w+ has positions for 64; cut the rows"):
        train(upshift.Trainer, "opt", tmp_path, collator=doubled, plan=PLAN)
