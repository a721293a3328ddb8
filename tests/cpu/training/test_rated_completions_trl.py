"""Rated completions become the tokens, losses, rewards and KL terms of TRL's KTOTrainer, where TRL is installed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_models import byte_level_tokenizer, save_model, words, write_jsonl
from pair_runs import EPOCH_OF_TRL, GLOBAL_BATCH, pair_job, trl_trainer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from upshift.models.source import find_model
from upshift.training.batches.layout import Layout
from upshift.training.batches.sampler import BatchSource
from upshift.training.data.data_options import DataOptions
from upshift.training.data.dataset import TrainingData, prepare_data
from upshift.training.data.tokens import Sequences
from upshift.training.job.job import run_job

LENGTH = 64
KTO = DataOptions(objective="kto")
SETTINGS = {"kto_beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.75}
Rows = list[dict[str, Any]]
Rated = tuple[list[int], list[int], bool]  # the ids of the prompt and of the completion, and whether it is good


def rated_rows(number: int, *, as_messages: bool = False, longest: int = 9) -> Rows:
    draws = random.Random(3)
    rows: Rows = []
    for _ in range(number):
        label = draws.random() < 0.6
        prompt, completion = words(draws, draws.randint(1, 6)), words(draws, draws.randint(1, longest)) + " roads" * label
        if as_messages:
            rows.append({
                "prompt": [{"role": "user", "content": prompt}],
                "completion": [{"role": "assistant", "content": completion}], "label": label,
            })  # fmt: skip
        else:
            rows.append({"prompt": prompt, "completion": f" {completion}", "label": label})
    return rows


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), byte_level_tokenizer())


def our_data(model: Path, rows: Rows, folder: Path) -> TrainingData:
    write_jsonl(folder / "data" / "train.jsonl", rows)
    write_jsonl(folder / "data" / "validation.jsonl", rows[:5])
    return prepare_data(find_model(str(model)), folder / "data", sequence_length=LENGTH, options=KTO)


def parts_of(sequences: Sequences) -> list[Rated]:
    """Prompt, completion and rating of each sequence. The first label is that of the completion's first token."""
    assert sequences.labels is not None and sequences.ratings is not None
    rows = []
    for number, (start, length) in enumerate(zip(sequences.starts.tolist(), sequences.lengths.tolist(), strict=True)):
        ids = sequences.tokens[start : start + length].tolist()
        labels = sequences.labels[start : start + length].tolist()
        first = next(place for place, label in enumerate(labels) if label != -100)
        assert labels == [-100] * first + ids[first:]
        rows.append((ids[:first], ids[first:], bool(sequences.ratings[number])))
    return rows


def with_our_partners(dataset: Any, sequences: Sequences) -> Any:
    """TRL's tokenized rows with our mismatched completions, which TRL takes from the row before in its own batches."""
    if "KL_completion_ids" not in dataset.column_names:
        return dataset
    mismatched = [completion for _, completion, _ in parts_of(sequences)[1::2]]
    assert len(mismatched) == len(dataset)
    return dataset.remove_columns("KL_completion_ids").add_column("KL_completion_ids", mismatched)


@pytest.mark.parametrize("as_messages", [False, True], ids=["texts", "messages"])
@pytest.mark.parametrize("is_unpaired", [False, True], ids=["rated", "pairs"])
def test_tokens_and_ratings_equal_those_of_trl(as_messages: bool, is_unpaired: bool, model: Path, tmp_path: Path) -> None:
    """TRL unpairs all chosen answers before all rejected ones, and cuts rows when it collates them."""
    rows = rated_rows(24, as_messages=as_messages, longest=90)
    if is_unpaired:
        other = [{"role": "assistant", "content": "no"}] if as_messages else " no"
        rows = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": other} for row in rows]
    trainer = trl_trainer("KTO", model, rows, tmp_path, length=LENGTH)
    theirs = []
    for row in trainer.train_dataset:
        room = LENGTH - len(row["prompt_ids"])
        theirs.append((row["prompt_ids"], row["completion_ids"][:room], row["label"]))
    data = our_data(model, rows, tmp_path)
    ours = parts_of(data.training)[0::2]
    assert sorted(ours) == sorted(theirs) and len(ours) == 24 * (1 + is_unpaired)
    assert is_unpaired or ours == theirs
    assert any(len(prompt) + len(completion) == LENGTH for prompt, completion, _ in ours)


def saved_adapter(model: Path, folder: Path) -> tuple[Any, Path]:
    """A new adapter of LoRA, which changes nothing yet, and its config."""
    peft: Any = pytest.importorskip("peft", reason="peft is not installed, so TRL cannot train an adapter")
    torch.manual_seed(7)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model), config).save_pretrained(folder)
    for file in model.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return config, folder


@pytest.mark.parametrize(
    ("has_adapter", "loss", "steps"), [(False, "kto", 31), (True, "kto", 31), (False, "apo_zero_unpaired", 11)],
    ids=["all weights", "lora", "apo_zero_unpaired"],
)  # fmt: skip
def test_losses_rewards_and_kl_terms_of_an_epoch_equal_those_of_trl(
    has_adapter: bool, loss: str, steps: int, model: Path, tmp_path: Path
) -> None:
    """Steps of four completions, the last one of a single one. TRL has the reference in memory; ours has two micro-batches."""
    rows = rated_rows(4 * steps - 3)
    data = our_data(model, rows, tmp_path)
    assert data.evaluation is not None
    rate = 3e-2 if has_adapter else 3e-3
    settings = SETTINGS | {"max_steps": steps, "learning_rate": rate, "warmup_steps": 2, "weight_decay": 0.1, "eval_steps": steps}
    settings |= {"kto_loss": loss}
    config, start = saved_adapter(model, tmp_path / "adapter") if has_adapter else (None, model)
    job = pair_job(start, tmp_path / "data", tmp_path / "out", length=LENGTH, options=KTO, settings=settings, plan={})
    details = run_job(job, data).details
    options = EPOCH_OF_TRL | {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.75}
    options |= {"learning_rate": rate, "loss_type": loss}
    trainer = trl_trainer("KTO", model, rows, tmp_path, length=LENGTH, adapter=config, **options)
    if has_adapter:
        import peft

        peft.set_peft_model_state_dict(trainer.model, load_file(start / "adapter_model.safetensors"))
    source = BatchSource(
        sequences=data.training, global_batch=GLOBAL_BATCH, layout=Layout(micro_batch=4, rows_together=2),
        objective=data.objective, seed=job.arguments.seed,
    )  # fmt: skip
    order = (source.epoch_order(0)[::2] // 2).tolist()
    trainer.train_dataset = with_our_partners(trainer.train_dataset, data.training).select(order)
    trainer.eval_dataset = with_our_partners(trainer.eval_dataset, data.evaluation)
    trainer._get_train_sampler = lambda *_: range(len(order))
    trainer.train()
    ours = [loss for _, loss in details["loss_curve"]]
    print(max(abs(one - other) for one, other in zip(ours, trainer.losses, strict=True)))
    assert len(ours) == steps and ours == pytest.approx(trainer.losses, abs=1e-5)
    assert max(ours) - min(ours) > 0.05
    check_rewards(details, trainer, has_kl=loss == "kto")


def check_rewards(details: dict[str, Any], trainer: Any, *, has_kl: bool) -> None:
    """Compare KL terms and margins of all steps, and the numbers of the evaluation."""
    steps = [entry for entry in trainer.state.log_history if "kl" in entry]
    kl_terms = [kl for _, kl in details.get("kl_terms", ())]
    assert kl_terms == (pytest.approx([step["kl"] for step in steps], abs=1e-4) if has_kl else [])
    assert not has_kl or max(kl_terms) > 0.1
    margins = [margin for _, _, margin in details["rewards"]]
    expected = [step.get("rewards/margins") for step in steps]
    assert [margin is None for margin in margins] == [margin is None for margin in expected] and None in margins
    pairs = [(one, other) for one, other in zip(margins, expected, strict=True) if one is not None]
    assert [one for one, _ in pairs] == pytest.approx([other for _, other in pairs], abs=1e-4)
    (evaluation,) = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert details["evaluations"][-1][1] == pytest.approx(evaluation["eval_loss"], abs=1e-4)
    assert details["evaluation_rewards"][-1][2] == pytest.approx(evaluation["eval_rewards/margins"], abs=1e-4)
