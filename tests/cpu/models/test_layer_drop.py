"""Models that leave out whole layers at random in training are found by what they do, and train as transformers trains them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, OPTConfig, OPTForCausalLM, TrainingArguments

import upshift
from upshift.errors import RequestError
from upshift.models.isolation.layer_drop import drops_layers
from upshift.models.profile import Isolation, Variant
from upshift.models.source import find_model
from upshift.models.tracing.profile_model import profile_model
from upshift.planning.layout import Layout
from upshift.planning.plan import Plan
from upshift.planning.search.constraints import why_not_isolated
from upshift.training.hf_trainer.choose_plan import check_layer_drop

SIZES = {"vocab_size": 96, "num_attention_heads": 4, "max_position_embeddings": 128}
OPT = SIZES | {
    "hidden_size": 32, "num_hidden_layers": 3, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "attention_dropout": 0.0,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
}  # fmt: skip
BART = {
    "vocab_size": 96, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "dropout": 0.0, "pad_token_id": 1,
    "decoder_start_token_id": 2, "bos_token_id": 0, "eos_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
BIOGPT = SIZES | {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "pad_token_id": 1,
}  # fmt: skip
BERT = SIZES | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
LLAMA = SIZES | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28}
AUDIO = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_blocks": 2, "ext_pw_out_channel": 32,
         "depthwise_separable_out_channel": 32, "nemo_conv_channels": 32}  # fmt: skip
PHI4 = LLAMA | {
    "num_key_value_heads": 2, "vision_config": VISION | {"crop_size": 28, "image_token_id": 94},
    "audio_config": AUDIO | {"audio_token_id": 95},
}  # fmt: skip
LLAVA = {
    "text_config": LLAMA | {"model_type": "llama"},
    "vision_config": VISION | {"model_type": "clip_vision_model", "patch_size": 14},
    "image_token_index": 95,
}  # fmt: skip
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "opt": ("OPTConfig", "OPTForCausalLM", OPT | {"layerdrop": 0.5}),
    "opt, never": ("OPTConfig", "OPTForCausalLM", OPT | {"layerdrop": 0.0}),
    "bart's encoder": ("BartConfig", "BartForConditionalGeneration", BART | {"encoder_layerdrop": 0.5}),
    "bart's decoder": ("BartConfig", "BartForConditionalGeneration", BART | {"decoder_layerdrop": 0.5}),
    "bart, never": ("BartConfig", "BartForConditionalGeneration", BART),
    "biogpt": ("BioGptConfig", "BioGptForCausalLM", BIOGPT | {"layerdrop": 0.5}),
    "biogpt, never": ("BioGptConfig", "BioGptForCausalLM", BIOGPT | {"layerdrop": 0.0}),
    "bert: dropout is no LayerDrop": ("BertConfig", "BertForMaskedLM", BERT | {"hidden_dropout_prob": 0.5}),
    "llava: no text reaches the layers for images": ("LlavaConfig", "LlavaForConditionalGeneration", LLAVA),
    "phi4: nor those for images and audio": ("Phi4MultimodalConfig", "Phi4MultimodalForCausalLM", PHI4),
    "llama": ("LlamaConfig", "LlamaForCausalLM", SIZES | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}),
}


def class_and_config(name: str) -> tuple[Any, Any]:
    config_class, model_class, fields = MODELS[name]
    return getattr(transformers, model_class), getattr(transformers, config_class)(**fields)


@pytest.mark.parametrize("name", MODELS)
def test_models_that_leave_out_layers_are_found_by_what_they_do(name: str) -> None:
    model_class, config = class_and_config(name)
    model = model_class(config).train()
    blocks = [module for module in model.modules() if type(module).__name__.endswith(("Layer", "EncoderLayer", "DecoderLayer"))]
    ids = torch.arange(3, 11)[None]
    numbers_of_calls = set()
    for seed in range(24):  # with a probability of 0.5 two layers always run in 24 forward passes once in 2 ** 48 times
        calls: list[object] = []
        handles = [block.register_forward_hook(lambda module, *_, calls=calls: calls.append(module)) for block in blocks]
        torch.manual_seed(seed)
        with torch.no_grad():
            model(input_ids=ids, labels=ids)
        numbers_of_calls.add(len(calls))
        for handle in handles:
            handle.remove()
    assert drops_layers(config, model_class) == (len(numbers_of_calls) > 1)


def test_a_trace_counts_every_layer(tmp_path: Path) -> None:
    """A layer that may be left out needs memory when it runs."""
    variants = (Variant("fp32", "sdpa", masked=False),)
    profiles = []
    for probability in (0.0, 0.9):
        folder = tmp_path / str(probability)
        OPTConfig(**OPT, layerdrop=probability, architectures=["OPTForCausalLM"]).save_pretrained(folder)
        profiles.append(profile_model(find_model(str(folder)), sequence_length=32, variants=variants))
    assert profiles[0].forward_flops == profiles[1].forward_flops
    never, often = (profile.steps[0].stacks[0].plain for profile in profiles)
    assert [layer.forward.rise for layer in never] == [layer.forward.rise for layer in often]
    assert [layer.backward.rise for layer in never] == [layer.backward.rise for layer in often]
    assert [profile.isolation.drops_layers for profile in profiles] == [False, True]


PLAN = Plan(
    device="cpu", host="", model="", sequence_length=32, num_processes=4, optim="adamw_torch", per_device_train_batch_size=2
)  # fmt: skip
LAYOUTS = {
    "fully_shard": {"fully_shard": "weights", "shard_size": 4},
    "zero 1": {"fully_shard": "optimizer", "shard_size": 4},
    "tensor": {"tensor_parallel": 2},
    "context": {"context_parallel": 2},
    "pipeline": {"pipeline_parallel": 2},
    "experts": {"expert_parallel": 2},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_do_not_share_layers_that_each_leaves_out(name: str) -> None:
    plan = PLAN.changed(layout=Layout(**LAYOUTS[name]))
    assert why_not_isolated(Isolation(proven=True, reason=""), plan) is None
    problem = why_not_isolated(Isolation(proven=True, reason="", drops_layers=True), plan)
    assert problem is not None and "LayerDrop" in problem and "layerdrop to 0" in problem
    assert why_not_isolated(Isolation(proven=True, reason="", drops_layers=True), PLAN) is None


@pytest.mark.parametrize("probability", [0.5, 0.0])
def test_the_trainer_refuses_to_divide_layers_that_each_rank_leaves_out(probability: float) -> None:
    """The user's own settings have the layout, too. So no plan is needed for the refusal."""
    model = OPTForCausalLM(OPTConfig(**OPT, layerdrop=probability))
    check_layer_drop(PLAN, model)
    refusal = pytest.raises(RequestError, match="LayerDrop") if probability else contextlib.nullcontext()
    for name in ("fully_shard", "zero 1"):
        with refusal:
            check_layer_drop(PLAN.changed(layout=Layout(**LAYOUTS[name])), model)


STEPS = 5
GENERATOR = torch.Generator().manual_seed(3)
DATA = [{"input_ids": (ids := torch.randint(3, 96, (16,), generator=GENERATOR)), "labels": ids} for _ in range(2 * STEPS)]


def losses(trainer_class: Any, folder: Path, probability: float, **options: Any) -> list[float]:
    torch.manual_seed(0)
    model = OPTForCausalLM(OPTConfig(**OPT, layerdrop=probability))
    arguments = TrainingArguments(
        str(folder), max_steps=STEPS, logging_steps=1, report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True,
        learning_rate=1e-2, seed=7, per_device_train_batch_size=2,
    )  # fmt: skip
    trainer = trainer_class(model=model, args=arguments, train_dataset=DATA, **options)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_the_trainer_leaves_out_the_layers_that_transformers_leaves_out(tmp_path: Path) -> None:
    plan = Plan(device="cpu", host="", model="", sequence_length=16, per_device_train_batch_size=2, optim="adamw_torch")
    ours = losses(upshift.Trainer, tmp_path / "ours", 0.5, plan=plan)
    theirs = losses(transformers.Trainer, tmp_path / "theirs", 0.5)
    assert ours == pytest.approx(theirs, rel=1e-5)
    whole = losses(transformers.Trainer, tmp_path / "whole", 0.0)
    assert theirs != pytest.approx(whole, rel=1e-3)  # else no layer was left out


@pytest.mark.parametrize("kind", ["granitemoe", "qwen3_next"])
def test_the_measurement_leaves_the_config_alone(kind: str) -> None:
    config = AutoConfig.for_model(kind)
    before = config.to_dict()
    drops_layers(config, MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    assert config.to_dict() == before
