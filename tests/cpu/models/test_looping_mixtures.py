"""Mixtures whose code loops over the experts that have tokens are planned and train as transformers trains them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils.flop_counter import FlopCounterMode
from transformers import JetMoeConfig, SwitchTransformersConfig, TrainingArguments

import upshift
from upshift.errors import RequestError
from upshift.models.profile import ModelProfile, Variant
from upshift.models.source import find_model
from upshift.models.tracing.fast_fake_mode import fake_mode
from upshift.models.tracing.mixtures import all_tokens_to_one_expert
from upshift.models.tracing.profile_model import profile_model
from upshift.planning.plan import Plan

UNKNOWN = (DynamicOutputShapeException, DataDependentOutputException)  # what a fake tensor raises for its numbers
CONFIGS: dict[str, tuple[str, Any]] = {
    "switch": (
        "SwitchTransformersForConditionalGeneration",
        SwitchTransformersConfig(
            vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=4, num_experts=4,
            num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
            dropout_rate=0.0, router_jitter_noise=0.0, use_cache=False,
        ),
    ),
    "jetmoe": (
        "JetMoeForCausalLM",
        JetMoeConfig(
            vocab_size=96, hidden_size=32, num_hidden_layers=2, num_key_value_heads=4, kv_channels=8, intermediate_size=48,
            max_position_embeddings=128, num_local_experts=4, num_experts_per_tok=2, pad_token_id=0,
        ),
    ),
}  # fmt: skip


def build(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    class_name, config = CONFIGS[name]
    return getattr(transformers, class_name)._from_config(config, **options)


@cache
def profile_of(name: str, folder: Path) -> ModelProfile:
    class_name, config = CONFIGS[name]
    config.architectures = [class_name]
    config.save_pretrained(folder)
    return profile_model(find_model(str(folder)), sequence_length=32, variants=(Variant("fp32", "eager", masked=True),))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_trace_has_the_products_that_the_model_computes(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Counted on real tensors, where every expert has its own tokens. A trace counts causal attention as half."""
    flops = profile_of(name, tmp_path_factory.getbasetemp() / f"mixture {name}").forward_flops
    model = build(name, attn_implementation="eager").eval()
    for batch, length in ((2, 16), (3, 24)):
        ids = torch.randint(2, 96, (batch, length))
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(input_ids=ids, labels=ids)
        causal_share = 2 if name == "jetmoe" else 1
        traced = flops.bs * batch * length + causal_share * flops.bss * batch * length**2
        assert traced == counter.get_total_flops()


def test_every_expert_has_a_gradient_in_a_trace(tmp_path_factory: pytest.TempPathFactory) -> None:
    """So the memory of gradients is that of all weights, although one expert has all tokens."""
    profile = profile_of("switch", tmp_path_factory.getbasetemp() / "mixture switch")
    (step,) = profile.steps
    layer = step.stacks[0].plain[1]
    mixture = build("switch").encoder.block[1]
    num_bytes = sum(4 * weight.numel() for weight in mixture.parameters())
    assert layer.gradients_go is not None and layer.gradients_go.born.one == num_bytes


def test_a_mask_that_no_expert_asks_about_stays_unknown() -> None:
    """Else a model that selects tokens by their labels would be traced as if it selected none."""
    with fake_mode(), all_tokens_to_one_expert():
        mask = torch.ones(8, dtype=torch.bool)
        with pytest.raises(DynamicOutputShapeException):
            torch.where(mask)
        experts = torch.ones(2, dtype=torch.bool).nonzero()
        assert [len(torch.where(mask)[0]) for _ in experts] == [8, 0]
        with pytest.raises(DynamicOutputShapeException):
            torch.where(mask)


def test_only_the_counts_of_the_experts_are_answered() -> None:
    """Else the lengths of images, or of texts, that a model reads after its router would be taken for counts of tokens."""
    with fake_mode(), all_tokens_to_one_expert():
        lengths = torch.ones(3, dtype=torch.int64)
        counts = torch.ones(4, dtype=torch.int64)
        with pytest.raises(UNKNOWN):
            counts.tolist()  # no router has chosen yet
        torch.rand(10, 4).topk(2)
        assert counts.tolist() == [20, 0, 0, 0]
        for other in (lengths, counts.float(), counts[None], torch.ones(20, dtype=torch.int64)):
            with pytest.raises(UNKNOWN):
                other.tolist()


STEPS = 4
GENERATOR = torch.Generator().manual_seed(3)
DATA = [{"input_ids": (ids := torch.randint(2, 96, (6,), generator=GENERATOR)), "labels": ids} for _ in range(2 * STEPS)]


def losses(trainer_class: Any, name: str, folder: Path, **options: Any) -> list[float]:
    model = build(name)
    arguments = TrainingArguments(
        str(folder), max_steps=STEPS, logging_steps=1, report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True,
        learning_rate=1e-2, weight_decay=1.0, seed=7, per_device_train_batch_size=2,
    )  # fmt: skip
    trainer = trainer_class(model=model, args=arguments, train_dataset=DATA, **options)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


PLAN = Plan(
    device="cpu", host="", model="", sequence_length=6, per_device_train_batch_size=1, gradient_accumulation_steps=2,
    optim="adamw_torch", attention="eager",
)  # fmt: skip


@pytest.mark.parametrize(("name", "recomputed"), [("switch", 0), ("switch", 2), ("jetmoe", 0)])
def test_they_train_as_transformers_trains_them(name: str, recomputed: int, tmp_path: Path) -> None:
    """With so few tokens, some experts have none in some steps, and must not be decayed."""
    plan = PLAN.changed(activation_checkpointing=recomputed)
    ours = losses(upshift.Trainer, name, tmp_path / "ours", plan=plan)
    theirs = losses(transformers.Trainer, name, tmp_path / "theirs")
    assert len(theirs) == STEPS and theirs[-1] != pytest.approx(theirs[0], rel=1e-3)
    assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("switch", {"attention": "sdpa"}, "attention=sdpa is not for SwitchTransformers.*; use one of eager"),
        ("jetmoe", {"activation_checkpointing": 2}, "activation_checkpointing=2 is not for JetMoe.*; use .*=0"),
    ],
)
def test_a_given_plan_that_the_model_cannot_run_is_refused(name: str, fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=words):
        losses(upshift.Trainer, name, tmp_path, plan=PLAN.changed(**fields))
