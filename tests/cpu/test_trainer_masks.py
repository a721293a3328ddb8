"""Attention masks of a script's own collator: the Trainer uses them as transformers does, or ends as transformers ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers import TrainingArguments

import upshift
from upshift.errors import RequestError
from upshift.planning.plan import Plan

LENGTH = 16
ROWS = 4
STEPS = 3
GENERATOR = torch.Generator().manual_seed(3)
SIZES: dict[str, Any] = {"vocab_size": 96, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
DATA = [
    {"input_ids": torch.randint(3, 96, (LENGTH,), generator=GENERATOR), "number": number, "length": LENGTH - number % 5}
    for number in range(700)
]
RARE = 11  # in the third step, and not in the sample of all rows that the Trainer looks at
PLANS: dict[str, dict[str, Any]] = {
    "whole": {},
    "block": {"attention": "block"},
    "by row": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": ROWS},
    "packed": {"packing": True, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
}


def two_texts(row: dict[str, Any]) -> Tensor:
    """Return the mask [1, S, S] of a row that holds two texts, which do not see each other."""
    texts = torch.arange(LENGTH) >= 5 + row["number"] % 4
    return ((texts[:, None] == texts[None, :]) & torch.ones(LENGTH, LENGTH).tril().bool())[None]


def additive(row: dict[str, Any]) -> Tensor:
    return torch.where(two_texts(row), 0.0, torch.finfo(torch.float32).min)


def padding(row: dict[str, Any]) -> Tensor:
    return (torch.arange(LENGTH) < row["length"]).long()


def with_holes(row: dict[str, Any]) -> Tensor:
    return padding(row) * (torch.arange(LENGTH) != 3)


# The masks of most batches, and of the batch with the rare row.
MASKS = {
    "of queries and keys": (two_texts, two_texts),
    "additive": (additive, additive),
    "with holes": (with_holes, with_holes),
    "of queries and keys in one batch": (padding, two_texts),
    "with holes in one batch": (padding, with_holes),
}


def losses(trainer_class: Any, name: str, folder: Path, *, model: Any = None, **options: Any) -> list[float]:
    assert not any(RARE in np.linspace(0, len(DATA) - 1, num=size).astype(int) for size in (256, 512))
    usual, rare = MASKS[name]

    def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        mask_of = rare if any(row["number"] == RARE for row in rows) else usual
        ids = torch.stack([row["input_ids"] for row in rows])
        labels = torch.where(torch.stack([padding(row) for row in rows]).bool(), ids, -100)
        return {"input_ids": ids, "labels": labels, "attention_mask": torch.stack([mask_of(row) for row in rows])}

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, intermediate_size=48, num_key_value_heads=4, max_position_embeddings=64)
    arguments = TrainingArguments(
        str(folder), max_steps=STEPS, logging_steps=1, report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True,
        learning_rate=1e-2, per_device_train_batch_size=ROWS, remove_unused_columns=False, train_sampling_strategy="sequential",
    )  # fmt: skip
    trainer = trainer_class(
        model=model or transformers.LlamaForCausalLM(config), args=arguments, train_dataset=DATA, data_collator=collate, **options
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def plan_of(**fields: Any) -> Plan:
    given = {"device": "cpu", "host": "", "model": "", "sequence_length": LENGTH, "per_device_train_batch_size": ROWS}
    return Plan.model_validate(given | {"optim": "adamw_torch"} | fields)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_used_as_transformers_uses_it(name: str, plan: str, tmp_path: Path) -> None:
    theirs = losses(transformers.Trainer, name, tmp_path)
    try:
        ours = losses(upshift.Trainer, name, tmp_path, plan=plan_of(**PLANS[plan]))
    except RequestError as refusal:
        assert plan == "packed" and "the given plan is not possible" in str(refusal)
        return
    assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("name", ["of queries and keys", "additive"])
def test_a_model_that_takes_no_such_mask_ends_as_with_transformers(name: str, tmp_path: Path) -> None:
    """OPT counts positions along the mask."""
    fields = SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 32, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    model = transformers.OPTForCausalLM(transformers.OPTConfig(**fields))
    with pytest.raises((RuntimeError, IndexError)) as theirs:
        losses(transformers.Trainer, name, tmp_path, model=model)
    with pytest.raises(theirs.type) as ours:
        losses(upshift.Trainer, name, tmp_path, model=model, plan=plan_of(attention="block"))
    assert str(ours.value) == str(theirs.value)
