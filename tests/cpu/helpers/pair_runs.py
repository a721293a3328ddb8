"""Runs that learn from pairs of answers, by Upshift and by a trainer of TRL on the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from upshift.benchmarking.meters import allocated_peak, tensor_bytes
from upshift.planning.plan import Plan
from upshift.record import Record
from upshift.training.arguments import Arguments
from upshift.training.batches.collate import MicroBatch
from upshift.training.batches.layout import Layout
from upshift.training.batches.sampler import BatchSource, GlobalBatch, Position
from upshift.training.data.data_options import DataOptions
from upshift.training.data.dataset import TrainingData
from upshift.training.job.job import Job
from upshift.training.step import TrainStep

PAIRS_PER_STEP = 4
GLOBAL_BATCH = 2 * PAIRS_PER_STEP  # sequences
PLAN = {
    "device": "cpu", "host": "test", "model": "test", "optim": "adamw_torch", "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
}  # fmt: skip
OF_TRL = {
    "bf16": False, "gradient_checkpointing": False, "report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True,
}  # fmt: skip
# One epoch in the order and with the optimizer of Upshift's runs.
EPOCH_OF_TRL = {
    "learning_rate": 3e-3, "warmup_steps": 2, "weight_decay": 0.1, "per_device_train_batch_size": PAIRS_PER_STEP,
    "num_train_epochs": 1, "optim": "adamw_torch", "max_grad_norm": 1.0, "logging_steps": 1, "eval_strategy": "epoch",
    "lr_scheduler_type": "linear", "per_device_eval_batch_size": 5,
}  # fmt: skip


def pair_job(
    model: Path, pairs: Path, output: Path, *, length: int, options: DataOptions, settings: dict[str, Any], plan: dict[str, Any],
    **fields: Any,
) -> Job:  # fmt: skip
    """A job of four pairs a step, in two micro-batches unless ``plan`` says otherwise."""
    request = {"model_reference": str(model), "data": str(pairs), "output": str(output)} | fields
    return Job(
        plan=Plan.model_validate(PLAN | {"sequence_length": length} | plan), arguments=Arguments(**settings),
        data_options=options, global_batch=GLOBAL_BATCH, **request,
    )  # fmt: skip


def peak_of_step(step: TrainStep, model: nn.Module, micro_batch: MicroBatch) -> int:
    """The bytes that are allocated at once in the second step of two equal micro-batches."""
    whole = GlobalBatch(
        position=Position(), next_position=Position(), micro_batches=(micro_batch, micro_batch),
        sequence_ids=np.arange(32), num_label_tokens=2 * micro_batch.num_label_tokens, num_tokens=1024,
    )  # fmt: skip
    step.step(whole)
    with allocated_peak("cpu", resident_bytes=tensor_bytes(model, step.optimizer)) as peak:
        step.step(whole)
    assert peak.bytes is not None
    return peak.bytes


def losses(record: Record) -> list[float]:
    return [loss for _, loss in record.details["loss_curve"]]


def trl_trainer(
    kind: str, model: Path, rows: list[dict[str, Any]], folder: Path, *, length: int, adapter: Any = None, **options: Any
) -> Any:
    """TRL's trainer of a kind, such as ``DPO``, which notes its training losses. The first five rows are held out, too.

    ``adapter``: peft's config of the adapter that is trained. None: all weights are.
    """
    import datasets

    trl: Any = pytest.importorskip("trl", reason=f"trl is not installed, so its {kind}Trainer cannot be compared")

    class Watched(getattr(trl, f"{kind}Trainer")):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **named: Any) -> Any:
            loss = super().compute_loss(*args, **named)
            if self.model.training:
                self.losses = [*getattr(self, "losses", []), float(loss.detach())]
            return loss

    config = getattr(trl, f"{kind}Config")(output_dir=str(folder / "trl"), max_length=length, **(OF_TRL | options))
    dataset = datasets.Dataset.from_list(rows)
    evaluation = dataset.select(range(5))
    return Watched(model=str(model), args=config, train_dataset=dataset, eval_dataset=evaluation, peft_config=adapter)


def train_in_our_order(trainer: Any, data: TrainingData, *, seed: int) -> None:
    """Train by TRL on the pairs in the order of Upshift's first epoch."""
    layout = Layout(micro_batch=4, rows_together=2)
    source = BatchSource(sequences=data.training, global_batch=GLOBAL_BATCH, layout=layout, objective=data.objective, seed=seed)
    order = (source.epoch_order(0)[::2] // 2).tolist()
    trainer.train_dataset = trainer.train_dataset.select(order)
    trainer._get_train_sampler = lambda *_: range(len(order))
    trainer.train()


def check_equals_trl(details: dict[str, Any], trainer: Any, *, accuracy: str, margin: str) -> None:
    """Compare losses, rewards and evaluation of eleven steps. ``accuracy`` and ``margin``: TRL's names in its log."""
    ours = [loss for _, loss in details["loss_curve"]]
    print(max(abs(one - other) for one, other in zip(ours, trainer.losses, strict=True)))
    assert len(ours) == 11 and ours == pytest.approx(trainer.losses, abs=1e-5)
    steps = [entry for entry in trainer.state.log_history if margin in entry]
    assert [share for _, share, _ in details["rewards"]] == pytest.approx([step[accuracy] for step in steps])
    assert [mean for _, _, mean in details["rewards"]] == pytest.approx([step[margin] for step in steps], abs=1e-4)
    (evaluation,) = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    ((_, our_accuracy, our_margin),) = details["evaluation_rewards"]
    assert details["evaluations"][-1][1] == pytest.approx(evaluation["eval_loss"], abs=1e-4)
    assert (our_accuracy, our_margin) == pytest.approx((evaluation[f"eval_{accuracy}"], evaluation[f"eval_{margin}"]), abs=1e-4)
