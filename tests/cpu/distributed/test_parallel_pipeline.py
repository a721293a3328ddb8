"""Ranks that share the layers by depth train as one process does: every schedule, kind of model and of batch."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from parallel_runs import Case, Result, a_config, assert_as_one_process, run, with_references
from transformers import (
    ElectraConfig,
    Gemma3TextConfig,
    GraniteConfig,
    MambaConfig,
    MPNetConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
    T5Config,
)
from warm_processes import WarmProcesses

from upshift.errors import RequestError
from upshift.models.build import build_model, choose_class
from upshift.planning.layout import Layout
from upshift.planning.plan import Plan
from upshift.planning.search.constraints import conflict
from upshift.training.distributed.parallelize import why_cannot_run
from upshift.training.distributed.pipeline_stage import Stage, bind_stage, find_split

DECAY = {"weight_decay": 10.0, "max_steps": 5}
TWO = {"pipeline_parallel": 2}
SEQUENCE = {"tensor_parallel": 2, "sequence_parallel": True}
SCHEDULES = {
    "gpipe": {"pipeline_schedule": "gpipe"},
    "1f1b": {},
    "interleaved": {"pipeline_schedule": "interleaved_1f1b", "virtual_stages": 2},
    "zero bubble": {"pipeline_schedule": "zero_bubble"},
}
MODELS = ("qwen2 tied", "gpt2", "bert", "mixture", "opt", "bloom", "gpt neox", "phi3")


def least_layers(schedule: dict[str, Any]) -> int:
    return 2 * schedule.get("virtual_stages", 1)


CASES = {
    **{f"llama {name}": Case(world=2, layout=TWO | schedule, layers=4) for name, schedule in SCHEDULES.items()},
    **{f"{model} 1f1b": Case(model, 2, TWO) for model in MODELS},
    "layers of two kinds": Case("gemma2", 2, TWO, {"attention": "eager"}, layers=4),
    **{
        f"packed {name}": Case("qwen2 tied", 2, TWO | schedule, {"packing": True}, layers=least_layers(schedule))
        for name, schedule in SCHEDULES.items()
    },
    "bf16": Case(world=2, layout=TWO, plan={"precision": "bf16"}),
    "bf16 weights": Case(world=2, layout=TWO, plan={"precision": "bf16-weights"}),
    "bf16 zero bubble": Case(world=2, layout=TWO | SCHEDULES["zero bubble"], plan={"precision": "bf16"}),
    "recomputed": Case(world=2, layout=TWO, plan={"activation_checkpointing": 3}, layers=4),
    "recomputed interleaved": Case(
        world=2, layout=TWO | SCHEDULES["interleaved"], plan={"activation_checkpointing": 3}, layers=4
    ),
    "chunked loss": Case("qwen2 tied", 2, TWO, {"loss_chunk_tokens": 16}),
    "bf16 weights, tied": Case("qwen2 tied", 2, TWO, {"precision": "bf16-weights"}),
    "weights that no rank uses in some steps": Case(world=2, layout=TWO, options=DECAY, steps=5, skips=(0, 2, 3)),
    "one micro-batch": Case(world=2, layout=TWO, micro_batch=8),
    "four stages": Case("qwen2 tied", 4, {"pipeline_parallel": 4}, layers=4),
    **{
        f"{name} x {other} {model}": Case(model, 4, TWO | schedule | layout, micro_batch=1, layers=least_layers(schedule))
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
def results(tmp_path_factory: pytest.TempPathFactory, warm_processes: WarmProcesses) -> Mapping[str, Result]:
    return run(with_references(CASES), tmp_path_factory.mktemp("pipeline"), warm_processes.run)


@pytest.mark.parametrize("name", CASES)
def test_stages_train_as_one_process(name: str, results: Mapping[str, Result]) -> None:
    assert_as_one_process(name, CASES[name], results)


SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 97, "intermediate_size": 64}
DRY = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
APART: dict[str, PretrainedConfig] = {
    "scaled embeddings": GraniteConfig(**SIZES, num_key_value_heads=2, embedding_multiplier=3.0, logits_scaling=2.0),
    "projected embeddings": OPTConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, vocab_size=97, ffn_dim=64, word_embed_proj_dim=16,
        max_position_embeddings=64, dropout=0.0,
    ),
    "layers of two kinds": Gemma3TextConfig(
        **SIZES, num_key_value_heads=2, head_dim=8, sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
    ),
    "masked": ElectraConfig(**SIZES, **DRY, embedding_size=16, max_position_embeddings=64, architectures=["ElectraForMaskedLM"]),
    "no attention": MambaConfig(hidden_size=32, num_hidden_layers=4, vocab_size=97, state_size=4),
}  # fmt: skip


def a_model(config: PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    return build_model(config, choose_class(config, "test")[0], dtype=torch.float32)


@pytest.mark.parametrize("name", APART)
def test_stages_are_the_model(name: str) -> None:
    """One after the other, in one process: the same loss, gradients and names of weights."""
    model = a_model(APART[name])
    ids = torch.randint(3, 97, (2, 16), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 10:] = 0
    given = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100), "use_cache": False}
    whole = copy.deepcopy(model)
    loss = whole(**given).loss
    loss.backward()
    parts = find_split(model)
    first, last = (
        bind_stage(one, Stage(one, parts, number, 2, None)) for number, one in enumerate((model, copy.deepcopy(model)))
    )
    sent = first(**given)
    received = sent.detach().requires_grad_()
    last.pipeline_stage.received = received
    ours = last(**given).loss
    ours.backward()
    sent.backward(received.grad)
    assert float(ours) == pytest.approx(float(loss), abs=1e-6)
    found = [(name, weight) for stage in (first, last) for name, weight in stage.named_parameters()]
    tied, in_first = set(last.pipeline_stage.tied_names), first.pipeline_stage.tied_names
    for name, weight in whole.named_parameters():
        gradients = [one.grad for other, one in found if other == name or (name in in_first and other in tied)]
        assert torch.allclose(sum(gradients), weight.grad, atol=1e-6), name


def a_pipeline(ranks: int = 2, **choices: Any) -> Plan:
    plain = {"device": "cpu", "host": "test", "model": "test", "sequence_length": 32, "per_device_train_batch_size": 1}
    layout = {"pipeline_parallel": ranks} | {name: choices.pop(name) for name in list(choices) if name in Layout.model_fields}
    return Plan(**plain, gradient_accumulation_steps=4, num_processes=ranks, layout=Layout(**layout), **choices)


def test_what_does_not_come_apart_is_told_before_launch() -> None:
    t5 = T5Config(d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4, vocab_size=97, decoder_start_token_id=0)
    llama, mixture = (a_model(a_config(name)) for name in ("llama", "mixture"))
    assert why_cannot_run(a_pipeline(), llama) is None
    assert "2 (encoder.block, decoder.block); use fully_shard=weights" in str(why_cannot_run(a_pipeline(), a_model(t5)))
    assert "does not divide 4 layers; stages times ranks can be 2, 4" in str(why_cannot_run(a_pipeline(3), llama))
    mixture.config.output_router_logits = True
    assert "output_router_logits" in str(why_cannot_run(a_pipeline(), mixture))
    assert "use torch_compile=layer" in str(why_cannot_run(a_pipeline(torch_compile="model"), llama))
    relative = a_model(MPNetConfig(**SIZES, **DRY, max_position_embeddings=64, architectures=["MPNetForMaskedLM"]))
    with pytest.raises(RequestError, match=r"mpnet.encoder.layer take more .* than hidden states.*use fully_shard=weights"):
        find_split(relative)


@pytest.mark.parametrize(
    "choices",
    [{"fully_shard": "weights"}, {"fully_shard": "optimizer", "master_weights": True, "precision": "bf16"},
     {"loss_chunk_tokens": 8}, {"torch_compile": "layer"}],
    ids=str,
)  # fmt: skip
def test_what_zero_bubble_cannot_split(choices: dict[str, Any]) -> None:
    plan = a_pipeline(**choices, pipeline_schedule="zero_bubble")
    assert "use pipeline_schedule=1f1b" in str(conflict(plan, clips_gradients=True))
    plain = plan.changed(layout=plan.layout.model_copy(update={"pipeline_schedule": "1f1b"}))
    assert conflict(plain, clips_gradients=True) is None
