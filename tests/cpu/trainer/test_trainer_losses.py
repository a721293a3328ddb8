"""upshift.Trainer beside transformers.Trainer where the loss, the data loader or training_step is the script's own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy, logsigmoid
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM, TrainingArguments

import upshift
from upshift.errors import RequestError

SMALL = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
CUT = ("precision=fp32", "per_device_train_batch_size=2", "torch_compile=off", "attention=sdpa")
WEIGHTS = torch.tensor([1.0, 9.0, 1.0])
Rows = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPSHIFT_CACHE", str(tmp_path_factory.getbasetemp() / "trainer-cache"))


def classifier(**options: Any) -> Any:
    torch.manual_seed(0)
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "problem_type": "single_label_classification"}
    return BertForSequenceClassification(BertConfig(**SMALL, num_labels=3, **none, **options))


def causal() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL, pad_token_id=0))


def rows(label: Callable[[int, int], int], count: int = 64) -> Rows:
    """``label``: by a row's number and its length."""
    draw = np.random.default_rng(0)
    texts = [draw.integers(3, 64, draw.integers(4, 30)).tolist() for _ in range(count)]
    return [{"input_ids": ids, "labels": label(number, len(ids))} for number, ids in enumerate(texts)]


def padded(batch: Rows) -> dict[str, torch.Tensor]:
    width = max(len(row["input_ids"]) for row in batch)
    ids = torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in batch])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.tensor([row["labels"] for row in batch])}


def answers(batch: Rows) -> dict[str, torch.Tensor]:
    """The last tokens of each row, as many as its label says, are what a causal model learns."""
    inputs = padded(batch)
    labels = torch.full_like(inputs["input_ids"], -100)
    for row, one in enumerate(batch):
        end = len(one["input_ids"])
        labels[row, end - one["labels"] : end] = inputs["input_ids"][row, end - one["labels"] : end]
    return {**inputs, "labels": labels}


def trained(
    library: Any, folder: Path, *, own: dict[str, Any] | None = None, model: Any = classifier, data: Any = None,
    collate: Any = padded, callbacks: Any = None, options: dict[str, Any] | None = None, **more: Any,
) -> Any:  # fmt: skip
    """(losses, trainer); ``own``: methods of the script's subclass. ``options``: of upshift alone."""
    given = {"max_steps": 4, "logging_steps": 1, "report_to": "none", "save_strategy": "no", "use_cpu": True, "seed": 7,
             "disable_tqdm": True, "learning_rate": 1e-2, "remove_unused_columns": False, **more}  # fmt: skip
    trainer = type("Own", (library.Trainer,), own or {})(
        model=model(), args=TrainingArguments(str(folder / library.__name__), **given), data_collator=collate,
        callbacks=callbacks,
        train_dataset=rows(lambda number, length: length % 3) if data is None else data,
        **(options or {} if library is upshift else {}),
    )  # fmt: skip
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer


def same(folder: Path, *, options: dict[str, Any] | None = None, **more: Any) -> Any:
    """The trainer of ours, whose losses are those of theirs."""
    theirs, _ = trained(transformers, folder, **more)
    ours, trainer = trained(upshift, folder, options=options, **more)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    assert len(ours) == trainer.state.global_step and ours[0] != ours[-1]
    return trainer


def loss_method(compute: Callable[[Any, Any, dict[str, Any]], Any]) -> dict[str, Any]:
    def compute_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:  # fmt: skip
        return compute(self, model, inputs)

    return {"compute_loss": compute_loss}


def weighted(trainer: Any, model: Any, inputs: dict[str, Any]) -> Any:
    """The example of transformers' documentation."""
    labels = inputs.pop("labels")
    return cross_entropy(model(**inputs).logits, labels, weight=WEIGHTS)


def mean_of_rows(trainer: Any, model: Any, inputs: dict[str, Any]) -> Any:
    labels = inputs["labels"][:, 1:]
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, :-1]
    each = cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return (each.sum(1) / (labels != -100).sum(1)).mean()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (rows(lambda number, length: int(number == 50)), "not made of the losses of each"),
        (rows(lambda number, length: 1), "all rows have the same label"),
    ],
    ids=("a rare class", "one class"),
)
def test_weights_of_classes_are_seen_in_the_sample(data: Rows, why: str, tmp_path: Path) -> None:
    """Short rows of one class say nothing of a loss that is divided by the weights of its classes."""
    own = loss_method(weighted)
    with pytest.raises(RequestError, match=why):
        trained(upshift, tmp_path, own=own, data=data, options={"fixed": CUT})
    assert why in same(tmp_path, own=own, data=data).upshift_choice.reason


def test_a_mean_over_rows_is_told_from_one_over_labels(tmp_path: Path) -> None:
    """The short rows of a batch have as many labels each, and the long ones more; the loss reads a mask that plans leave out."""
    data = rows(lambda number, length: 2 if length < 20 else length - 3)
    trainer = same(
        tmp_path, own=loss_method(mean_of_rows), model=causal, data=data, collate=answers,
        options={"fixed": CUT, "trial_seconds": 0},
    )  # fmt: skip
    assert trainer.upshift_choice.plan.per_device_train_batch_size == 2


def test_a_batch_unlike_the_sample_stays_whole(tmp_path: Path) -> None:
    """Every row that is looked at has two labels, the second one has four."""
    data = rows(lambda number, length: 4 if number == 1 else 2, count=600)
    same(
        tmp_path, own=loss_method(mean_of_rows), model=causal, data=data, collate=answers, train_sampling_strategy="sequential",
        options={"fixed": CUT, "trial_seconds": 0},
    )  # fmt: skip


def test_rows_without_a_label_and_one_class_keep_the_models_own_loss_in_parts(tmp_path: Path) -> None:
    data = rows(lambda number, length: -100 if number % 3 == 0 else 1)
    assert same(tmp_path, data=data, options={"fixed": CUT, "trial_seconds": 0}).upshift_choice.planning is not None


@pytest.mark.parametrize("options", [{}, {"fixed": CUT, "trial_seconds": 0}], ids=("whole", "in parts"))
def test_the_optimizer_steps_where_a_batch_has_no_label(options: dict[str, Any], tmp_path: Path) -> None:
    """Weights decay, and moments move on."""

    def collate(batch: Rows) -> dict[str, torch.Tensor]:
        inputs = answers(batch)
        if any(row["labels"] == 0 for row in batch):
            inputs["labels"][:] = -100
        return inputs

    data = rows(lambda number, length: length if number % 30 != 7 else 0)
    trainer = same(tmp_path, model=causal, data=data, collate=collate, options=options, weight_decay=0.5, max_steps=8)
    assert {entry["grad_norm"] == 0 for entry in trainer.state.log_history if "grad_norm" in entry} == {True, False}


def pairs(trainer: Any, model: Any, inputs: dict[str, Any]) -> Any:
    first, second = model(**inputs).logits[:, 0].view(-1, 2).unbind(1)
    return -logsigmoid(first - second).mean()


def in_training(trainer: Any, model: Any, inputs: dict[str, Any]) -> Any:
    assert model.training, "only in training"
    return model(**inputs).loss


def penalized(trainer: Any, model: Any, inputs: dict[str, Any]) -> Any:
    embedded = model.bert.embeddings.word_embeddings(inputs.pop("input_ids"))
    loss = model(inputs_embeds=embedded, **inputs).loss
    (gradient,) = torch.autograd.grad(loss, embedded, create_graph=True)
    return loss + gradient.pow(2).sum()


@pytest.mark.parametrize("compute", [pairs, in_training, penalized], ids=lambda compute: compute.__name__)
def test_a_loss_that_cannot_be_measured_is_left_whole(compute: Any, tmp_path: Path) -> None:
    trainer = same(tmp_path, own=loss_method(compute), model=partial(classifier, attn_implementation="eager"))
    assert trainer.upshift_choice.reason.startswith("the loss could not be measured on two rows: ")


def test_nothing_is_logged_while_a_loss_is_measured(tmp_path: Path) -> None:
    class Heard(transformers.TrainerCallback):
        def __init__(self) -> None:
            self.logs: list[Any] = []

        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
            self.logs.append((state.global_step, *logs))

    def logging(trainer: Any, model: Any, inputs: dict[str, Any]) -> Any:
        outputs = model(**inputs)
        trainer.log({"largest": float(outputs.logits.max())})
        return outputs.loss

    heard = {library: Heard() for library in (upshift, transformers)}
    for library, callback in heard.items():
        trained(library, tmp_path, own=loss_method(logging), callbacks=[callback])
    assert heard[upshift].logs == heard[transformers].logs
    with pytest.raises(RequestError, match="the loss logs largest of each batch, and a plan calls it for other rows"):
        trained(upshift, tmp_path, own=loss_method(logging), options={"fixed": CUT})


class Loader:
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Listed(Dataset):  # type: ignore[type-arg]
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> Any:
        return self.items[number]


def whole_batches(batches: list[Any]) -> Any:
    return DataLoader(Listed(batches), batch_size=None)


@pytest.mark.parametrize("kind", [Loader, whole_batches], ids=lambda kind: kind.__name__)
def test_a_loader_that_makes_its_own_batches(kind: Any, tmp_path: Path) -> None:
    data = rows(lambda number, length: length % 3)
    loader = kind([padded(data[start : start + 8]) for start in range(0, 64, 8)])
    trainer = same(tmp_path, own={"get_train_dataloader": lambda self: loader})
    assert trainer.upshift_choice.reason == "the data loader does not make its batches of examples with a collator"


def test_batches_without_names(tmp_path: Path) -> None:
    data = Listed([(torch.tensor((row["input_ids"] * 5)[:16]), row["labels"]) for row in rows(lambda number, length: length % 3)])
    own = loss_method(lambda trainer, model, inputs: model(input_ids=inputs[0], labels=inputs[1]).loss)
    trainer = same(tmp_path, own=own, data=data, collate=torch.utils.data.default_collate)
    assert "no names to its tensors" in trainer.upshift_choice.reason


def test_a_stream_that_gives_one_iterator_is_not_used_up(tmp_path: Path) -> None:
    class Stream(IterableDataset):  # type: ignore[type-arg]
        def __init__(self) -> None:
            self.read = iter(rows(lambda number, length: length % 3))

        def __iter__(self) -> Any:
            return self.read

    theirs, _ = trained(transformers, tmp_path, data=Stream(), max_steps=8)
    ours, trainer = trained(upshift, tmp_path, data=Stream(), max_steps=8)
    assert ours == theirs and len(ours) == 8 and "read once" in trainer.upshift_choice.reason


def adversarial(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
    """The fast gradient method: a second pass, with words moved along the gradient of the first."""
    loss = super(type(self), self).training_step(model, inputs, num_items_in_batch)
    words = model.bert.embeddings.word_embeddings.weight
    before = words.detach().clone()
    words.data.add_(words.grad / words.grad.norm())
    super(type(self), self).training_step(model, inputs, num_items_in_batch)
    words.data.copy_(before)
    return loss


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_scripts_own_training_step_finds_gradients(accumulation: int, tmp_path: Path) -> None:
    own = {"training_step": adversarial}
    trainer = same(tmp_path, own=own, gradient_accumulation_steps=accumulation)
    assert ("own training_step" in trainer.upshift_choice.reason) == (accumulation == 2)


def test_a_plan_is_refused_where_the_scripts_own_training_step_runs(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=re.escape("own training_step runs for each batch that is accumulated")):
        trained(upshift, tmp_path, own={"training_step": adversarial}, gradient_accumulation_steps=2, options={"fixed": CUT})
