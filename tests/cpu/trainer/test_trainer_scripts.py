"""Scripts as people write them: with equal arguments upshift.Trainer logs, saves and trains what transformers.Trainer does."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from padded_rows import padded
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset
from transformers import BertConfig, BertForSequenceClassification, TrainerCallback, TrainingArguments

import upshift

OF_ONE_LIBRARY = {
    "upshift_state.json", "optimizer_parameters.json", "training_args.json", "training_args.bin", "generation_config.json",
}  # fmt: skip
Options = dict[str, Any]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPSHIFT_CACHE", str(tmp_path_factory.getbasetemp() / "trainer-cache"))


def bert() -> Any:
    """Drops out: random numbers are those of transformers, too."""
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_labels=3)
    )


def rows(count: int = 20) -> list[dict[str, Any]]:
    draw = np.random.default_rng(0)
    return [
        {"input_ids": draw.integers(3, 64, draw.integers(4, 24)).tolist(), "labels": int(draw.integers(0, 3))}
        for _ in range(count)
    ]


class Augmented(Dataset):  # type: ignore[type-arg]
    """Draws from a generator of its own whenever it is asked for a row."""

    def __init__(self) -> None:
        self.rows, self.random, self.calls = rows(), random.Random(5), 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        self.calls += 1
        row = self.rows[number]
        return {**row, "input_ids": self.random.sample(row["input_ids"], len(row["input_ids"])) + [3 + self.calls % 7]}


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Shuffles anew each time that it is read."""

    def __init__(self) -> None:
        self.random = random.Random(5)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        data = rows(64)
        self.random.shuffle(data)
        yield from data


class UsedUp(IterableDataset):  # type: ignore[type-arg]
    """Each iterator is another one, and all read from the same source."""

    def __init__(self) -> None:
        self.source = (row for row in rows(64))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from self.source


class Masking:
    """A collator with random numbers of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def __call__(self, batch: list[dict[str, Any]]) -> dict[str, Tensor]:
        inputs = padded(batch)
        hidden = torch.rand(inputs["input_ids"].shape, generator=self.generator) < 0.3
        return {**inputs, "input_ids": inputs["input_ids"].masked_fill(hidden, 1)}


class Tuples(nn.Module):
    """Not of transformers; gives a tuple, normalizes over the batch and drops out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.norm, self.drop, self.head = nn.Embedding(64, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> tuple[Tensor, ...]:
        mean = (self.embedding(input_ids) * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True)
        logits = self.head(self.drop(self.norm(mean)))
        return (logits,) if labels is None else (nn.functional.cross_entropy(logits, labels), logits)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.first, self.second = nn.Embedding(64, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, first: Tensor, second: Tensor) -> dict[str, Any]:
        mean = self.embedding(input_ids).mean(1)
        logits = {"first": self.first(mean), "second": self.second(mean)}
        losses = [nn.functional.cross_entropy(logits[name], label) for name, label in (("first", first), ("second", second))]
        return {"loss": losses[0] + 0.5 * losses[1], "logits": logits["first"], "more": logits["second"]}


class StopEpoch(TrainerCallback):
    """Ends the first epoch between two batches of its second step."""

    done = False

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1 and not self.done:
            control.should_epoch_stop = self.done = True


class StopTraining(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= 3


def own_optimizer(self: Any, model: Any = None) -> Any:
    if self.optimizer is None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.args.learning_rate, momentum=0.9)
    return self.optimizer


def scaled_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
    inputs["labels"] = (inputs["labels"] + 1) % 3
    return super(type(self), self).training_step(model, inputs, num_items_in_batch)


def accuracy(prediction: Any) -> dict[str, float]:
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    labels = prediction.label_ids[0] if isinstance(prediction.label_ids, tuple) else prediction.label_ids
    return {"accuracy": float((logits.argmax(-1) == labels).mean())}


EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
ACCUMULATED = {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2, "num_train_epochs": 2, "max_steps": -1}
two_labels = [{"input_ids": row["input_ids"], "first": row["labels"], "second": len(row["input_ids"]) % 3} for row in rows()]

# TrainingArguments, methods of a subclass, and the Trainer's own arguments, made anew for each library
SCRIPTS: dict[str, Callable[[], tuple[Options, Options, Options]]] = {
    "nothing more": lambda: ({}, {}, {}),
    "a remainder": lambda: (ACCUMULATED, {}, {}),
    "an epoch that a callback ends within a step": lambda: (ACCUMULATED, {}, {"callbacks": [StopEpoch()]}),
    "training that a callback ends": lambda: ({}, {}, {"callbacks": [StopTraining()]}),
    "rows by length": lambda: ({"train_sampling_strategy": "group_by_length"}, {}, {}),
    "no clipping": lambda: ({"max_grad_norm": 0.0, "gradient_accumulation_steps": 2}, {}, {}),
    "rows at random": lambda: ({"data_seed": 11}, {}, {"train_dataset": Augmented()}),
    "a stream": lambda: ({}, {}, {"train_dataset": Stream()}),
    "a stream that is read once": lambda: ({}, {}, {"train_dataset": UsedUp()}),
    "a collator at random": lambda: ({}, {}, {"data_collator": Masking()}),
    "tuples and statistics of batches": lambda: (EVALUATED, {}, {"model": Tuples(), "compute_metrics": accuracy}),
    "labels of two heads": lambda: (
        {"label_names": ["first", "second"], **EVALUATED}, {},
        {"model": TwoHeads(), "train_dataset": two_labels, "eval_dataset": two_labels[:6], "compute_metrics": accuracy},
    ),
    "an optimizer of its own": lambda: ({"lr_scheduler_type": "cosine"}, {"create_optimizer": own_optimizer}, {}),
    "a step of its own": lambda: ({}, {"training_step": scaled_step}, {}),
    "the best model": lambda: (
        {"load_best_model_at_end": True, "metric_for_best_model": "accuracy", "save_total_limit": 1, **EVALUATED}, {},
        {"compute_metrics": accuracy},
    ),
    "two evaluations": lambda: (EVALUATED, {}, {"eval_dataset": {"a": rows(6), "b": rows(5)}}),
    "model_init": lambda: ({"full_determinism": False}, {}, {"model": None, "model_init": bert}),
    "in epochs": lambda: (
        {"num_train_epochs": 2, "max_steps": -1, "save_strategy": "epoch", "eval_strategy": "epoch"}, {}, {},
    ),
    "smoothed labels": lambda: ({"label_smoothing_factor": 0.2, **EVALUATED}, {}, {}),
    "tokens counted": lambda: ({"include_num_input_tokens_seen": "all"}, {}, {}),
}  # fmt: skip


def run(library: Any, folder: Path, script: tuple[Options, Options, Options]) -> Any:
    settings, methods, options = script
    arguments = TrainingArguments(str(folder), **{
        "max_steps": 5, "save_steps": 2, "logging_steps": 1, "report_to": "none", "use_cpu": True, "seed": 7,
        "disable_tqdm": True, "learning_rate": 1e-2, "remove_unused_columns": False, "per_device_train_batch_size": 4, **settings,
    })  # fmt: skip
    given = {"model": bert() if "model" not in options else None, "data_collator": padded, "train_dataset": rows(),
             "eval_dataset": rows(6)}  # fmt: skip
    trainer = type("Own", (library.Trainer,), methods)(args=arguments, **{**given, **options})
    output = trainer.train()
    return trainer, output


def log_of(trainer: Any) -> list[dict[str, Any]]:
    def is_time(name: str) -> bool:
        return name.endswith(("runtime", "per_second", "preparation_time"))

    return [{name: value for name, value in entry.items() if not is_time(name)} for entry in trainer.state.log_history]


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name not in OF_ONE_LIBRARY}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_does_what_it_does_with_transformers(name: str, tmp_path: Path) -> None:
    results = {library: run(library, tmp_path / library.__name__, SCRIPTS[name]()) for library in (transformers, upshift)}
    (theirs, their_output), (ours, our_output) = results[transformers], results[upshift]
    assert ours.state.global_step == theirs.state.global_step > 2
    assert len(log_of(ours)) == len(log_of(theirs))
    for entry, reference in zip(log_of(ours), log_of(theirs), strict=True):
        assert entry == pytest.approx(reference, rel=1e-5, abs=1e-7)
    assert our_output.training_loss == pytest.approx(their_output.training_loss, rel=1e-5)
    assert files_of(tmp_path / "upshift") == files_of(tmp_path / "transformers")
    for one, other in zip(ours.model.state_dict().values(), theirs.model.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_nothing_to_resume_is_a_value_error_as_in_transformers(tmp_path: Path) -> None:
    for library in (transformers, upshift):
        arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
        trainer = library.Trainer(model=bert(), args=arguments, data_collator=padded, train_dataset=rows())
        with pytest.raises(ValueError, match="checkpoint"):
            trainer.train(resume_from_checkpoint=True)
