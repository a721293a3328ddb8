"""Every loss of pairs gives the losses, rewards and weights of TRL's trainers, step by step, where TRL is installed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from chat_models import byte_level_tokenizer, save_model, write_jsonl
from pair_runs import EPOCH_OF_TRL, OF_TRL, pair_job, train_in_our_order, trl_trainer
from test_preferences_trl import DPO, text_rows

from upshift.models.source import find_model
from upshift.training.arguments import SIMPO_GAMMA
from upshift.training.checkpoint.directory import REFERENCE_NAME
from upshift.training.data.dataset import TrainingData, prepare_data
from upshift.training.job.job import run_job
from upshift.training.preferences.loss_names import OF_RATIOS, OF_TOKENS

LENGTH = 64
STEPS = 4  # of four pairs, the last one of a single pair
ROWS = text_rows(13, longest=9)
SMOOTHING = {"exo_pair": 0.01, "robust": 0.1, "simpo": 0.1}
CASES = [*OF_RATIOS, OF_TOKENS, "sigmoid=0.8,bco_pair=0.2,sft"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), byte_level_tokenizer())


@pytest.fixture(scope="module")
def data(model: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainingData:
    folder = tmp_path_factory.mktemp("data")
    write_jsonl(folder / "train.jsonl", ROWS)
    write_jsonl(folder / "validation.jsonl", ROWS[:5])
    return prepare_data(find_model(str(model)), folder, sequence_length=LENGTH, options=DPO)


def our_details(model: Path, data: TrainingData, output: Path, losses: str, **settings: Any) -> dict[str, Any]:
    settings = {"eval_steps": STEPS, "dpo_beta": 0.2, "dpo_loss": losses} | settings
    settings |= {"max_steps": STEPS, "learning_rate": 3e-3, "warmup_steps": 2, "weight_decay": 0.1}
    job = pair_job(model, Path("data"), output, length=LENGTH, options=DPO, settings=settings, plan={})
    return run_job(job, data).details


@pytest.mark.parametrize("losses", CASES)
def test_each_loss_of_pairs_trains_as_with_trl(losses: str, model: Path, data: TrainingData, tmp_path: Path) -> None:
    """Ours accumulates two micro-batches, pads differently, and keeps no second model."""
    smoothing = SMOOTHING.get(losses, 0.0)
    details = our_details(model, data, tmp_path / "out", losses, dpo_label_smoothing=smoothing)
    named = [part.partition("=") for part in losses.split(",")]
    options = EPOCH_OF_TRL | {
        "beta": 0.2, "precompute_ref_log_probs": True, "label_smoothing": smoothing, "loss_type": [name for name, *_ in named],
        "loss_weights": [float(weight or 1) for *_, weight in named],
    }  # fmt: skip
    trainer = trl_trainer("DPO", model, ROWS, tmp_path, length=LENGTH, **options)
    train_in_our_order(trainer, data, seed=42)
    ours = [loss for _, loss in details["loss_curve"]]
    assert len(ours) == STEPS and ours == pytest.approx(trainer.losses, abs=1e-5, rel=1e-5)
    assert max(ours) - min(ours) > 1e-4
    steps = [entry for entry in trainer.state.log_history if "rewards/margins" in entry]
    assert [margin for *_, margin in details["rewards"]] == pytest.approx([row["rewards/margins"] for row in steps], abs=1e-4)
    (evaluation,) = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert details["evaluations"][-1][1] == pytest.approx(evaluation["eval_loss"], abs=1e-4, rel=1e-5)


def test_an_answer_without_a_prompt_is_as_long_as_for_trl(tmp_path: Path) -> None:
    """No model predicts the first token of a row. TRL divides by a length that counts it, and so does Upshift."""
    model = save_model(tmp_path / "model", byte_level_tokenizer(adds_bos=False))
    rows = [row | {"prompt": ""} for row in text_rows(13, longest=3)]
    write_jsonl(tmp_path / "data" / "train.jsonl", rows)
    write_jsonl(tmp_path / "data" / "validation.jsonl", rows[:5])
    data = prepare_data(find_model(str(model)), tmp_path / "data", sequence_length=LENGTH, options=DPO)
    assert data.training.labels is not None and (data.training.labels[data.training.starts] != -100).all()
    ours = our_details(model, data, tmp_path / "out", "ipo=0.1,sigmoid_norm")
    options = EPOCH_OF_TRL | {
        "beta": 0.2, "precompute_ref_log_probs": True, "loss_type": ["ipo", "sigmoid_norm"], "loss_weights": [0.1, 1.0],
    }  # fmt: skip
    trainer = trl_trainer("DPO", model, rows, tmp_path, length=LENGTH, **options)
    train_in_our_order(trainer, data, seed=42)
    losses = [loss for _, loss in ours["loss_curve"]]
    assert losses == pytest.approx(trainer.losses, abs=1e-5) and max(losses) - min(losses) > 1e-3


def tokenized(data: TrainingData) -> Any:
    """Our pairs as a table that TRL's trainers without a reference model collate."""
    import datasets

    rows: list[dict[str, list[int]]] = []
    sequences = data.training
    assert sequences.labels is not None
    for number, (start, length) in enumerate(zip(sequences.starts.tolist(), sequences.lengths.tolist(), strict=True)):
        side = ("chosen", "rejected")[number % 2]
        ids = sequences.tokens[start : start + length].tolist()
        labels = sequences.labels[start : start + length].tolist()
        prompt = ids[: labels.count(-100)]
        if side == "chosen":
            rows.append({"prompt_input_ids": prompt, "prompt_attention_mask": [1] * len(prompt)})
        rows[-1] |= {f"{side}_input_ids": ids, f"{side}_attention_mask": [1] * length, f"{side}_labels": labels}
    return datasets.Dataset.from_list(rows)


WITHOUT = {  # TRL's trainer and its settings
    "simpo": ("CPO", {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 0.4, "label_smoothing": 0.1}),
    "simpo,sft=0.5": ("CPO", {"loss_type": "simpo", "cpo_alpha": 0.5, "simpo_gamma": 0.4, "label_smoothing": 0.1}),
    "cpo": ("CPO", {"loss_type": "sigmoid", "label_smoothing": 0.1}),
    "orpo": ("ORPO", {}),
}


@pytest.mark.parametrize("losses", WITHOUT)
def test_losses_without_a_reference_train_as_with_trl(losses: str, model: Path, tmp_path: Path) -> None:
    """No reference is computed. ORPOTrainer trains on prompts, too: there they are a BOS, which no model predicts."""
    import datasets
    from transformers import AutoModelForCausalLM, AutoTokenizer

    kind, settings = WITHOUT[losses]
    experimental = pytest.importorskip(f"trl.experimental.{kind.lower()}", reason="trl is not installed")
    rows = [row | {"prompt": "" if kind == "ORPO" else "a"} for row in ROWS]
    write_jsonl(tmp_path / "data" / "train.jsonl", rows)
    options = DPO.changed(eval_size=0)
    data = prepare_data(find_model(str(model)), tmp_path / "data", sequence_length=LENGTH, options=options)
    smoothing = settings.get("label_smoothing", 0.0)
    gamma = settings.get("simpo_gamma", SIMPO_GAMMA)
    details = our_details(
        model, data, tmp_path / "out", losses, dpo_label_smoothing=smoothing, simpo_gamma=gamma, eval_steps=0,
    )  # fmt: skip
    assert not (tmp_path / "out" / REFERENCE_NAME).exists()
    given = {"beta": 0.2, "max_length": LENGTH, "eval_strategy": "no", "output_dir": str(tmp_path / "trl")}
    trainer = getattr(experimental, f"{kind}Trainer")(
        model=AutoModelForCausalLM.from_pretrained(model), processing_class=AutoTokenizer.from_pretrained(model),
        args=getattr(experimental, f"{kind}Config")(**OF_TRL | EPOCH_OF_TRL | given | settings),
        train_dataset=datasets.Dataset.from_list(rows),
    )  # fmt: skip
    trainer.train_dataset = tokenized(data)
    train_in_our_order(trainer, data, seed=42)
    steps = [entry for entry in trainer.state.log_history if "rewards/margins" in entry]
    ours = [loss for _, loss in details["loss_curve"]]
    assert len(ours) == STEPS and ours == pytest.approx([step["loss"] for step in steps], abs=1e-5)
    assert [row[1:] for row in details["rewards"]] == [
        pytest.approx([step["rewards/accuracies"], step["rewards/margins"]], abs=1e-4) for step in steps
    ]


def test_the_names_of_losses_are_those_of_trl() -> None:
    """A loss that another version of TRL adds or renames fails here."""
    trl: Any = pytest.importorskip("trl", reason="trl is not installed, so its names of losses are not known")
    _, _, text = trl.DPOConfig.__doc__.partition("Type of loss to use.")
    assert {*re.findall(r"`'(\w+)'`", text.partition("loss_weights")[0])} == {*OF_RATIOS, OF_TOKENS, "aot", "aot_unpaired"}
