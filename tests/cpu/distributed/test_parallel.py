"""Ranks that share a model train as one process does: every layout of data-parallel ranks, against the loss of one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from fatal_runs import Ending, run_fatal
from parallel_runs import Case, Result, assert_as_one_process, reference_name, run, with_references
from warm_processes import WarmProcesses

ZERO2, ZERO3 = ({"fully_shard": what, "shard_size": 2} for what in ("gradients", "weights"))
BF16 = {"precision": "bf16"}
ZERO1 = {"fully_shard": "optimizer", "shard_size": 2}
MODELS = ("llama", "qwen2 tied", "gpt2", "bert", "t5", "mixture", "opt")
HELD_OUT = ("gpt neox", "bloom", "phi3", "electra", "whole experts")  # nothing was made with these in mind
DECAY = {"weight_decay": 10.0}  # so much that a weight shows it that has no gradient
FIVE_STEPS = DECAY | {"max_steps": 5}
UNUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # layout and plan
    "zero1": (ZERO1, {}),
    "zero1 with master weights": (ZERO1 | {"master_weights": True}, BF16),
    "zero2": (ZERO2, {}),
    "zero3, recomputed": (ZERO3, {"activation_checkpointing": 4}),
    "context": ({"context_parallel": 2, "context_kind": "ulysses"}, {}),
}
LOSSES = {  # the difference allowed, where it is not the precision's own
    # Hidden states between layers are in bf16 where weights are gathered so, and T5 does not scale its attention: autocast alone
    # takes its loss 1.4e-3 from that of fp32.
    "zero3 bf16 t5": 5e-3,
    "weights that no rank uses in some steps, zero1 with master weights": 3e-4,  # 6.8e-4 if they were decayed
}
CASES = {
    "data parallel": Case(world=2),
    "weights that no rank uses": Case("opt without layers", world=2, options=DECAY),
    "weights that no rank uses, overlapped": Case("opt without layers", world=2, options=DECAY, overlapped=True),
    "weights that no rank uses in some steps, overlapped": Case(
        world=2, options=FIVE_STEPS, steps=5, layers=4, skips=(0, 2, 3), overlapped=True
    ),
    **{
        f"weights that no rank uses in some steps, {name}": Case(
            world=2, layout=layout, plan=plan, options=FIVE_STEPS, steps=5, layers=4, skips=(0, 2, 3)
        )
        for name, (layout, plan) in UNUSED.items()
    },
    **{f"zero3 {model}": Case(model, 2, ZERO3) for model in MODELS},
    **{f"zero3 {model}": Case(model, 2, ZERO3) for model in HELD_OUT},
    **{f"zero3 {model}": Case(model, 2, ZERO3, {"attention": "eager"}) for model in ("gemma2", "mamba")},
    "zero3, recomputed, loss in chunks, packed": Case(
        world=2, layout=ZERO3, plan={"activation_checkpointing": 1, "loss_chunk_tokens": 16, "packing": True}
    ),
    "zero2, recomputed selectively": Case(
        world=2, layout=ZERO2, plan={"activation_checkpointing": 2, "recompute_granularity": "selective"}
    ),
    # FSDP rounds weights to bf16 before fp8 does, one process does not. While weights stay, norms agree to 4e-3 at every step;
    # with AdamW, whose first updates are signs, the two trainings part: 3e-3 at the third step, 2e-2 at the fourth.
    "zero3 fp8": Case(world=2, layout=ZERO3, plan={"precision": "fp8"}),
    "zero3 fp8, weights stay": Case(world=2, layout=ZERO3, plan={"precision": "fp8"}, options={"learning_rate": 1e-9}),
    "zero3 sgd": Case(world=2, layout=ZERO3, plan={"optim": "sgd", "optim_args": "momentum=0.9"}),
    "zero3, adapter": Case(world=2, layout=ZERO3, plan=BF16, adapter=True),
    "zero1, adapter": Case(world=2, layout=ZERO1, plan=BF16, adapter=True),
    "overlapped": Case("qwen2 tied", world=2, overlapped=True),
    "overlapped bert of 4": Case("bert", world=4, overlapped=True, micro_batch=1),
    **{
        f"zero3 bf16 {model}": Case(model, 2, ZERO3, BF16, options={"learning_rate": 1e-3})
        for model in MODELS
        if model != "llama"
    },
    "zero1": Case(world=2, layout=ZERO1),
    "zero1 qwen2 tied, fused": Case("qwen2 tied", world=2, layout=ZERO1, plan={"optim": "adamw_torch_fused"}),
    "hybrid zero1 of t5": Case("t5", world=4, layout=ZERO1, micro_batch=1),
    "zero1 bf16": Case(world=2, layout=ZERO1, plan=BF16),
    "zero1 with master weights": Case(world=2, layout=ZERO1 | {"master_weights": True}, plan=BF16),
    "zero3 bf16 weights": Case(world=2, layout=ZERO3, plan={"precision": "bf16-weights"}),
    "zero3 fp16": Case(world=2, layout=ZERO3, plan={"precision": "fp16"}),
    "zero2": Case(world=2, layout=ZERO2),
    "zero3 of 4": Case(world=4, layout=ZERO3 | {"shard_size": 4}, micro_batch=1),
    "hybrid": Case(world=4, layout=ZERO3, micro_batch=1),
    "hybrid zero2": Case(world=4, layout=ZERO2, micro_batch=1),
    "zero3 bf16": Case(world=2, layout=ZERO3, plan=BF16),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, warm_processes: WarmProcesses) -> Mapping[str, Result]:
    assert not CASES.keys() & OUT_OF_MEMORY.keys()
    return run(with_references(CASES | OUT_OF_MEMORY), tmp_path_factory.mktemp("parallel"), warm_processes.run)


@pytest.mark.parametrize("name", CASES)
def test_a_layout_trains_as_one_process(name: str, results: Mapping[str, Result]) -> None:
    case = CASES[name]
    stage = case.layout.get("fully_shard", "no")
    ours, theirs = results[name], results[reference_name(case)]
    assert_as_one_process(name, case, results, loss=LOSSES.get(name))
    divided = 1 / case.layout.get("shard_size", 1)
    assert ours.held == pytest.approx(divided if stage in ("gradients", "weights") else 1.0, rel=0.1)
    assert ours.state == pytest.approx(theirs.state * divided, rel=0.1)


OUT_OF_MEMORY = {
    "plain": Case(world=2, fails={"rank": 1, "step": 1, "tokens": 40}),
    "at first": Case(world=2, layout=ZERO3, fails={"rank": 1, "step": 0, "tokens": 40}),
    "twice": Case(world=2, layout=ZERO3, fails={"rank": 0, "step": 2, "tokens": 40}, micro_batch=4),
    "in a backward pass": Case(world=2, layout=ZERO3, fails={"rank": 1, "step": 1, "tokens": 40, "where": "backward"}),
    "zero2, in the second micro-batch": Case(
        world=2, layout=ZERO2, lengths="equal", fails={"rank": 1, "step": 1, "tokens": 40, "micro_batch": 1}
    ),
    "hybrid, in a backward pass": Case(world=4, layout=ZERO3, fails={"rank": 2, "step": 1, "tokens": 40, "where": "backward"}),
    "overlapped, in a forward pass": Case(world=2, overlapped=True, fails={"rank": 1, "step": 1, "tokens": 40}),
    "overlapped, in a backward pass": Case(
        world=2,
        overlapped=True,
        lengths="equal",
        fails={"rank": 1, "step": 1, "tokens": 40, "micro_batch": 1, "where": "backward"},
    ),
    "zero1, on the first rank": Case(world=2, layout=ZERO1, fails={"rank": 0, "step": 1, "tokens": 40}),
    **{
        f"{name}, without gradients{' of rated answers' * rated}": Case(
            world=2,
            layout=layout,
            overlapped=name == "overlapped",
            rated=rated,
            micro_batch=4 if rated else 2,
            fails={"rank": rank, "step": 2, "tokens": 40, "where": "no gradients"},
        )
        for name, layout, rank in (("plain", {}, 0), ("overlapped", {}, 0), ("zero3", ZERO3, 1), ("zero2", ZERO2, 0))
        for rated in (False, True)
    },
    **{
        f"{name}, in the second micro-batch without gradients": Case(
            world=2, layout=layout, fails={"rank": 1, "step": 2, "tokens": 30, "where": "no gradients", "micro_batch": 1}
        )
        for name, layout in (("zero3", ZERO3), ("zero2", ZERO2))
    },
}


@pytest.mark.parametrize("name", OUT_OF_MEMORY)
def test_out_of_memory_on_one_rank_changes_micro_batches_and_nothing_else(name: str, results: Mapping[str, Result]) -> None:
    case = OUT_OF_MEMORY[name]
    ours, theirs = results[name], results[reference_name(case)]
    print(f"{name}: loss {ours.difference(theirs):.1e}, {ours.halvings} halvings")
    assert ours.difference(theirs) < 1e-5
    if case.fails.get("where") == "no gradients":
        assert (ours.halvings, ours.halvings_without_gradients) == (0, 1)  # training keeps its micro-batches
        return
    waits = case.layout.get("fully_shard") in ("gradients", "weights") or name == "overlapped, in a backward pass"
    assert ours.halvings == (2 if name == "twice" else 1 if waits or case.fails["rank"] == 0 else 0)


TENSOR, PIPELINE = {"tensor_parallel": 2}, {"pipeline_parallel": 2}
OUT_FOR_GOOD = {  # ranks that wait for each other in the middle of a layer, a sequence or a pipeline
    "tensor": Case(world=2, layout=TENSOR, fails={"rank": 1, "step": 1, "tokens": 4}),
    "context, in a backward pass": Case(
        world=2,
        layout={"context_parallel": 2, "context_kind": "ulysses"},
        fails={"rank": 1, "step": 0, "tokens": 4, "where": "backward"},
    ),
    "pipeline": Case(world=2, layout=PIPELINE, fails={"rank": 1, "step": 1, "tokens": 4}),
    "experts, on the first rank": Case(
        "mixture", world=2, layout={"expert_parallel": 2}, fails={"rank": 0, "step": 0, "tokens": 4}
    ),
    "experts": Case("mixture", world=2, layout={"expert_parallel": 2}, fails={"rank": 1, "step": 0, "tokens": 4}),
    "tensor and pipeline": Case(world=4, layout=TENSOR | PIPELINE, fails={"rank": 3, "step": 1, "tokens": 4}),
}


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory, warm_processes: WarmProcesses) -> dict[str, Ending]:
    return run_fatal(OUT_FOR_GOOD, tmp_path_factory.mktemp("fatal"), warm_processes.run)


@pytest.mark.parametrize("name", OUT_FOR_GOOD)
def test_out_of_memory_on_one_rank_ends_all_with_its_words(name: str, endings: dict[str, Ending]) -> None:
    case, ending = OUT_FOR_GOOD[name], endings[name]
    print(f"{name}: {ending.seconds:.1f} s, {ending.left} left: {ending.words}")
    assert ending.words.startswith(f"rank {case.fails['rank']} of {case.world} ran out of memory (made up by the test); ")
    assert "upshift plan" in ending.words
    assert (ending.kind, ending.left) == ("JobFailed", 0)
    assert ending.seconds < 120  # and not the half hour that gloo waits
