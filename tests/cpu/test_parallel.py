"""Ranks that share a model train as one process does: every layout of data-parallel ranks, against the loss of one process."""

from __future__ import annotations

import pytest
from parallel_runs import Case, Result, reference_name, run, with_references

ZERO2, ZERO3 = ({"fully_shard": what, "shard_size": 2} for what in ("gradients", "weights"))
MODELS = ("llama", "qwen2 tied", "gpt2", "bert", "t5", "mixture", "opt")
CASES = {
    "data parallel": Case(world=2),
    **{f"zero3 {model}": Case(model, 2, ZERO3) for model in MODELS},
    "zero2": Case(world=2, layout=ZERO2),
    "zero3 of 4": Case(world=4, layout=ZERO3 | {"shard_size": 4}, micro_batch=1),
    "hybrid": Case(world=4, layout=ZERO3, micro_batch=1),
    "hybrid zero2": Case(world=4, layout=ZERO2, micro_batch=1),
    "zero3 bf16": Case(world=2, layout=ZERO3, plan={"precision": "bf16"}),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    return run(with_references(CASES), tmp_path_factory.mktemp("parallel"))


@pytest.mark.parametrize("name", CASES)
def test_a_layout_trains_as_one_process(name: str, results: dict[str, Result]) -> None:
    case = CASES[name]
    ours, theirs = results[name], results[reference_name(case)]
    print(f"{name}: loss {ours.difference(theirs):.1e}, norm {ours.norm_difference(theirs):.1e}, holds {ours.held:.3f}")
    fp32 = case.plan.get("precision", "fp32") == "fp32"
    assert ours.difference(theirs) < (1e-5 if fp32 else 1e-3)
    assert ours.norm_difference(theirs) < (1e-4 if fp32 else 2e-2)
    shared = case.layout.get("shard_size", 1)
    assert ours.held == pytest.approx(1 / shared, rel=0.1)
