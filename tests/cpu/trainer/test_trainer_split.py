"""Losses of scripts as people write them: cut by a given plan, each gives the losses and weights that transformers gives."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from padded_rows import padded
from torch import Tensor
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    dropout,
    kl_div,
    log_softmax,
    normalize,
)
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

import upshift
from upshift.errors import RequestError
from upshift.planning.plan import Plan
from upshift.training.hf_trainer.loss_state import StateSnapshot

CLASSES, BATCH, STEPS = 12, 8, 4
PLAN = Plan.model_validate({
    "device": "cpu", "host": "", "model": "", "sequence_length": 32, "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": BATCH // 2,
})  # fmt: skip
WHOLE_PLAN = PLAN.changed(per_device_train_batch_size=BATCH, gradient_accumulation_steps=1)
RARE = 3  # a row that the sample leaves out
Loss = Callable[[Any, Any, dict[str, Any]], Tensor]


def model() -> Any:
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_labels=CLASSES,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def rows(count: int = 64) -> list[dict[str, Any]]:
    draw = np.random.default_rng(0)
    return [
        {
            "input_ids": draw.integers(3, 64, draw.integers(4, 24)).tolist(), "labels": int(draw.integers(0, CLASSES - 1)),
            "weight": 1.0, "other": int(draw.integers(0, 3)),
        }
        for _ in range(count)
    ]  # fmt: skip


def rows_with(count: int = 700, **rare: Any) -> list[dict[str, Any]]:
    """Like the others, but for one row that is trained on and is not in the sample."""
    assert not any(RARE in np.linspace(0, count - 1, num=size).astype(int) for size in (256, 512))
    data = rows(count)
    data[RARE] |= rare
    return data


def logits_of(model: Any, inputs: dict[str, Any]) -> Tensor:
    return model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits


def plain(trainer: Any, model: Any, inputs: Any) -> Tensor:
    return cross_entropy(logits_of(model, inputs), inputs["labels"])


def smoothed(trainer: Any, model: Any, inputs: Any) -> Tensor:
    return cross_entropy(logits_of(model, inputs), inputs["labels"], label_smoothing=0.1)


def focal(trainer: Any, model: Any, inputs: Any) -> Tensor:
    each = cross_entropy(logits_of(model, inputs), inputs["labels"], reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each).mean()


def summed(trainer: Any, model: Any, inputs: Any) -> Tensor:
    return cross_entropy(logits_of(model, inputs), inputs["labels"], reduction="sum")


def of_a_fixed_batch(trainer: Any, model: Any, inputs: Any) -> Tensor:
    return summed(trainer, model, inputs) / BATCH


def distilled(trainer: Any, model: Any, inputs: Any) -> Tensor:
    logits = logits_of(model, inputs)
    teacher = log_softmax(logits.detach().flip(-1), -1)
    return cross_entropy(logits, inputs["labels"]) + kl_div(
        log_softmax(logits, -1), teacher, log_target=True, reduction="batchmean"
    )


def many_labels(trainer: Any, model: Any, inputs: Any) -> Tensor:
    wanted = torch.nn.functional.one_hot(inputs["labels"], CLASSES).float()
    return binary_cross_entropy_with_logits(logits_of(model, inputs), wanted, pos_weight=torch.full((CLASSES,), 3.0))


def growing(trainer: Any, model: Any, inputs: Any) -> Tensor:
    return plain(trainer, model, inputs) * (1 + trainer.state.global_step)


def class_weights(trainer: Any, model: Any, inputs: Any) -> Tensor:
    weights = torch.ones(CLASSES)
    weights[CLASSES - 1] = 9.0
    return cross_entropy(logits_of(model, inputs), inputs["labels"], weight=weights)


def sample_weights(trainer: Any, model: Any, inputs: Any) -> Tensor:
    each = cross_entropy(logits_of(model, inputs), inputs["labels"], reduction="none")
    return (inputs["weight"] * each).sum() / inputs["weight"].sum()


def hardest(trainer: Any, model: Any, inputs: Any) -> Tensor:
    each = cross_entropy(logits_of(model, inputs), inputs["labels"], reduction="none")
    return each.topk(math.ceil(0.7 * len(each))).values.mean()


def contrastive(trainer: Any, model: Any, inputs: Any) -> Tensor:
    vectors = normalize(logits_of(model, inputs), dim=-1)
    return cross_entropy(vectors @ vectors.detach().T / 0.1, torch.arange(len(vectors)))


def spread(trainer: Any, model: Any, inputs: Any) -> Tensor:
    logits = logits_of(model, inputs)
    return cross_entropy(logits, inputs["labels"]) + 0.01 * logits.mean(0).pow(2).mean()


def contrastive_later(trainer: Any, model: Any, inputs: Any) -> Tensor:
    return (contrastive if trainer.state.global_step >= 2 else plain)(trainer, model, inputs)


def in_the_gradient_alone(trainer: Any, model: Any, inputs: Any) -> Tensor:
    logits = logits_of(model, inputs)
    coupled = 5 * logits.mean(0).pow(2).sum()
    return cross_entropy(logits, inputs["labels"]) + coupled - coupled.detach()


def balanced(trainer: Any, model: Any, inputs: Any) -> Tensor:
    logits = logits_of(model, inputs)
    other = cross_entropy(logits[:, :3], inputs["other"])
    return cross_entropy(logits, inputs["labels"]) + other / other.detach()


def two_tasks(trainer: Any, model: Any, inputs: Any) -> Tensor:
    """One of them has no label in most rows."""
    logits = logits_of(model, inputs)
    other = torch.where(inputs["other"] == 0, inputs["other"], -100)
    each = cross_entropy(logits[:, :3], other, ignore_index=-100, reduction="sum")
    return cross_entropy(logits, inputs["labels"]) + each / (other != -100).sum().clamp(min=1)


def counting(trainer: Any, model: Any, inputs: Any) -> Tensor:
    trainer.num_calls = getattr(trainer, "num_calls", 0) + 1
    return plain(trainer, model, inputs) * trainer.num_calls


COUNTER = {"calls": 0}


def counting_in_a_global(trainer: Any, model: Any, inputs: Any) -> Tensor:
    COUNTER["calls"] += 1
    return plain(trainer, model, inputs) * (1 + COUNTER["calls"] % 3)


def averaged(trainer: Any, model: Any, inputs: Any) -> Tensor:
    loss = plain(trainer, model, inputs)
    average = getattr(trainer, "average", None)
    trainer.average = loss.detach() if average is None else 0.9 * average + 0.1 * loss.detach()
    return loss / trainer.average


def scaled_at_random(trainer: Any, model: Any, inputs: Any) -> Tensor:
    return plain(trainer, model, inputs) * (0.5 + torch.rand(()))


def own_generator(trainer: Any, model: Any, inputs: Any) -> Tensor:
    if not hasattr(trainer, "generator"):
        trainer.generator = torch.Generator().manual_seed(3)
    return plain(trainer, model, inputs) * (0.5 + torch.rand((), generator=trainer.generator))


def dropped_out(trainer: Any, model: Any, inputs: Any) -> Tensor:
    return cross_entropy(dropout(logits_of(model, inputs), 0.5, training=model.training), inputs["labels"])


def mixed_up_in_training(trainer: Any, model: Any, inputs: Any) -> Tensor:
    logits = logits_of(model, inputs)
    if model.training:
        logits = 0.7 * logits + 0.3 * logits.flip(0)
    return cross_entropy(logits, inputs["labels"])


SPLIT = [plain, smoothed, focal, distilled, many_labels, growing]
WHOLE = [
    summed, of_a_fixed_batch,
    class_weights, sample_weights, hardest, contrastive, spread, contrastive_later, in_the_gradient_alone, balanced, two_tasks,
    counting, counting_in_a_global, averaged, scaled_at_random, own_generator, dropped_out, mixed_up_in_training,
]  # fmt: skip
DATA = {
    "class_weights": [
        [row | {"labels": CLASSES - 1 if number == 40 else row["labels"]} for number, row in enumerate(rows())],
        rows_with(labels=CLASSES - 1),
    ],
    "sample_weights": [rows_with(weight=5.0), [row | {"weight": 1.0 + (number == 40)} for number, row in enumerate(rows())]],
}


def trained(library: Any, folder: Path, compute: Loss, data: Any, **options: Any) -> Any:
    def compute_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:  # fmt: skip
        return compute(self, model, inputs)

    COUNTER["calls"] = 0
    arguments = TrainingArguments(
        str(folder / library.__name__), max_steps=STEPS, logging_steps=1, report_to="none", save_strategy="no", use_cpu=True,
        seed=7, disable_tqdm=True, learning_rate=1e-2, remove_unused_columns=False, per_device_train_batch_size=BATCH,
        train_sampling_strategy="sequential", max_grad_norm=0.0, optim="sgd",
    )  # fmt: skip
    trainer = type("Own", (library.Trainer,), {"compute_loss": compute_loss})(
        model=model(), args=arguments, data_collator=padded, train_dataset=data, **options
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer


def same(folder: Path, compute: Loss, data: Any) -> Any:
    """How the loss splits; whatever that is, training is that of transformers."""
    theirs, reference = trained(transformers, folder, compute, data)
    try:
        ours, trainer = trained(upshift, folder, compute, data, plan=PLAN)
    except RequestError as refusal:
        assert "batches of 8 rows stay whole" in str(refusal)
        ours, trainer = trained(upshift, folder, compute, data, plan=WHOLE_PLAN)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    assert len(ours) == STEPS and ours[0] != ours[-1]
    for one, other in zip(trainer.model.state_dict().values(), reference.model.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    return trainer._upshift_planned.last_choice[1]


@pytest.mark.parametrize("compute", SPLIT, ids=lambda one: one.__name__)
def test_a_loss_that_splits_is_cut(compute: Loss, tmp_path: Path) -> None:
    assert same(tmp_path, compute, rows()).unit is not None


@pytest.mark.parametrize(
    ("compute", "number"),
    [(one, number) for one in WHOLE for number in range(len(DATA.get(one.__name__, [0])))],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_a_loss_that_does_not_split_is_left_whole(compute: Loss, number: int, tmp_path: Path) -> None:
    data = DATA.get(compute.__name__, [rows()])[number]
    split = same(tmp_path, compute, data)
    is_seen_in_training = data[RARE]["weight"] == 5.0 or data[RARE]["labels"] == CLASSES - 1
    assert (split.unit is not None) == is_seen_in_training, split.reason


def test_rows_beyond_what_was_measured_stay_whole(tmp_path: Path) -> None:
    """A loss that splits over the sample alone, and a batch with a label that the sample has not."""
    split = same(tmp_path, class_weights, rows_with(labels=CLASSES - 1))
    assert split.unit is not None and split.ranges["labels"] == (0.0, CLASSES - 2.0)


class Meter:
    def __init__(self) -> None:
        self.values: list[float] = []
        self.buffer = torch.zeros(2)
        self.generator = np.random.default_rng(0)
        self.nested = {"a": [1, {"b": 2}]}


def test_what_a_loss_keeps_is_found_and_put_back() -> None:
    meter, cell = Meter(), 0

    class Holder:
        model = torch.nn.BatchNorm1d(2)

    def compute() -> None:
        nonlocal cell
        assert meter is not None
        cell += 0

    changes: list[Callable[[], Any]] = [
        lambda: meter.values.append(1.0),
        lambda: meter.buffer.add_(1),
        lambda: meter.generator.random(),
        lambda: meter.nested["a"][1].update(b=3),  # type: ignore[attr-defined, union-attr]
        lambda: setattr(holder, "new", 1),
        lambda: holder.model.running_mean.add_(1),
        lambda: COUNTER.update(calls=-1),
    ]
    holder = Holder()
    holder.meter = meter  # type: ignore[attr-defined]
    for change in changes:
        COUNTER["calls"] = 0
        state = StateSnapshot(trainer=holder, model=holder.model, compute=compute, other=counting_in_a_global)
        assert state.changed() is None
        change()
        assert state.changed() is not None
        state.restore()
        assert state.changed() is None
    assert not meter.values and not meter.buffer.any() and COUNTER == {"calls": 0} and meter.nested == {"a": [1, {"b": 2}]}
    assert not hasattr(holder, "new") and list(itertools.chain(meter.values)) == []
