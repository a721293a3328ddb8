"""Ranks that share the layers by depth train as one process does: every schedule, kind of model and of batch."""

from __future__ import annotations

import pytest
from parallel_runs import Case, Result, reference_name, run, with_references

TWO = {"pipeline_parallel": 2}
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
