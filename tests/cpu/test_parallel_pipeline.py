"""Ranks that share the layers by depth train as one process does: every schedule, kind of model and of batch."""

from __future__ import annotations

import pytest
from parallel_runs import Case, Result, reference_name, run, with_references

TWO = {"pipeline_parallel": 2}
SEQUENCE = {"tensor_parallel": 2, "sequence_parallel": True}
SCHEDULES = {
    "gpipe": {"pipeline_schedule": "gpipe"},
    "1f1b": {},
    "interleaved": {"pipeline_schedule": "interleaved_1f1b", "virtual_stages": 2},
    "zero bubble": {"pipeline_schedule": "zero_bubble"},
}
MODELS = ("qwen2 tied", "gpt2", "bert", "mixture", "opt", "bloom", "gpt neox", "phi3")
CASES = {
    **{f"llama {name}": Case(world=2, layout=TWO | schedule) for name, schedule in SCHEDULES.items()},
    **{f"{model} 1f1b": Case(model, 2, TWO) for model in MODELS},
    "layers of two kinds": Case("gemma2", 2, TWO, {"attention": "eager"}),
    **{f"packed {name}": Case("qwen2 tied", 2, TWO | schedule, {"packing": True}) for name, schedule in SCHEDULES.items()},
    "bf16": Case(world=2, layout=TWO, plan={"precision": "bf16"}),
    "bf16 weights": Case(world=2, layout=TWO, plan={"precision": "bf16-weights"}),
    "bf16 zero bubble": Case(world=2, layout=TWO | SCHEDULES["zero bubble"], plan={"precision": "bf16"}),
    "recomputed": Case(world=2, layout=TWO, plan={"activation_checkpointing": 3}),
    "recomputed interleaved": Case(world=2, layout=TWO | SCHEDULES["interleaved"], plan={"activation_checkpointing": 3}),
    "recomputed zero bubble": Case(world=2, layout=TWO | SCHEDULES["zero bubble"], plan={"activation_checkpointing": 4}),
    "chunked loss": Case("qwen2 tied", 2, TWO, {"loss_chunk_tokens": 16}),
    "one micro-batch": Case(world=2, layout=TWO, micro_batch=8),
    "four stages": Case("qwen2 tied", 4, {"pipeline_parallel": 4}),
    **{
        f"{name} x {other} {model}": Case(model, 4, TWO | schedule | layout, micro_batch=1)
        for model, name, schedule, other, layout in (
            ("qwen2 tied", "1f1b", {}, "data", {}),
            ("llama", "interleaved", SCHEDULES["interleaved"], "data", {}),
            ("qwen2 tied", "1f1b", {}, "zero1", {"fully_shard": "optimizer", "shard_size": 2}),
            ("qwen2 tied", "1f1b", {}, "zero2", {"fully_shard": "gradients", "shard_size": 2}),
            ("qwen2 tied", "1f1b", {}, "zero3", {"fully_shard": "weights", "shard_size": 2}),
            ("gpt2", "1f1b", {}, "zero3", {"fully_shard": "weights", "shard_size": 2}),
            ("llama", "gpipe", SCHEDULES["gpipe"], "zero3", {"fully_shard": "weights", "shard_size": 2}),
            ("llama", "interleaved", SCHEDULES["interleaved"], "zero3", {"fully_shard": "weights", "shard_size": 2}),
            ("llama", "zero bubble", SCHEDULES["zero bubble"], "zero2", {"fully_shard": "gradients", "shard_size": 2}),
            ("llama", "1f1b", {}, "tensor", {"tensor_parallel": 2}),
            ("qwen2 tied", "1f1b", {}, "sequence", SEQUENCE),
            ("qwen2 tied", "interleaved", SCHEDULES["interleaved"], "sequence", SEQUENCE),
            ("llama", "zero bubble", SCHEDULES["zero bubble"], "tensor", {"tensor_parallel": 2}),
            ("mixture", "1f1b", {}, "experts", {"expert_parallel": 2}),
            ("llama", "1f1b", {}, "ulysses", {"context_parallel": 2, "context_kind": "ulysses"}),
        )
    },
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    return run(with_references(CASES), tmp_path_factory.mktemp("pipeline"))


@pytest.mark.parametrize("name", CASES)
def test_stages_train_as_one_process(name: str, results: dict[str, Result]) -> None:
    case = CASES[name]
    ours, theirs = results[name], results[reference_name(case)]
    print(f"{name}: loss {ours.difference(theirs):.1e}, norm {ours.norm_difference(theirs):.1e}, holds {ours.held:.3f}")
    fp32 = case.plan.get("precision", "fp32") == "fp32"
    assert ours.difference(theirs) < (1e-5 if fp32 else 1e-3)
    assert ours.norm_difference(theirs) < (1e-4 if fp32 else 2e-2)
