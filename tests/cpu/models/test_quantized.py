"""QLoRA: adapters on weights that are stored in 4 bits, by bitsandbytes' own CPU kernels."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from transformers import (
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

import upshift
from upshift.benchmarking.meters import allocated_peak, tensor_bytes
from upshift.errors import RequestError
from upshift.models.adapter import base_of
from upshift.models.build import sample_inputs
from upshift.models.live_model import source_of
from upshift.models.ops.activation_checkpointing import recompute_layers
from upshift.models.ops.block_attention import set_attention
from upshift.models.profile import Variant
from upshift.models.quantized import four_bit_layers
from upshift.models.source import find_model
from upshift.models.tracing.profile_model import profile_model
from upshift.planning.cost.memory import predict_memory
from upshift.planning.plan import Plan
from upshift.training.arguments import Arguments
from upshift.training.optimizers.build import build_optimizer
from upshift.training.prepare import load_or_build

pytest.importorskip("bitsandbytes", reason="QLoRA needs bitsandbytes: pip install '.[bitsandbytes]'")

SEQUENCE = 128
LLAMA = LlamaConfig(
    hidden_size=128, num_attention_heads=4, num_key_value_heads=2, intermediate_size=160, num_hidden_layers=5, vocab_size=500
)
GPT2 = GPT2Config(vocab_size=500, n_embd=128, n_layer=4, n_head=4)
LORA = LoraConfig(task_type="CAUSAL_LM", r=8, lora_dropout=0.1, target_modules="all-linear")


def plan_of(**fields: object) -> Plan:
    given = {"device": "cpu", "host": "", "model": "", "sequence_length": SEQUENCE, "per_device_train_batch_size": 2} | fields
    return Plan.model_validate(given)


def four_bits(kind: str = "nf4", *, double: bool = True, compute: torch.dtype = torch.float32) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=double, bnb_4bit_compute_dtype=compute
    )


def loaded(folder: Path, how: BitsAndBytesConfig, *, dtype: torch.dtype = torch.float32, gpt2: bool = False) -> PreTrainedModel:
    """As a user loads it: from a directory of whole weights."""
    torch.manual_seed(0)
    made = GPT2LMHeadModel(GPT2) if gpt2 else LlamaForCausalLM(LLAMA)
    made.to(dtype).save_pretrained(folder)
    return type(made).from_pretrained(folder, quantization_config=how, dtype=dtype)


def with_lora(base: PreTrainedModel, config: LoraConfig = LORA) -> nn.Module:
    torch.manual_seed(1)
    model = get_peft_model(base, LoraConfig(**config.to_dict()))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # as if some steps were done: else half of the gradients are zero
            nn.init.normal_(parameter, std=0.05)
    return model


MODELS = {
    "nf4, fp32": lambda folder: with_lora(loaded(folder, four_bits())),
    "nf4, made of bf16, the rest in fp32": lambda folder: with_lora(
        prepare_model_for_kbit_training(loaded(folder, four_bits(compute=torch.bfloat16), dtype=torch.bfloat16))
    ),
    "fp4 with plain scales, the rest in bf16": lambda folder: with_lora(
        loaded(folder, four_bits("fp4", double=False, compute=torch.bfloat16), dtype=torch.bfloat16)
    ),
    "gpt2, nf4": lambda folder: with_lora(loaded(folder, four_bits(), gpt2=True)),
}


def measured_peak(model: nn.Module, plan: Plan, *, batch: int, sequence: int) -> int:
    set_attention(base_of(model), "sdpa")
    recompute_layers(model, plan.activation_checkpointing, plan.recompute_granularity)
    optimizer = build_optimizer(model, plan, Arguments(max_steps=10))
    first, inputs = (sample_inputs(base_of(model), "causal-lm", batch=b, sequence=sequence, masked=False) for b in (1, batch))

    def step(inputs: dict[str, torch.Tensor], micro_batches: int) -> None:
        for _ in range(micro_batches):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=plan.precision == "bf16"):
                loss = model(**inputs, use_cache=False).loss
            (loss * 0.5).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(first, 1)  # makes the optimizer's state
    with allocated_peak("cpu", resident_bytes=tensor_bytes(model, optimizer, *inputs.values())) as peak:
        step(inputs, plan.gradient_accumulation_steps)
    assert peak.bytes is not None
    return peak.bytes


@pytest.mark.parametrize("name", MODELS)
def test_predicted_peak_is_within_two_percent(name, tmp_path):
    """Packed weights with their scales, and one whole copy of a matrix at a time, forward and backward."""
    model = MODELS[name](tmp_path).train()
    source = source_of(model)
    # Traces take long: each model has one precision, and one of them is recomputed selectively too.
    precision, selective = ("bf16", False) if "bf16" in name else ("fp32", "gpt2" in name)
    variants = (Variant(precision, "sdpa", False, selective=selective),)
    profile = profile_model(source, sequence_length=SEQUENCE, variants=variants)
    whole = tensor_bytes(base_of(model))
    assert profile.parameters.weight_bytes(4) + profile.parameters.buffers_bytes == whole
    assert profile.parameters.weight_bytes(2) + profile.parameters.buffers_bytes <= whole
    plain = sum(p.numel() for p in (GPT2LMHeadModel(GPT2) if "gpt2" in name else LlamaForCausalLM(LLAMA)).parameters())
    assert profile.parameters.total == plain + sum(p.numel() for p in model.parameters() if p.requires_grad)
    errors = {}
    shapes = ((3, 48, 1), (2, SEQUENCE, 2))
    ways = ((0, "full"), (profile.num_layers, "selective" if selective else "full"))
    for (recomputed, way), (batch, sequence, accumulation) in product(ways, shapes):
        plan = plan_of(
            precision=precision, sequence_length=sequence, per_device_train_batch_size=batch, recompute_granularity=way,
            gradient_accumulation_steps=accumulation, activation_checkpointing=recomputed,
        )  # fmt: skip
        trace = profile.step(precision=plan.traced_precision, attention="sdpa", masked=False)
        assert trace is not None
        predicted = predict_memory(profile, trace, plan).peak
        errors[recomputed, batch, sequence] = predicted / measured_peak(model, plan, batch=batch, sequence=sequence) - 1
    print(name, {key: f"{error:+.2%}" for key, error in errors.items()})
    assert max(map(abs, errors.values())) < 0.02, errors


ROWS = [{"input_ids": row, "labels": row} for row in torch.randint(0, 500, (24, 32), generator=torch.Generator().manual_seed(2))]
SAME = ("precision=fp32", "torch_compile=off", "attention=sdpa", "per_device_train_batch_size=2")


def trained(library: type[Trainer], folder: Path, **options: object) -> tuple[list[float], Trainer]:
    """upshift.Trainer evaluates the model before the run: that may not leave weights through which no gradient passes."""
    config = LoraConfig(**{**LORA.to_dict(), "lora_dropout": 0.0})
    arguments = TrainingArguments(
        str(folder / "out"), max_steps=6, logging_steps=1, report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True,
        learning_rate=1e-2, seed=7, per_device_train_batch_size=4, max_grad_norm=1.0,
    )  # fmt: skip
    model = with_lora(loaded(folder, four_bits()), config)
    trainer = library(model=model, args=arguments, train_dataset=ROWS, eval_dataset=ROWS[:4], **options)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer


def test_the_trainer_has_the_curve_of_transformers(tmp_path):
    theirs, _ = trained(Trainer, tmp_path / "theirs")
    ours, trainer = trained(upshift.Trainer, tmp_path / "ours", fixed=SAME, trial_seconds=0)
    assert trainer.upshift_choice.planning is not None and trainer.upshift_choice.plan.per_device_train_batch_size == 2
    assert ours == pytest.approx(theirs, rel=1e-5) and len(set(ours)) == len(ours)
    trainer.evaluate()
    states = [layer.weight.quant_state for _, layer in four_bit_layers(trainer.model)]
    assert states and not any(hasattr(state, "packing_format_for_cpu") for state in states)


def test_a_trial_runs_the_quantized_model(tmp_path):
    """What is built from the written source alone quantizes the same layers, and an adapter's directory is such a source."""
    model = MODELS["nf4, made of bf16, the rest in fp32"](tmp_path / "base")
    source = source_of(model)
    source.write(tmp_path / "model.source.json")
    built = load_or_build(find_model(str(tmp_path / "model.source.json")), plan_of(), from_config=True, seed=0)
    described = [[(n, p.shape, p.dtype, p.requires_grad) for n, p in m.named_parameters()] for m in (model, built)]
    assert described[0] == described[1]
    assert tensor_bytes(built) == tensor_bytes(model)


def test_an_adapter_directory_is_planned_with_the_model_below_it(tmp_path):
    base = loaded(tmp_path / "whole", four_bits())
    base.save_pretrained(tmp_path / "base")
    model = get_peft_model(type(base).from_pretrained(tmp_path / "base"), LoraConfig(**LORA.to_dict()))
    model.save_pretrained(tmp_path / "adapter")
    source = find_model(str(tmp_path / "adapter"))
    assert source.quantized_from == "float32" and source.adapter is not None
    built = load_or_build(source, plan_of(), from_config=True, seed=0)
    described = [[(n, p.shape, p.dtype, p.requires_grad) for n, p in m.named_parameters()] for m in (model, built)]
    assert described[0] == described[1]
    with pytest.raises(RequestError, match=r"quantized to 4 bits \(NF4\), and such weights are never trained; put an adapter"):
        profile_model(find_model(str(tmp_path / "base")), sequence_length=64, variants=(Variant("fp32", "sdpa", False),))


def test_what_cannot_be_trained_is_refused(tmp_path):
    base = loaded(tmp_path, four_bits())
    with pytest.raises(RequestError, match="such weights are never trained; put an adapter around it"):
        source_of(base)
    for config, reason in (
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "8 bits .LLM.int8., which is not planned"),
        ({"quant_method": "gptq", "bits": 4}, "quantized with gptq, through which no adapter is trained here; load it with Bits"),
    ):
        base.config.quantization_config = config
        with pytest.raises(RequestError, match=reason):
            source_of(with_lora(base))
    fresh = with_lora(loaded(tmp_path / "again", four_bits()))
    for _, layer in four_bit_layers(fresh):
        layer.weight.quant_state.packing_format_for_cpu = True
    arguments = TrainingArguments(str(tmp_path / "out"), report_to="none", use_cpu=True)
    with pytest.raises(RequestError, match="packed for inference .* load the model again"):
        upshift.Trainer(model=fresh, args=arguments, train_dataset=ROWS)
