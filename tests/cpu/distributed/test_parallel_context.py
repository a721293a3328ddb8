"""Ranks that share every sequence train as one process does; padding, windows and packed sequences stay where they were."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from parallel_runs import Case, Result, a_config, a_plan, assert_as_one_process, in_two_micro_batches, run, with_references
from warm_processes import WarmProcesses

from upshift.models.build import build_model, choose_class
from upshift.training.distributed.parallelize import why_cannot_run

ULYSSES = {"context_parallel": 2, "context_kind": "ulysses"}
MODELS = ("llama", "qwen2 tied", "gpt2", "bert", "mixture", "opt", "gpt neox", "phi3")
PACKED = {"packing": True}
CASES = {
    **{model: Case(model, 2, ULYSSES) for model in MODELS},
    "eager gemma2": Case("gemma2", 2, ULYSSES, {"attention": "eager"}),  # windows, capped scores
    "packed llama": Case(world=2, layout=ULYSSES, plan=PACKED),
    "packed blocks": Case("qwen2 tied", 2, ULYSSES, PACKED | {"attention": "block"}),
    "recomputed, chunked loss": Case(world=2, layout=ULYSSES, plan={"activation_checkpointing": 2, "loss_chunk_tokens": 16}),
    "bf16": Case(world=2, layout=ULYSSES, plan={"precision": "bf16"}),
    "zero3": Case(world=2, layout=ULYSSES | {"fully_shard": "weights", "shard_size": 2}),
    "of 4, fewer key heads": Case(world=4, layout=ULYSSES | {"context_parallel": 4}),
    "x data parallel": Case("gpt2", 4, ULYSSES),
    "x zero3": Case(world=4, layout=ULYSSES | {"fully_shard": "weights", "shard_size": 4}),
    "x tensor": Case("qwen2 tied", 4, ULYSSES | {"tensor_parallel": 2}),
    "x tensor, sequence": Case(world=4, layout=ULYSSES | {"tensor_parallel": 2, "sequence_parallel": True}, plan=PACKED),
    "x experts": Case("mixture", 4, ULYSSES | {"expert_parallel": 4}),
    "x zero2, hybrid, packed": Case(world=4, layout=ULYSSES | {"fully_shard": "gradients", "shard_size": 2}, plan=PACKED),
}
CASES = {name: in_two_micro_batches(case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, warm_processes: WarmProcesses) -> Mapping[str, Result]:
    return run(with_references(CASES), tmp_path_factory.mktemp("context"), warm_processes.run)


@pytest.mark.parametrize("name", CASES)
def test_ranks_that_share_sequences_train_as_one_process(name: str, results: Mapping[str, Result]) -> None:
    assert_as_one_process(name, CASES[name], results)


REFUSED = {
    "t5": ({}, {}, "an encoder and a decoder have sequences of different lengths; use fully_shard"),
    "bloom": ({}, {}, "its attention is not behind transformers' attention interface; use fully_shard"),
    "llama": ({"context_parallel": 3}, {}, "divides the model's 4 attention heads; use 2, 4, or fully_shard"),
    "qwen2 tied": ({"context_kind": "ring"}, {}, "use context_kind=ulysses"),
    "gpt2": ({}, {"attention": "flash_attention_2", "precision": "bf16"}, "use attention=sdpa"),
    "opt": ({}, {"torch_compile": "model"}, "use torch_compile=layer"),
}


@pytest.mark.parametrize("model", REFUSED)
def test_what_cannot_share_sequences_is_refused_in_words(model: str) -> None:
    layout, plan, words = REFUSED[model]
    shared = ULYSSES | layout
    config = a_config(model)
    built = build_model(config, choose_class(config, model)[0], dtype=torch.float32)
    reason = why_cannot_run(a_plan(Case(model, shared["context_parallel"], shared, plan)), built)
    assert reason is not None and words in reason
