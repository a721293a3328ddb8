"""The precision of upshift.Trainer is that of transformers: around the model's forward alone, and never against the script's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn.functional import binary_cross_entropy
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

import upshift
from upshift.errors import RequestError
from upshift.planning.plan import Plan
from upshift.training.hf_trainer.arguments import NO_SCALER
from upshift.training.hf_trainer.patching import forward_in_precision

CHEAP = ("torch_compile=off", "attention=sdpa", "activation_checkpointing=0", "per_device_train_batch_size=4", "packing=False")


def classifier() -> Any:
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_labels=3,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, problem_type="single_label_classification",
        )
    )  # fmt: skip


def rows() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 64, (16, 8), generator=generator)
    return [{"input_ids": row, "attention_mask": torch.ones(8, dtype=torch.long), "labels": int(row[0]) % 3} for row in ids]


def trainer_of(library: Any, folder: Path, methods: dict[str, Any], options: dict[str, Any], **more: Any) -> Any:
    arguments = TrainingArguments(str(folder / library.__name__), **{
        "max_steps": 3, "logging_steps": 1, "report_to": "none", "save_strategy": "no", "use_cpu": True, "seed": 7,
        "disable_tqdm": True, "learning_rate": 1e-2, "per_device_train_batch_size": 4, "optim": "adamw_torch", **more,
    })  # fmt: skip
    data = rows()
    return type("Own", (library.Trainer,), methods)(
        model=classifier(), args=arguments, train_dataset=data, eval_dataset=data[:4], **options
    )


def losses_of(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def plan_of(**fields: Any) -> Plan:
    required = {"device": "cpu", "host": "", "model": "", "sequence_length": 8, "per_device_train_batch_size": 4}
    return Plan.model_validate(required | fields)


def test_a_loss_of_the_script_is_computed_in_fp32_as_with_accelerate(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def methods(name: str) -> dict[str, Any]:
        def compute_loss(
            self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            scores = outputs.logits @ outputs.logits.T  # autocast would round this product
            target = torch.nn.functional.one_hot(labels, 3).float()
            seen.setdefault(name, set()).add((outputs.logits.dtype, scores.dtype, torch.is_autocast_enabled("cpu")))
            loss = binary_cross_entropy(outputs.logits.sigmoid(), target) + 0.1 * scores.square().mean()
            return (loss, outputs) if return_outputs else loss

        return {"compute_loss": compute_loss}

    evaluated: list[torch.dtype] = []

    def preprocess(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        evaluated.append(logits.dtype)
        return logits

    evaluation = {"eval_strategy": "steps", "eval_steps": 3, "metric_for_best_model": None}
    reference = trainer_of(transformers, tmp_path, methods("theirs"), {}, bf16=True, **evaluation)
    reference.train()
    options = {"fixed": (*CHEAP, "precision=bf16"), "trial_seconds": 0, "preprocess_logits_for_metrics": preprocess}
    options["compute_metrics"] = lambda prediction: {}
    trainer = trainer_of(upshift, tmp_path, methods("ours"), options, **evaluation)
    trainer.train()
    assert trainer.upshift_choice.plan.precision == "bf16"
    assert seen["ours"] == seen["theirs"] == {(torch.float32, torch.float32, False)}
    assert set(evaluated) == {torch.float32}
    assert losses_of(trainer) == pytest.approx(losses_of(reference), rel=1e-6)
    assert "forward" not in vars(trainer.model)


@pytest.mark.parametrize("where", ["compute_loss", "autocast_smart_context_manager"])
@pytest.mark.parametrize("options", [{}, {"fixed": CHEAP, "trial_seconds": 0}], ids=["own settings", "a plan"])
def test_autocast_of_the_script_stays(where: str, options: dict[str, Any], tmp_path: Path) -> None:
    dtypes: set[torch.dtype] = set()

    def open_autocast(self: Any, *arguments: Any) -> Any:
        return torch.autocast("cpu", torch.bfloat16)

    def compute_loss(self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(**inputs)
        dtypes.add(outputs.logits.dtype)
        return (outputs.loss, outputs) if return_outputs else outputs.loss

    def look(module: Any, inputs: Any, outputs: Any) -> None:
        dtypes.add(outputs.logits.dtype)

    methods = {"compute_loss": compute_loss} if where == "compute_loss" else {where: open_autocast}
    trainer = trainer_of(upshift, tmp_path, methods, options)
    handle = trainer.model.register_forward_hook(look)
    trainer.train()
    handle.remove()
    assert dtypes == {torch.bfloat16}
    assert trainer.upshift_choice.plan.precision == "fp32" and (trainer.upshift_choice.planning is not None) == bool(options)


def test_only_what_is_read_is_converted() -> None:
    model = classifier()
    batch = {name: torch.stack([torch.as_tensor(row[name]) for row in rows()[:4]]) for name in rows()[0]}
    for reads_outputs, mode, dtype in ((False, True, torch.bfloat16), (False, False, torch.float32), (True, True, torch.float32)):
        model.train(mode)
        with forward_in_precision(model, plan_of(precision="bf16"), reads_outputs=reads_outputs):
            outputs = model(**batch)
            copied = copy.deepcopy(model)
            copied.classifier.weight.data.zero_()
            assert not torch.equal(copied(**batch).logits, outputs.logits)  # a copy runs its own weights
        assert (outputs.logits.dtype, outputs.loss.dtype) == (dtype, torch.float32)
    assert model(**batch).logits.dtype == torch.float32


def test_fp16_needs_the_scaler_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match=r"precision=fp16.*TrainingArguments\(fp16=True\)"):
        trainer_of(upshift, tmp_path, {}, {"fixed": "precision=fp16"})
    with pytest.raises(RequestError, match=r"TrainingArguments\(fp16=True\)"):
        trainer_of(upshift, tmp_path, {}, {"plan": plan_of(precision="fp16")}).train()
    trainer = trainer_of(upshift, tmp_path, {}, {})
    assert trainer._upshift_why_not(plan_of(precision="fp16")) == NO_SCALER
    assert trainer._upshift_why_not(plan_of(precision="bf16")) is None


def test_the_precision_of_a_launcher_is_fixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``accelerate launch --mixed_precision bf16`` sets it: accelerate runs the model in it, whatever a plan says."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    trainer = trainer_of(upshift, tmp_path, {}, {})
    assert "precision=bf16" in trainer._upshift_fixed_fields()
    with pytest.raises(RequestError, match="precision=fp32 contradicts"):
        trainer_of(upshift, tmp_path, {}, {"fixed": "precision=fp32"}).train()
