"""What ranks cannot share is refused in words before a rank starts: the value, why, and what to use instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parallel_runs import CONFIGS, Case, a_config, a_plan

from upshift.models.build import build_model, choose_class
from upshift.training.distributed.parallelize import why_cannot_run

TENSOR = {"tensor_parallel": 2}
EXPERTS = {"expert_parallel": 2}
SHARED = {"fully_shard": "weights", "shard_size": 2}
ODD = {"sequence_length": 31}
WRONG: dict[str, tuple[Case, tuple[str, ...]]] = {
    "no plan": (Case("opt", 2, TENSOR), ("tensor_parallel=2", "declares no tensor-parallel plan", "fully_shard=weights")),
    "a plan for the head alone": (Case("gpt2", 2, TENSOR), ("declares no tensor-parallel plan", "fully_shard=weights")),
    "more ranks than key heads": (Case(world=4, layout={"tensor_parallel": 4}), ("tensor_parallel=4", "divides 2")),
    "tokens that do not divide": (
        Case(world=2, layout=TENSOR | {"sequence_parallel": True}, plan=ODD), ("31", "sequence_parallel=False"),
    ),
    "updates in the backward pass": (
        Case(world=2, layout=TENSOR, plan={"optimizer_in_backward": True}, micro_batch=8), ("optimizer_in_backward=False",),
    ),
    "no experts": (Case(world=2, layout=EXPERTS), ("expert_parallel=2", "declares no expert-parallel plan", "fully_shard")),
    "too few experts": (Case("mixture", 8, {"expert_parallel": 8}, micro_batch=1), ("expert_parallel=8", "4 experts")),
    "too few experts for both": (
        Case("mixture", 8, {"expert_parallel": 4} | TENSOR, micro_batch=1), ("tensor_parallel=2", "4 experts"),
    ),
    "no such degree": (Case(world=4, layout={"tensor_parallel": 3}), ("num_processes=4", "no multiple of the 3 ranks")),
    "among too many": (Case(world=4, layout=SHARED | {"shard_size": 3}), ("shard_size=3", "use one of 2, 4")),
    "among itself": (Case(world=2, layout=SHARED | {"shard_size": 1}), ("shard_size=1", "use one of 2")),
    "masters of what is divided": (
        Case(world=2, layout=SHARED | {"master_weights": True}), ("master_weights", "use optimizer"),
    ),
    "nothing at once": (Case(world=2, layout=SHARED | {"overlap": False}), ("overlap=True",)),
    "updates of whole matrices": (
        Case(world=2, layout=SHARED, plan={"optim": "muon"}), ("optim=muon", "adamw_torch_fused"),
    ),
    "quantized state": (
        Case(world=2, layout=SHARED, plan={"optim": "adamw_torch_8bit"}), ("adamw_torch_8bit", "cannot be saved"),
    ),
    "quantized state of stages": (
        Case(world=2, layout={"pipeline_parallel": 2}, plan={"optim": "adamw_torch_4bit"}),
        ("adamw_torch_4bit", "cannot be saved", "ranks that divide nothing"),
    ),
}  # fmt: skip


def on_meta(model: str) -> Any:
    config = a_config(model)
    with torch.device("meta"):
        return build_model(config, choose_class(config, model)[0], dtype=torch.float32)


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_shared_is_refused_with_the_next_best(name: str) -> None:
    case, words = WRONG[name]
    problem = why_cannot_run(a_plan(case), on_meta(case.model))
    assert problem is not None
    assert all(word in problem for word in words), problem


@pytest.mark.parametrize("model", CONFIGS)
def test_a_model_is_divided_or_refused(model: str) -> None:
    """Never a traceback, whatever it declares."""
    problem = why_cannot_run(a_plan(Case(model, 2, TENSOR | {"sequence_parallel": True})), on_meta(model))
    declares = bool(on_meta(model).config.base_model_tp_plan)
    assert (problem is None) == declares, problem


def test_quantized_weights_are_not_gathered() -> None:
    model = on_meta("llama")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.to(torch.uint8), requires_grad=False)
    problem = why_cannot_run(a_plan(Case(world=2, layout=SHARED)), model)
    assert problem is not None and "fully_shard=optimizer" in problem


@pytest.mark.parametrize(
    ("path", "dtype", "named"),
    [
        ("model.layers.1.mlp", "bfloat16", None),  # a module of its own is sharded on its own
        ("model.layers.1.self_attn.q_proj", "bfloat16", None),
        ("lm_head", "bfloat16", "lm_head.weight"),
        ("model.embed_tokens", "float16", "model.embed_tokens.weight"),
    ],
)
def test_weights_of_two_dtypes_are_not_sharded_together(path: str, dtype: str, named: str | None) -> None:
    model = on_meta("llama")
    model.get_submodule(path).to(getattr(torch, dtype))
    problem = why_cannot_run(a_plan(Case(world=2, layout=SHARED)), model)
    assert (problem is None) if named is None else (problem is not None and named in problem and "use fully_shard=opt" in problem)


def test_a_bias_of_another_dtype_than_its_weight_is_not_sharded() -> None:
    model = on_meta("gpt2")
    bias = model.transformer.h[2].ln_1.bias
    bias.data = bias.data.to(torch.bfloat16)
    problem = why_cannot_run(a_plan(Case("gpt2", 2, SHARED)), model)
    assert problem is not None and "transformer.h.2.ln_1.bias" in problem
    bias.requires_grad_(False)
    assert why_cannot_run(a_plan(Case("gpt2", 2, SHARED)), model) is None
