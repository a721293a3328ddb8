"""Ranks on pretended GPUs, which exchange tensors by NCCL's rules, train in every layout as one GPU does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from parallel_runs import Case, Result, assert_as_one_process, reference_name, run, with_references
from pretended_gpus import Run

BF16 = {"precision": "bf16"}
SLOWER = {"learning_rate": 1e-3}
ZERO3 = {"fully_shard": "weights", "shard_size": 2}
ZERO2 = {"fully_shard": "gradients", "shard_size": 2}
ZERO1 = {"fully_shard": "optimizer", "shard_size": 2}
ULYSSES = {"context_parallel": 2, "context_kind": "ulysses"}
TENSOR = {"tensor_parallel": 2}
PIPELINE = {"pipeline_parallel": 2}
CASES = {
    "data parallel": Case(world=2),
    "data parallel, overlapped, tied": Case("qwen2 tied", world=2, overlapped=True),
    "zero1": Case(world=2, layout=ZERO1),
    "zero1 bf16 with master weights": Case(world=2, layout=ZERO1 | {"master_weights": True}, plan=BF16),
    "zero2, recomputed": Case(world=2, layout=ZERO2, plan={"activation_checkpointing": 1}),
    "zero3": Case(world=2, layout=ZERO3),
    "zero3 bf16": Case(world=2, layout=ZERO3, plan=BF16),
    "zero3, activations on the host": Case(world=2, layout=ZERO3, plan={"activation_offload": True}, lengths="equal"),
    "zero3 of t5": Case("t5", world=2, layout=ZERO3),
    "tensor": Case(world=2, layout=TENSOR),
    "tensor bf16": Case(world=2, layout=TENSOR, plan=BF16, options=SLOWER),
    "sequence, tied": Case("qwen2 tied", world=2, layout=TENSOR | {"sequence_parallel": True}),
    "pipeline": Case(world=2, layout=PIPELINE),
    "gpipe bf16": Case(world=2, layout=PIPELINE | {"pipeline_schedule": "gpipe"}, plan=BF16, options=SLOWER),
    "zero bubble": Case(world=2, layout=PIPELINE | {"pipeline_schedule": "zero_bubble"}),
    "ulysses": Case(world=2, layout=ULYSSES),
    "experts": Case("mixture", world=2, layout={"expert_parallel": 2}),
    "hybrid": Case(world=4, layout=ZERO3, micro_batch=1),
    "zero3 x tensor": Case(world=4, layout=ZERO3 | TENSOR),
    "zero3 x experts": Case("mixture", world=4, layout=ZERO3 | {"shard_size": 4, "expert_parallel": 2}, micro_batch=1),
    "tensor x pipeline": Case(world=4, layout=TENSOR | PIPELINE),
    "zero2 of 2 x tensor x ulysses, eight ranks": Case(world=8, layout=ZERO2 | TENSOR | ULYSSES | {"shard_size": 4}, steps=2),
}
CASES = {name: replace(case, device="cuda") for name, case in CASES.items()}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, run_on_gpus: Run) -> Mapping[str, Result]:
    script = str(Path(__file__).with_name("gpu_ranks.py"))
    folder = tmp_path_factory.mktemp("layouts")
    return run(with_references(CASES), folder, lambda _, *given: run_on_gpus("8xh100", script, *given))


@pytest.mark.parametrize("name", CASES)
def test_a_layout_of_gpus_trains_as_one_gpu(name: str, results: Mapping[str, Result]) -> None:
    assert_as_one_process(name, CASES[name], results)


def test_all_activations_and_no_weights_go_to_the_host(results: Mapping[str, Result]) -> None:
    """A rank of two has micro-batches as large as one GPU's, and gathers each layer's weights into memory that others had."""
    name = "zero3, activations on the host"
    alone = results[reference_name(CASES[name])]
    assert results[name].pinned == alone.pinned > 0
