"""A live model becomes a source that builds it again; and peft models run under every plan with the loss of plain peft."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
from peft import AdaLoraConfig, IA3Config, LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn
from transformers import (
    BertConfig,
    BertForMultipleChoice,
    BertForSequenceClassification,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
)

from upshift.errors import RequestError
from upshift.models.adapter import base_of, complete_model
from upshift.models.build import build_model, choose_class
from upshift.models.live_model import source_of
from upshift.models.profile import Variant
from upshift.models.source import AdapterOptions, find_model, find_model_to_train
from upshift.models.tracing.profile_model import profile_model
from upshift.planning.plan import Plan
from upshift.planning.trials.runner import TrialRequest, trial_server
from upshift.training.distributed.mesh import Mesh
from upshift.training.prepare import chunked_loss, load_or_build, prepare_model

LLAMA = LlamaConfig(
    hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96, num_hidden_layers=3, vocab_size=300
)
BERT = BertConfig(hidden_size=64, num_attention_heads=4, intermediate_size=96, num_hidden_layers=4, vocab_size=300)
ALL_LINEAR = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")


def plan_of(**fields: object) -> Plan:
    given = {"device": "cpu", "host": "", "model": "", "sequence_length": 64, "per_device_train_batch_size": 2} | fields
    return Plan.model_validate(given)


def llama(adapter: object, dtype: torch.dtype = torch.float32, *, name: str = "default") -> nn.Module:
    return get_peft_model(LlamaForCausalLM(LLAMA).to(dtype), copy.deepcopy(adapter), adapter_name=name)  # type: ignore[arg-type]


def classifier(dtype: torch.dtype) -> nn.Module:
    return BertForSequenceClassification(BERT).to(dtype)


def partly_frozen(dtype: torch.dtype = torch.float32) -> nn.Module:
    model = classifier(dtype)
    model.bert.embeddings.requires_grad_(False)
    model.bert.encoder.layer[:2].requires_grad_(False)
    return model


def lora_with_one_norm(dtype: torch.dtype) -> nn.Module:
    model = llama(ALL_LINEAR, dtype)
    model.base_model.model.model.norm.weight.requires_grad_(True)
    return model


LIVE: dict[str, Callable[[torch.dtype], nn.Module]] = {
    "whole": classifier,
    "frozen by hand": partly_frozen,
    "lora": lambda dtype: llama(ALL_LINEAR, dtype),
    "lora under another name": lambda dtype: llama(ALL_LINEAR, dtype, name="mine"),
    "lora with more unfrozen": lora_with_one_norm,
    "lora from the weights": lambda dtype: llama(LoraConfig(init_lora_weights="pissa", target_modules=["q_proj"]), dtype),
    "dora": lambda dtype: llama(LoraConfig(use_dora=True), dtype),
    "ia3": lambda dtype: llama(IA3Config(task_type="CAUSAL_LM"), dtype),
    "adalora": lambda dtype: llama(AdaLoraConfig(task_type="CAUSAL_LM", total_step=10), dtype),
    "lora on a classifier": lambda dtype: get_peft_model(classifier(dtype), LoraConfig(task_type="SEQ_CLS")),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LIVE)
def test_a_written_source_builds_the_same_model(name, dtype, tmp_path):
    model = LIVE[name](dtype)
    source = source_of(model)
    source.write(tmp_path / "a.source.json")
    read = find_model(str(tmp_path / "a.source.json"))
    assert read == source and read.model_hash == source.model_hash
    precision = "fp32" if dtype == torch.float32 else "bf16-weights"
    built = load_or_build(read, plan_of(precision=precision), from_config=True, seed=0)

    def described(model: nn.Module) -> list[object]:
        parameters = [(n, p.shape, p.dtype, p.requires_grad) for n, p in model.named_parameters()]
        return [parameters, [(n, type(m)) for n, m in model.named_modules()]]

    assert described(built) == described(model)
    assert built.training


def test_what_changes_the_work_changes_the_hash():
    names = ("whole", "frozen by hand", "lora", "dora", "ia3", "adalora", "lora on a classifier", "lora with more unfrozen")
    assert len({source_of(LIVE[name](torch.float32)).model_hash for name in names}) == len(names)
    assert source_of(partly_frozen()).frozen == ("bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1")


class OwnLlama(LlamaForCausalLM):
    pass


def another_forward() -> nn.Module:
    model = LlamaForCausalLM(LLAMA)
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda hidden: hidden  # type: ignore[method-assign]
    return model


def another_head() -> nn.Module:
    model = BertForSequenceClassification(BERT)
    model.classifier = nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 2))
    return model


def resized() -> nn.Module:
    model = LlamaForCausalLM(LLAMA)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight[:200])
    return model


def two_adapters() -> nn.Module:
    model = llama(ALL_LINEAR)
    model.add_adapter("second", LoraConfig(r=2, task_type="CAUSAL_LM"))
    return model


def added_adapter() -> nn.Module:
    model = LlamaForCausalLM(LLAMA)
    model.add_adapter(LoraConfig())
    return model


def quantized() -> nn.Module:
    model = LlamaForCausalLM(copy.deepcopy(LLAMA))
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "no transformers model": (lambda: nn.Linear(2, 2), "Linear is no transformers model"),
    "own class": (lambda: OwnLlama(LLAMA), "OwnLlama is defined outside transformers"),
    "no loss": (lambda: BertModel(BERT), "BertModel.* has no loss that Upshift trains"),
    "several rows an example": (lambda: BertForMultipleChoice(BERT), "several rows for each example"),
    "another forward": (another_forward, r"forward of 'model.layers.1.mlp' was replaced"),
    "another head": (another_head, r"module 'classifier' is .*Sequential where its config makes .*Linear"),
    "another size": (resized, "parameter 'lm_head.weight' is .*where its config makes"),
    "two adapters": (two_adapters, "the model has adapters"),
    "prompt": (lambda: llama(PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)), "PROMPT_TUNING adapter"),
    "add_adapter": (added_adapter, "wrap it with peft.get_peft_model"),
    "quantized": (quantized, "is quantized"),
    "half": (lambda: LlamaForCausalLM(LLAMA).half(), "the weights are float16"),
    "nothing trained": (lambda: LlamaForCausalLM(LLAMA).requires_grad_(False), "no parameter requires a gradient"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_built_again_is_refused_with_the_reason(name):
    make, reason = REFUSED[name]
    with pytest.raises(RequestError, match=reason):
        source_of(make())


def encoder_with_frozen_layers() -> nn.Module:
    model = BertModel(BERT, add_pooling_layer=False)
    model.encoder.layer[:2].requires_grad_(False)
    return model


def encoder_with_adapter() -> nn.Module:
    model = BertModel(BERT)
    model.add_adapter(LoraConfig(r=2, target_modules=["query"]))
    return model


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "encoder": lambda: BertModel(BERT),
    "frozen layers, no pooler": encoder_with_frozen_layers,
    "added adapter": encoder_with_adapter,
    "peft": lambda: get_peft_model(BertModel(BERT), LoraConfig(task_type="FEATURE_EXTRACTION", target_modules=["query"])),
    "several rows an example": lambda: BertForMultipleChoice(BERT),
    "decoder": lambda: LlamaModel(LLAMA),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_model_without_a_loss_gets_a_head_above_the_same_layers(name):
    model = LAYERS[name]()
    built = load_or_build(source_of(model, allows_other_forward=True), plan_of(), from_config=True, seed=0)

    def layers(model: nn.Module) -> list[object]:
        base = base_of(model).base_model
        return [
            (path, type(module), [(weight.shape, weight.requires_grad) for weight in module.parameters()])
            for path, module in base.named_modules() if ".layer." in path or path.startswith("layers.")
        ]  # fmt: skip

    assert layers(built) == layers(model) != []
    loss = built(input_ids=torch.tensor([[5, 7], [6, 8]]), labels=torch.zeros(2)).loss
    loss.backward()
    assert loss.isfinite()


def test_a_model_with_other_layers_than_its_config_makes_gets_no_head():
    model = BertModel(BERT)
    model.encoder.layer[1].output.dense = nn.Identity()
    with pytest.raises(RequestError, match=r"encoder.layer.1.output.dense.* is .*Identity where its config makes"):
        source_of(model, allows_other_forward=True)


def lora_with_weights() -> nn.Module:
    """Random weights on both sides, so that every gradient is more than zero."""
    torch.manual_seed(0)
    model = llama(ALL_LINEAR)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    return model.train()


PLANS: dict[str, dict[str, object]] = {
    "plain": {},
    "eager": {"attention": "eager"},
    "block attention": {"attention": "block"},
    "one layer recomputed": {"activation_checkpointing": 1},
    "every layer recomputed": {"activation_checkpointing": 3},
    "loss in chunks": {"loss_chunk_tokens": 16},
    "recomputed, block attention, loss in chunks": {
        "activation_checkpointing": 3, "attention": "block", "loss_chunk_tokens": 16,
    },
    "layers compiled": {"torch_compile": "layer"},
    "compiled": {"torch_compile": "model"},
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_a_peft_model_has_the_loss_and_gradients_of_plain_peft_under_every_plan(name):
    ids = torch.randint(0, 300, (2, 64), generator=torch.Generator().manual_seed(1))

    def loss_and_gradients(model: nn.Module, plan: Plan | None) -> tuple[float, dict[str, torch.Tensor]]:
        with chunked_loss(model, plan) if plan else contextlib.nullcontext():
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    plan = plan_of(**PLANS[name])
    expected, gradients = loss_and_gradients(lora_with_weights(), None)
    found, others = loss_and_gradients(prepare_model(lora_with_weights(), plan, Mesh(plan)), plan)
    assert found == pytest.approx(expected, rel=1e-6)
    assert gradients.keys() == others.keys() and all("lora" in name for name in gradients)
    for parameter, gradient in gradients.items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(others[parameter], gradient, rtol=1e-4, atol=1e-6)


def test_flops_of_lora_leave_out_the_gradients_of_frozen_weights():
    """A frozen matrix hands its gradient on and takes none; the first layer's inputs need none either."""
    model = llama(ALL_LINEAR)
    profile = profile_model(source_of(model), sequence_length=64, variants=(Variant("fp32", "sdpa", False),))
    sizes = {"base": 0, "A": 0, "B": 0, "first base": 0, "first A": 0}
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "embed" not in name:
            kind = "A" if "lora_A" in name else "B" if "lora_B" in name else "base"
            sizes[kind] += parameter.numel()
            if kind != "B" and any(f"layers.0.self_attn.{part}_proj" in name for part in "qkv"):
                sizes[f"first {kind}"] += parameter.numel()
    batch, length = 2, 64
    attention = 2 * 3 * batch * length**2 * 64
    forward = 2 * batch * length * (sizes["base"] + sizes["A"] + sizes["B"]) + attention
    matrices = sizes["base"] - sizes["first base"] + 2 * sizes["A"] - sizes["first A"] + 2 * sizes["B"]
    backward = 2 * batch * length * matrices + 2 * attention
    assert profile.forward_flops.at(batch, length) == pytest.approx(forward, rel=0.002)
    assert profile.backward_flops.at(batch, length) == pytest.approx(backward, rel=0.002)
    assert profile.train_flops(batch, length) < 2.2 * profile.forward_flops.at(batch, length)


@pytest.mark.parametrize("four_bits", [False, True])
def test_lora_that_a_plan_asks_for_is_what_peft_puts_on(four_bits, tmp_path):
    """QLoRA's weights are stored as bitsandbytes stores them: two to a byte, beside them norms and embeddings as they are."""
    LLAMA.save_pretrained(tmp_path)
    source = find_model_to_train(str(tmp_path), AdapterOptions(lora_rank=4, load_in_4bit=four_bits))
    with torch.device("meta"):
        config = source.hf_config
        built = complete_model(build_model(config, choose_class(config, "")[0], dtype=torch.float32), source)
    expected = dict(llama(ALL_LINEAR).named_parameters())
    assert {name for name, _ in built.named_parameters()} == set(expected)
    for name, parameter in built.named_parameters():
        assert parameter.requires_grad == expected[name].requires_grad
        stored = four_bits and name.endswith("base_layer.weight")
        assert parameter.numel() == expected[name].numel() / (2 if stored else 1)


def test_what_no_lora_goes_around_is_refused(tmp_path):
    LLAMA.save_pretrained(tmp_path)
    with pytest.raises(RequestError, match="--lora-rank 0 is not possible; give 1 or more"):
        find_model_to_train(str(tmp_path), AdapterOptions(lora_rank=0))
    LlamaConfig(**LLAMA.to_dict() | {"quantization_config": {"quant_method": "gptq", "bits": 4}}).save_pretrained(tmp_path)
    with pytest.raises(RequestError, match="quantized already; give the model that it was made from"):
        find_model_to_train(str(tmp_path), AdapterOptions(lora_rank=8))


def test_a_trial_runs_a_written_source(tmp_path):
    source = source_of(llama(ALL_LINEAR))
    path = tmp_path / "model.source.json"
    source.write(path)
    request = TrialRequest(
        model_reference=str(path), from_config=True, plan=plan_of(model=source.model_hash), global_batch=2, seconds=1.0,
        limit_seconds=300,
    )  # fmt: skip
    with trial_server() as server:
        result = server.run(request)
    assert result.failure is None and result.peak_bytes
    profile = profile_model(source, sequence_length=64, variants=(Variant("fp32", "sdpa", False),))
    assert profile.parameters.trainable == sum(p.numel() for p in llama(ALL_LINEAR).parameters() if p.requires_grad)
