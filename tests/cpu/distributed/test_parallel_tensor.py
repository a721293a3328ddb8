"""Ranks that share every layer's matrices, its tokens between them, or its experts train as one process does."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from parallel_runs import Case, Result, assert_as_one_process, in_two_micro_batches, run, with_references
from warm_processes import WarmProcesses

TENSOR = {"tensor_parallel": 2}
SEQUENCE = TENSOR | {"sequence_parallel": True}
EXPERTS = {"expert_parallel": 2}
ZERO3 = {"fully_shard": "weights", "shard_size": 2}
OWN_WORDS = {"vocabulary_parallel": True}
SAVING = {"activation_checkpointing": 1, "recompute_granularity": "selective", "loss_chunk_tokens": 16}
BF16 = {"precision": "bf16"}
EAGER = {"attention": "eager"}
DECAY = {"weight_decay": 10.0, "max_steps": 5}
ZERO1 = {"fully_shard": "optimizer", "shard_size": 2}
DECLARING = {
    "llama": {},
    "qwen2 tied": {},
    "gpt neox": {},
    "gemma2": EAGER,
    "phi3": {},
    "mixture": {},
    "apertus": {},
}
CASES = {
    **{f"tensor {model}": Case(model, 2, TENSOR) for model in ("llama", "qwen2 tied", "mixture")},
    **{f"sequence {model}": Case(model, 2, SEQUENCE, plan) for model, plan in DECLARING.items()},
    "sequence llama4": Case("llama4", 2, SEQUENCE, layers=4),  # the fourth has no positions
    "sequence bf16": Case(world=2, layout=SEQUENCE, plan=BF16),
    "sequence, recomputed, loss in chunks": Case("qwen2 tied", 2, SEQUENCE, plan=SAVING),
    "sequence gathered again": Case(world=2, layout=SEQUENCE | {"gather_again": True}, plan={"optim": "adamw_torch_fused"}),
    "own words": Case("gemma2", 2, SEQUENCE | OWN_WORDS, EAGER),
    "own words, no plan for the embedding": Case("gpt neox", 2, TENSOR | OWN_WORDS),
    "experts": Case("mixture", 2, EXPERTS),
    "experts bf16": Case("mixture", 2, EXPERTS, plan=BF16),
    "experts x zero3": Case("mixture", 2, EXPERTS | ZERO3),
    "weights that no rank uses in some steps": Case(world=2, layout=TENSOR, options=DECAY, steps=5, skips=(0, 2, 3)),
    "tensor x data": Case(world=4, layout=TENSOR),
    "tensor x zero3": Case(world=4, layout=TENSOR | ZERO3),
    "sequence x zero1": Case(world=4, layout=SEQUENCE | ZERO1),
    "sequence x zero2": Case(world=4, layout=SEQUENCE | ZERO3 | {"fully_shard": "gradients"}),
    "sequence x zero3 bf16": Case(world=4, layout=SEQUENCE | ZERO3, plan=BF16),
    "own words x zero3 tied bf16": Case("qwen2 tied", 4, SEQUENCE | OWN_WORDS | ZERO3, plan=BF16),
    "experts x data": Case("mixture", 4, EXPERTS),
    "experts x zero1": Case("mixture", 4, EXPERTS | ZERO1 | {"shard_size": 4}),
    "experts x zero1 bf16": Case("mixture", 2, EXPERTS | ZERO1 | {"master_weights": True}, plan=BF16),
    "experts x zero3 of 4": Case("mixture", 4, EXPERTS | ZERO3 | {"shard_size": 4}),
    "experts x tensor": Case("mixture", 4, EXPERTS | TENSOR),
    "experts x sequence x zero3": Case("mixture", 4, EXPERTS | SEQUENCE | ZERO3),
}  # fmt: skip
CASES = {name: in_two_micro_batches(case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, warm_processes: WarmProcesses) -> Mapping[str, Result]:
    return run(with_references(CASES), tmp_path_factory.mktemp("tensor"), warm_processes.run)


@pytest.mark.parametrize("name", CASES)
def test_a_layout_trains_as_one_process(name: str, results: Mapping[str, Result]) -> None:
    assert_as_one_process(name, CASES[name], results)
