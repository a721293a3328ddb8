"""A run of whole epochs against a plain loop that shares no code with it: 47 rows with labels and padding, 32 at a time."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from upshift.models.source import find_model
from upshift.planning.plan import Plan
from upshift.training.arguments import Arguments
from upshift.training.job.job import Job, prepare_data, run_job

ROWS, GLOBAL_BATCH, LENGTH, STEPS, RATE = 47, 32, 32, 4, 1e-3


def write_data(folder: Path) -> list[tuple[list[int], list[int]]]:
    """Return what is to be learned: ids and labels of each row, without padding."""
    generator = np.random.default_rng(1)
    lines, rows = [], []
    for _ in range(ROWS):
        length = int(generator.integers(4, 24))
        ids = generator.integers(1, 90, length).tolist()
        labels = [-100] * (length // 2) + ids[length // 2 :]
        before, behind = (int(count) for count in generator.integers(0, 3, 2))
        row = {"input_ids": [0] * before + ids + [0] * behind, "labels": [5] * before + labels + [5] * behind}
        lines.append({**row, "attention_mask": [0] * before + [1] * length + [0] * behind})
        rows.append((ids, labels))
    for name, part in (("train", lines), ("validation", lines[:3]), ("test", [{"input_ids": [89] * 9}])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in part))
    return rows


def plain_loop(
    model: LlamaForCausalLM, rows: list[tuple[list[int], list[int]]], orders: list[list[int]]
) -> tuple[list[float], float]:
    """Return the loss before each step, and the last loss of the first three rows; each row alone, the mean over all labels."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)

    def summed(members: list[int]) -> tuple[torch.Tensor, int]:
        total, count = torch.zeros(()), 0
        for member in members:
            ids, labels = (torch.tensor([values]) for values in rows[member])
            logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
            total = total + torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
            count += int((labels[:, 1:] != -100).sum())
        return total, count

    losses = []
    for order in orders:
        for start in range(0, ROWS, GLOBAL_BATCH):
            total, count = summed(order[start : start + GLOBAL_BATCH])
            loss = total / count
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    with torch.no_grad():
        total, count = summed([0, 1, 2])
    return losses, float(total) / count


@pytest.mark.parametrize(
    "choices",
    [
        {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4},
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "packing": True},
    ],
)
def test_epochs_are_those_of_a_plain_loop(choices, tmp_path):
    data_folder, model_folder = tmp_path / "data", tmp_path / "model"
    data_folder.mkdir()
    rows = write_data(data_folder)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    )
    model.save_pretrained(model_folder)
    data = prepare_data(find_model(str(model_folder)), data_folder, sequence_length=LENGTH)
    assert (len(data.training), data.evaluation and len(data.evaluation), data.summary.num_documents) == (ROWS, 3, ROWS)
    plan = Plan(device="cpu", host="test", model="test", sequence_length=LENGTH, optim="adamw_torch", **choices)
    arguments = Arguments(max_steps=STEPS, learning_rate=RATE, lr_scheduler_type="constant", max_grad_norm=0.0)
    job = Job(
        model_reference=str(model_folder), from_config=False, plan=plan, arguments=arguments, data=str(data_folder),
        global_batch=GLOBAL_BATCH, output=str(tmp_path / "out"),
    )  # fmt: skip
    record = run_job(job, data)
    orders = [np.random.default_rng([arguments.seed, epoch]).permutation(ROWS).tolist() for epoch in range(2)]
    losses, held_out = plain_loop(model, rows, orders)
    assert [loss for _, loss in record.details["loss_curve"]] == pytest.approx(losses, abs=2e-5)
    assert record.measured is not None and record.measured.evaluation_loss == pytest.approx(held_out, abs=2e-5)
