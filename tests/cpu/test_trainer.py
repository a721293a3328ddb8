"""upshift.Trainer against transformers.Trainer: the tasks of transformers' example scripts, on tiny models and data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import DataCollatorForLanguageModeling, DataCollatorForSeq2Seq, DataCollatorWithPadding, TrainingArguments

import upshift

STEPS = 20


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPSHIFT_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "trainer-cache"))


class Tokens:
    """What collators need of a tokenizer: padding."""

    def __new__(cls) -> Any:
        from tokenizers import Tokenizer, models, pre_tokenizers

        vocabulary = {"[PAD]": 0, "[MASK]": 1, "[UNK]": 2} | {f"w{number}": number + 3 for number in range(125)}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="[PAD]", mask_token="[MASK]", unk_token="[UNK]"
        )


def sentences(count: int, *, longest: int = 40, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(3, 128, size=generator.integers(4, longest)).tolist() for _ in range(count)]


def no_dropout(config: Any) -> Any:
    for name in vars(config):
        if "dropout" in name or name.endswith("_pdrop") or name == "dropout_rate":
            setattr(config, name, 0.0)
    return config


@dataclasses.dataclass
class Task:
    model: Callable[[], torch.nn.Module]
    data: list[dict[str, Any]]
    collator: Any
    metrics: Callable[[Any], dict[str, float]] | None = None
    trainer: str = "Trainer"
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)


def accuracy(prediction: Any) -> dict[str, float]:
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    labels = prediction.label_ids
    chosen = logits.argmax(-1)
    return {"accuracy": float((chosen == labels)[labels != -100].mean())}


def build(config: Any, auto: str) -> Callable[[], torch.nn.Module]:
    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return getattr(transformers, auto).from_config(no_dropout(config))

    return model


def bert(**fields: Any) -> Any:
    return transformers.BertConfig(
        vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=64, **fields,
    )  # fmt: skip


def llama() -> Any:
    return transformers.LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip


def causal_lm() -> Task:
    data = [{"input_ids": ids} for ids in sentences(64)]
    return Task(build(llama(), "AutoModelForCausalLM"), data, DataCollatorForLanguageModeling(Tokens(), mlm=False))


def masked_lm() -> Task:
    data = [{"input_ids": ids} for ids in sentences(64)]
    return Task(build(bert(), "AutoModelForMaskedLM"), data, DataCollatorForLanguageModeling(Tokens(), mlm=True))


def text_classification() -> Task:
    data = [{"input_ids": ids, "label": len(ids) % 3} for ids in sentences(64)]
    model = build(bert(num_labels=3), "AutoModelForSequenceClassification")
    return Task(model, data, DataCollatorWithPadding(Tokens()), accuracy)


def token_classification() -> Task:
    data = [{"input_ids": ids, "labels": [token % 5 for token in ids]} for ids in sentences(64)]
    collator = transformers.DataCollatorForTokenClassification(Tokens())
    return Task(build(bert(num_labels=5), "AutoModelForTokenClassification"), data, collator, accuracy)


def question_answering() -> Task:
    data = [{"input_ids": ids, "start_positions": 1, "end_positions": len(ids) - 1} for ids in sentences(64)]
    return Task(build(bert(), "AutoModelForQuestionAnswering"), data, DataCollatorWithPadding(Tokens()))


def summarization() -> Task:
    config = transformers.T5Config(
        vocab_size=128, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0, pad_token_id=0
    )
    data = [{"input_ids": ids, "labels": ids[: len(ids) // 2]} for ids in sentences(64)]
    return Task(build(config, "AutoModelForSeq2SeqLM"), data, DataCollatorForSeq2Seq(Tokens()), trainer="Seq2SeqTrainer")


def image_classification() -> Task:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=8,
        num_labels=4,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    data = [{"pixel_values": torch.randn(3, 32, 32, generator=generator), "labels": number % 4} for number in range(64)]
    return Task(build(config, "AutoModelForImageClassification"), data, None, accuracy)


TASKS = [
    causal_lm, masked_lm, text_classification, token_classification, question_answering, summarization, image_classification,
]  # fmt: skip


def train(library: Any, task: Task, folder: Path, *, upshift_options: dict[str, Any] | None = None, **more: Any) -> Any:
    """(loss curve, the trainer's metrics, final weights)"""
    kinds = transformers.Seq2SeqTrainingArguments if task.trainer == "Seq2SeqTrainer" else TrainingArguments
    arguments = kinds(
        output_dir=str(folder),
        **{
            "max_steps": STEPS, "logging_steps": 1, "report_to": "none", "save_strategy": "no", "use_cpu": True,
            "disable_tqdm": True, "learning_rate": 1e-3, "seed": 7, **task.arguments, **more,
        },
    )  # fmt: skip
    options = (upshift_options or {}) if library is upshift else {}
    trainer = getattr(library, task.trainer)(
        model=task.model(), args=arguments, data_collator=task.collator, train_dataset=task.data,
        eval_dataset=task.data[:24], compute_metrics=task.metrics, **options,
    )  # fmt: skip
    result = trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    evaluated = trainer.evaluate()
    kept = {name: value for name, value in evaluated.items() if "loss" in name or "accuracy" in name}
    return losses, {"train_loss": result.training_loss, **kept}, trainer


def check_same(ours: Any, theirs: Any, *, tolerance: float = 1e-5) -> None:
    assert len(ours[0]) == len(theirs[0]) > 0
    np.testing.assert_allclose(ours[0], theirs[0], rtol=tolerance)
    assert ours[1].keys() == theirs[1].keys()
    for name, value in theirs[1].items():
        assert ours[1][name] == pytest.approx(value, rel=tolerance, abs=1e-6), name
    assert ours[0][-1] != ours[0][0]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.__name__)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_same_curve_and_metrics(task: Callable[[], Task], accumulation: int, tmp_path: Path) -> None:
    """The script runs unchanged, and in fp32 with the same seed the losses and final metrics are the same."""
    more = {"gradient_accumulation_steps": accumulation, "per_device_train_batch_size": 4}
    theirs = train(transformers, task(), tmp_path / "theirs", **more)
    ours = train(upshift, task(), tmp_path / "ours", **more)
    check_same(ours, theirs)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.__name__)
def test_same_curve_when_the_batch_is_cut(task: Callable[[], Task], tmp_path: Path) -> None:
    """Sorted by length, trimmed, in smaller micro-batches than the user's: the same gradients."""
    more = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
    theirs = train(transformers, task(), tmp_path / "theirs", **more)
    fixed = ("precision=fp32", "per_device_train_batch_size=2", "torch_compile=off")
    ours = train(upshift, task(), tmp_path / "ours", upshift_options={"fixed": fixed, "trial_seconds": 0}, **more)
    assert ours[2].choice.plan.per_device_train_batch_size == 2
    check_same(ours, theirs)
