"""Every loss of pairs gives the losses, rewards and weights of TRL's trainers, step by step, where TRL is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chat_models import byte_level_tokenizer, save_model, write_jsonl
from pair_runs import EPOCH_OF_TRL, pair_job, train_in_our_order, trl_trainer
from test_preferences_trl import DPO, text_rows

from upshift.models.source import find_model
from upshift.training.data.dataset import TrainingData, prepare_data
from upshift.training.job.job import run_job
from upshift.training.preferences.loss_names import NAMES, OF_RATIOS, OF_TOKENS

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
    settings |= {"max_steps": STEPS, "learning_rate": 3e-3, "warmup_steps": 2, "weight_decay": 0.1, "eval_steps": STEPS}
    settings |= {"dpo_beta": 0.2, "dpo_loss": losses}
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


def test_the_names_of_losses_are_those_of_trl() -> None:
    """A loss that a newer TRL adds fails here, so that it is not forgotten."""
