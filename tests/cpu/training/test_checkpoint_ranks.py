"""Checkpoints of ranks that have the model in parts: any layout goes on from any other's, with the losses of a run that never
stopped, and the final model is what one process writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_run_options import held_out_loss
from test_train import GLOBAL_BATCH, a_job, a_plan, curve, home, prepared  # noqa: F401  fixtures
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

from upshift.errors import RequestError
from upshift.planning.plan import Plan
from upshift.record import Record
from upshift.training.checkpoint.checkpoint import newest_checkpoint
from upshift.training.checkpoint.sharded import Piece, copy_overlap
from upshift.training.data.dataset import TrainingData
from upshift.training.job.request import Job
from upshift.training.job.server import job_server

SHARED: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "zero1": (2, {"fully_shard": "optimizer", "shard_size": 2}),
    "masters": (2, {"fully_shard": "optimizer", "shard_size": 2, "master_weights": True}),
    "zero3": (2, {"fully_shard": "weights", "shard_size": 2}),
    "hybrid": (4, {"fully_shard": "gradients", "shard_size": 2}),
    "tensor": (2, {"tensor_parallel": 2, "sequence_parallel": True}),
    "stages": (2, {"pipeline_parallel": 2}),
    "tensor x zero3": (4, {"tensor_parallel": 2, "sequence_parallel": True, "fully_shard": "weights", "shard_size": 2}),
    "stages x zero1": (4, {"pipeline_parallel": 2, "fully_shard": "optimizer", "shard_size": 2}),
    "virtual stages": (2, {"pipeline_parallel": 2, "pipeline_schedule": "interleaved_1f1b", "virtual_stages": 2}),
}
CHAINS: dict[str, tuple[str, ...]] = {  # a step each
    "fp32": (
        "zero3", "one process", "hybrid", "tensor", "stages", "tensor x zero3", "virtual stages", "stages x zero1", "zero1",
    ),
    "bf16": ("zero3", "masters", "masters", "one process"),  # masters are taken from weights, and from masters
}  # fmt: skip
UPDATED_ON_HOST = ("hybrid", "tensor", "stages x zero1", "masters")


def plan_of(name: str, precision: str = "fp32") -> Plan:
    world, layout = SHARED[name]
    replicas = world // (layout.get("tensor_parallel", 1) * layout.get("pipeline_parallel", 1))
    size = GLOBAL_BATCH // (2 * replicas)
    shared: dict[str, Any] = {"num_processes": world, "layout": layout, "precision": precision}
    shared["optim_offload"] = name in UPDATED_ON_HOST
    return a_plan(**shared, per_device_train_batch_size=size, gradient_accumulation_steps=2)


Run = Callable[[Job, TrainingData], Record]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """``run_job``, each in a child of one process that has imported everything. In test_train.py every job's process imports."""
    with job_server() as server:
        yield lambda job, data: server.run(job, data, lambda event: None)


@pytest.fixture(scope="module")
def tied(home: Path) -> str:  # noqa: F811
    """A model whose head is its embedding, beside the others."""
    config = Qwen2Config(
        hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=4,
        max_position_embeddings=64, vocab_size=320, tie_word_embeddings=True, architectures=["Qwen2ForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(home / "tied")
    AutoTokenizer.from_pretrained(home / "llama").save_pretrained(home / "tied")
    return "tied"


@pytest.mark.parametrize("precision", CHAINS)
def test_every_layout_goes_on_from_every_other(
    precision: str,
    home: Path,  # noqa: F811
    run: Run,
    prepared: Callable[[str], TrainingData],  # noqa: F811
    tied: str,
    tmp_path: Path,  # noqa: F811
) -> None:
    chain, ours, theirs = CHAINS[precision], tmp_path / "ours", tmp_path / "theirs"
    steps, alone = len(chain), plan_of("one process", precision)
    undisturbed = run(a_job(home, theirs, model=tied, plan=alone, max_steps=steps), prepared(tied))
    expected = curve(undisturbed)
    for step, name in enumerate(chain):
        job = a_job(
            home, ours, model=tied, plan=plan_of(name, precision), max_steps=steps, save_steps=1, resume=step > 0,
            stop_after_tokens=int(expected[step][0]),
        )  # fmt: skip
        record = run(job, prepared(tied))
        assert record.details["resumed_from_step"] == step
        newest = newest_checkpoint(ours)
        assert newest is not None and newest.name == f"checkpoint-{step + 1}"
        assert any(newest.glob("pieces-*.json")) is (name != "one process")
    found = curve(record)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    differences = [abs(one - other) for (_, one), (_, other) in zip(found, expected, strict=True)]
    print(precision, [f"{difference:.1e}" for difference in differences])
    assert max(differences) < (1e-5 if precision == "fp32" else 1e-3)
    one, other = (load_file(folder / "model.safetensors") for folder in (ours, theirs))
    assert one.keys() == other.keys()
    # AdamW moves a weight by the learning rate, 3e-3, whichever way its gradient points: in bf16 small ones differ in sign.
    assert all(torch.allclose(one[name], other[name], atol=1e-5 if precision == "fp32" else 2e-2) for name in other)
    model, info = AutoModelForCausalLM.from_pretrained(ours, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and model.config.tie_word_embeddings


def test_the_same_layout_goes_on_bit_for_bit(
    home: Path,  # noqa: F811
    run: Run,
    prepared: Callable[[str], TrainingData],  # noqa: F811
    tmp_path: Path,  # noqa: F811
) -> None:
    """With dropout: every rank's random numbers go on."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    straight = run(a_job(home, whole, model="gpt2", plan=plan_of("zero3"), max_steps=4), prepared("gpt2"))
    stop = int(curve(straight)[1][0])
    options: dict[str, Any] = {"model": "gpt2", "plan": plan_of("zero3"), "max_steps": 4, "save_steps": 2}
    run(a_job(home, parts, stop_after_tokens=stop, **options), prepared("gpt2"))
    resumed = run(a_job(home, parts, resume=True, **options), prepared("gpt2"))
    assert resumed.details["resumed_from_step"] == 2
    assert curve(resumed) == curve(straight)
    one, other = (load_file(folder / "model.safetensors") for folder in (whole, parts))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_checkpoint_without_one_rank_does_not_count(
    home: Path,  # noqa: F811
    run: Run,
    prepared: Callable[[str], TrainingData],  # noqa: F811
    tied: str,
    tmp_path: Path,  # noqa: F811
) -> None:
    job = a_job(home, tmp_path, model=tied, plan=plan_of("zero3"), max_steps=2, save_steps=1)
    run(job, prepared(tied))
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    (tmp_path / "checkpoint-2" / "optimizer-00001.safetensors").unlink()
    newest = newest_checkpoint(tmp_path)
    assert newest is not None and newest.name == "checkpoint-1"
    assert AutoTokenizer.from_pretrained(newest) and not list(tmp_path.glob("*.tmp"))
    with pytest.raises(RequestError, match="resume with the optim"):
        other = plan_of("zero1").changed(optim="sgd")
        run(job.changed(plan=other.model_dump(), resume=True), prepared(tied))


def test_parts_of_parts() -> None:
    """Both halves of a packed weight, divided by columns, become rows of the whole."""
    whole = torch.arange(96.0).view(8, 12)
    packed = Piece(shape=(8, 12), kept={0: ((0, 2), (4, 6))})
    other = Piece(shape=(8, 12), kept={0: ((2, 4), (6, 8))})
    rows = Piece(shape=(8, 12), kept={0: ((1, 7),), 1: ((3, 9),)})
    target = torch.zeros(6, 6)
    stored = [(torch.cat([whole[0:2], whole[4:6]]), packed), (torch.cat([whole[2:4], whole[6:8]]), other)]
    assert sum(copy_overlap(target, rows, source, piece) for source, piece in stored) == rows.numel == 36
    assert torch.equal(target, whole[1:7, 3:9])


@pytest.mark.parametrize("layout", ["zero3", "stages"])
def test_ranks_that_share_a_model_agree_on_the_end_and_the_best(
    layout: str,
    home: Path,  # noqa: F811
    prepared: Callable[[str], TrainingData],  # noqa: F811
    run: Run,
    tied: str,
    tmp_path: Path,  # noqa: F811
) -> None:
    """The first step has a learning rate of 0, and the next ones such a high one that the loss only rises."""
    options = {"eval_steps": 1, "load_best": True, "early_stopping_patience": 2, "learning_rate": 5.0, "warmup_steps": 3}
    job = a_job(home, tmp_path / "run", model=tied, plan=plan_of(layout), max_steps=9, **options)
    record = run(job, prepared(tied))
    assert [record.details[name] for name in ("steps", "model_step", "end")] == [3, 1, "early stopping"]
    losses = [loss for _, loss in record.details["evaluations"]]
    assert record.measured and record.measured.evaluation_loss == losses[0] < min(losses[1:]) - 1
    assert held_out_loss(tmp_path / "run", prepared(tied)) == pytest.approx(losses[0], abs=1e-4)
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-1"]
