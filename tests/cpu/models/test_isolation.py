"""What reaches a text, from other texts of its row or batch and from padding: the answers, and that every road goes by them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from upshift.errors import RequestError
from upshift.hardware import detect
from upshift.hardware.spec import Host
from upshift.models.build import choose_class
from upshift.models.isolation import small_copy
from upshift.models.isolation.check import measure_isolation
from upshift.models.profile import Isolation, ModelProfile, Variant
from upshift.models.profile_cache import isolation_of
from upshift.models.source import ModelSource, find_model
from upshift.models.tracing.profile_model import profile_model
from upshift.planning.layout import Layout
from upshift.planning.plan import Plan, plain_default
from upshift.planning.search.constraints import warning_about_splits, why_not_isolated
from upshift.planning.search.enumerate import enumerate_plans
from upshift.planning.search.ranking import Rejected, cost_plan
from upshift.planning.search.space import choices, parse_fixed
from upshift.planning.workload import LengthHistogram, Workload
from upshift.training.batches.layout import layout_for
from upshift.training.batches.model_objective import find_objective
from upshift.training.batches.sampler import BatchSource, GlobalBatch
from upshift.training.data.tokens import Sequences
from upshift.training.hf_trainer.choose_plan import check_plan, restrict_to_isolation
from upshift.training.hf_trainer.loss_split import Split
from upshift.training.out_of_memory import halve
from upshift.training.prepare import compute_loss, load_or_build

SMALL = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 96, "max_position_embeddings": 64}
DECODER = SMALL | {"intermediate_size": 48, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
GEMMA3N = DECODER | {
    "head_dim": 8, "hidden_size_per_layer_input": 8, "laurel_rank": 4, "vocab_size_per_layer_input": 96, "altup_num_inputs": 2,
    "num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16,
    "activation_sparsity_pattern": [0.0, 0.0],
}  # fmt: skip
# kind -> (config class, architecture, arguments, whether texts of a row are isolated)
KINDS: dict[str, tuple[str, str, dict[str, Any], bool]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", DECODER, True),
    "mistral: a window": ("MistralConfig", "MistralForCausalLM", DECODER | {"sliding_window": 8}, True),
    "granitemoe: reads use_cache from its config": (
        "GraniteMoeConfig", "GraniteMoeForCausalLM", DECODER | {"num_local_experts": 4, "num_experts_per_tok": 2}, True,
    ),
    "gemma3n: a padding token has no finite gradient": ("Gemma3nTextConfig", "Gemma3nForCausalLM", GEMMA3N, True),
    "opt: makes its mask without positions": (
        "OPTConfig", "OPTForCausalLM",
        SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 32, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}, False,
    ),
    "lfm2: a convolution runs along the row": (
        "Lfm2Config", "Lfm2ForCausalLM", DECODER | {"layer_types": ["conv", "full_attention"]}, False,
    ),
    "mamba: a recurrence runs along the row": (
        "MambaConfig", "MambaForCausalLM", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 96, "state_size": 4}, False,
    ),
}  # fmt: skip
MIXTRAL = DECODER | {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1}
LENGTHS = (5, 9, 20, 7, 12, 3, 16, 6)


def source_of(folder: Path, config_class: str, architecture: str, arguments: dict[str, Any]) -> ModelSource:
    config = getattr(transformers, config_class)(**arguments, architectures=[architecture])
    config.save_pretrained(folder)
    return find_model(str(folder))


def plan_of(**fields: Any) -> Plan:
    given = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1} | fields
    return Plan(device="cpu", host="", model="", sequence_length=48, **given)


def texts() -> Sequences:
    lengths = np.array(LENGTHS)
    tokens = np.random.default_rng(0).integers(2, 96, lengths.sum()).astype(np.int32)
    return Sequences(tokens=tokens, starts=np.cumsum(lengths) - lengths, lengths=lengths, sequence_length=48)


def batch_of(source: ModelSource, plan: Plan) -> GlobalBatch:
    objective = find_objective(source)
    data = BatchSource(sequences=texts(), global_batch=len(LENGTHS), layout=layout_for(plan, objective), objective=objective)
    return next(data.batches())


def loud(model: nn.Module) -> nn.Module:
    """With weights that are large enough for a leak to show in the loss."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(10.0)
    return model.eval()


def loss_as_planned(model: nn.Module, source: ModelSource, plan: Plan) -> float:
    """Of the global batch, as training adds it up."""
    batch = batch_of(source, plan)
    parts = [float(compute_loss(model, plan, part).detach()) * part.num_label_tokens for part in batch.micro_batches]
    return sum(parts) / batch.num_label_tokens


def loss_alone(model: nn.Module) -> float:
    """Of every text alone, by transformers."""
    sequences, total, count = texts(), 0.0, 0
    for start, length in zip(sequences.starts, sequences.lengths, strict=True):
        ids = torch.from_numpy(sequences.tokens[start : start + length].astype(np.int64))[None]
        labels = ids.clone()
        labels[:, 0] = -100
        with torch.no_grad():
            total += float(model(input_ids=ids, labels=labels).loss) * (int(length) - 1)
        count += int(length) - 1
    return total / count


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_row_is_its_texts_alone_or_is_refused(kind, tmp_path):
    *named, isolates = KINDS[kind]
    source = source_of(tmp_path, *named)
    isolation = isolation_of(source)
    assert isolation.proven, isolation.reason
    assert (isolation.why_not_packed("eager") is None) == isolates
    model = loud(load_or_build(source, plan_of(), from_config=True, seed=1))
    alone = loss_alone(model)
    assert loss_as_planned(model, source, plan_of()) == pytest.approx(alone, rel=1e-4), "padded rows"
    packed = loss_as_planned(model, source, plan_of(packing=True, attention="eager"))
    if not isolates and "position_ids" not in str(isolation.packing["eager"]):
        assert packed != pytest.approx(alone, rel=1e-4), "the reference sees what the test saw"
    if isolates:
        assert packed == pytest.approx(alone, rel=1e-4)
        compute_loss(model, plan_of(packing=True), batch_of(source, plan_of(packing=True)).micro_batches[-1]).backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        assert gradients and all(gradient.isfinite().all() for gradient in gradients)
    assert source.hf_config.use_cache, "the model's config is as it was"


@pytest.fixture(scope="module")
def host() -> Host:
    return detect(visible_devices="")


def profile_of(source: ModelSource) -> ModelProfile:
    variants = tuple(Variant("fp32", kernel, masked) for kernel in ("sdpa", "eager") for masked in (False, True))
    return profile_model(source, sequence_length=48, variants=variants)


def workload() -> Workload:
    return Workload(sequence_length=48, global_batch=8, lengths=LengthHistogram.of_documents(LENGTHS, 48))


def test_every_road_refuses_to_pack_what_is_not_isolated(host, tmp_path):
    source = source_of(tmp_path, *KINDS["opt: makes its mask without positions"][:3])
    profile = profile_of(source)
    assert choices(host, profile, workload())["packing"] == [False]
    with pytest.raises(RequestError, match=r"packing=True is not possible here.*a text in a row reaches the one behind it"):
        parse_fixed(("packing=True",), host, profile, workload())
    given = plain_default(host, profile, workload()).changed(packing=True)
    rejected = cost_plan(given, host=host, profile=profile, workload=workload())
    assert isinstance(rejected, Rejected) and "use packing=False" in rejected.reason
    model = load_or_build(source, plan_of(), from_config=True, seed=1)
    split = restrict_to_isolation(Split("labels", trims=True, drops_mask=True, flattens=True), model)
    with pytest.raises(RequestError, match="the given plan is not possible"):
        check_plan(plan_of(packing=True, attention="sdpa"), split, model)


def test_what_cannot_be_tested_is_not_packed(monkeypatch):
    monkeypatch.setattr(small_copy, "MAX_PARAMETERS", 0)
    config = transformers.LlamaConfig(**DECODER)
    isolation = measure_isolation(config, transformers.LlamaForCausalLM, "causal-lm")
    assert not isolation.proven
    assert "not proven: no small copy" in str(isolation.why_not_packed("sdpa"))


def test_a_routers_loss_is_that_of_the_whole_batch_with_the_mask(host, tmp_path):
    source = source_of(tmp_path, "MixtralConfig", "MixtralForCausalLM", MIXTRAL)
    profile = profile_of(source)
    assert profile.isolation.padding == "masked" and not profile.isolation.loss_splits
    plans = list(enumerate_plans(host, profile, workload()))
    assert {(plan.per_device_train_batch_size, plan.num_processes, plan.packing) for plan in plans} == {(8, 1, False)}
    split = plain_default(host, profile, workload()).changed(per_device_train_batch_size=4, gradient_accumulation_steps=2)
    assert isinstance(cost_plan(split, host=host, profile=profile, workload=workload()), Rejected)

    model = loud(load_or_build(source, plan_of(), from_config=True, seed=1))
    batch = batch_of(source, plan_of()).micro_batches[0]
    inputs = {name: torch.from_numpy(array) for name, array in batch.arrays.items()}
    whole = float(model(**inputs).loss.detach())
    assert "attention_mask" in inputs
    assert halve(batch) is None, "out of memory, it is not halved either"
    assert loss_as_planned(model, source, plan_of()) == pytest.approx(whole, rel=1e-6)
    unmasked = float(model(**{name: value for name, value in inputs.items() if name != "attention_mask"}).loss.detach())
    assert unmasked != pytest.approx(whole, rel=1e-5), "padding would count"


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "qwen3_moe", "phimoe", "granitemoe", "jamba"])
@pytest.mark.parametrize("router", [True, False])
def test_a_routers_loss_is_seen_at_the_weight_that_transformers_gives_it(kind, router, tmp_path):
    """By default it weighs 0.001 in some models: some 1e-5 of the loss, where sums in another order differ by less than 3e-7."""
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    config = transformers.CONFIG_MAPPING[kind](output_router_logits=router)
    isolation = measure_isolation(config, getattr(transformers, architecture), "causal-lm")
    assert isolation.proven and isolation.loss_splits is not router


def test_without_a_router_loss_a_mixture_is_split_and_packed(tmp_path):
    source = source_of(tmp_path, "MixtralConfig", "MixtralForCausalLM", MIXTRAL | {"output_router_logits": False})
    isolation = isolation_of(source)
    assert isolation.loss_splits and isolation.padding == "unmasked" and isolation.why_not_packed("block") is None


# MobileBert reads the tokens beside each one, and files may have numbers for padding.
@pytest.mark.parametrize(("family", "padding"), [("FNet", "none"), ("MobileBert", "none"), ("Bert", "masked")])
def test_an_encoder_that_does_not_look_at_its_mask_reads_texts_alone(family, padding, tmp_path):
    small = {name: value for name, value in SMALL.items() if family != "FNet" or name != "num_attention_heads"}
    arguments = small | {"intermediate_size": 48}
    source = source_of(tmp_path, f"{family}Config", f"{family}Model", arguments)
    isolation = isolation_of(source, states=True)
    assert isolation.proven and isolation.padding == padding


def test_rows_that_padding_would_change_are_as_wide_as_their_texts(tmp_path):
    arguments = {name: value for name, value in SMALL.items() if name != "num_attention_heads"} | {"intermediate_size": 48}
    source = source_of(tmp_path, "FNetConfig", "FNetForMaskedLM", arguments)
    assert isolation_of(source).padding == "none"
    objective = find_objective(source)
    assert objective.padding == "none"
    layout = layout_for(plan_of(per_device_train_batch_size=4), objective)
    assert not layout.pads
    data = BatchSource(sequences=texts(), global_batch=8, layout=layout, objective=objective)
    widths = sorted(part.shape[1] for part in next(data.batches()).micro_batches)
    assert widths == sorted(LENGTHS)


def test_a_copy_has_every_kind_of_layer_and_small_sizes():
    config = transformers.Gemma3TextConfig()  # of 26 layers, five with a window to one without
    copy = next(small_copy.narrow_copies(config, transformers.Gemma3ForCausalLM))
    assert {*copy.layer_types} == {*config.layer_types} and copy.num_hidden_layers < config.num_hidden_layers
    assert copy.hidden_size < config.hidden_size and copy.sliding_window == small_copy.SHORT_WINDOW
    assert choose_class(copy, "")[0] is transformers.Gemma3ForCausalLM


BERT = SMALL | {"intermediate_size": 48}
XLM = {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 96, "max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("config", "architecture", "words"),
    [
        (transformers.LlamaConfig(**DECODER), "LlamaForCausalLM", ""),
        (transformers.MistralConfig(**DECODER, sliding_window=8), "MistralForCausalLM", ""),
        (transformers.BertConfig(**BERT, is_decoder=True), "BertLMHeadModel", ""),
        (transformers.BertConfig(**BERT), "BertLMHeadModel", "depend on the tokens behind it"),
        (transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=96, state_size=4), "MambaForCausalLM", ""),
        (transformers.OpenAIGPTConfig(n_embd=32, n_layer=2, n_head=4, vocab_size=96), "OpenAIGPTLMHeadModel", "takes no cache"),
        (transformers.XLMConfig(**XLM, causal=False), "XLMWithLMHeadModel", "depend on the tokens behind it"),
        (transformers.XLMConfig(**XLM, causal=True), "XLMWithLMHeadModel", "other inputs than the text so far"),
    ],
)  # fmt: skip
def test_what_is_not_the_same_token_by_token_is_seen(config, architecture, words):
    """The same class reads both ways or one way, by its config: the test runs it."""
    objective: Any = "masked-lm" if architecture == "XLMWithLMHeadModel" else "causal-lm"
    found = measure_isolation(config, getattr(transformers, architecture), objective)
    assert found.proven, found.reason
    assert words in found.by_token and bool(words) == bool(found.by_token)


def test_next_tokens_are_not_learned_by_a_model_that_has_seen_them(tmp_path):
    """XLNet's class, and CPM-Ant's, read ahead without a mask of the user's own, and leave it to the user to shift the labels."""
    small = {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 48, "vocab_size": 96}
    source = source_of(tmp_path / "own", "XLNetConfig", "XLNetLMHeadModel", small)
    assert not isolation_of(source).loss_shifts
    with pytest.raises(RequestError, match="a token of XLNetLMHeadModel also reads the tokens behind it"):
        find_objective(source)
    source = source_of(tmp_path / "next", "LlamaConfig", "LlamaForCausalLM", DECODER)
    assert isolation_of(source).loss_shifts and find_objective(source).loss_shifts


def test_reasons_name_the_kernel():
    isolation = Isolation(proven=True, reason="", packing={"sdpa": "", "eager": "it leaks"})
    assert isolation.why_not_packed("sdpa") is None and isolation.why_not_packed("eager") == "it leaks"
    assert "were not tested with block" in str(isolation.why_not_packed("block"))
    assert replace(Split("labels"), isolation=isolation).isolation is isolation


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")])
@pytest.mark.parametrize("method", ["_run", "_packed_results", "_loss"])
def test_a_test_that_ran_out_of_memory_is_not_stored(
    error: Exception, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise error

    monkeypatch.setenv("UPSHIFT_CACHE", str(tmp_path / "cache"))
    transformers.LlamaConfig(**DECODER, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(f"upshift.models.isolation.check._Probe.{method}", fail)
        short = isolation_of(find_model(str(tmp_path)))
    assert short.short_of_memory and not short.proven and "out of memory" in short.reason and not short.packing
    assert isolation_of(find_model(str(tmp_path))).proven


DYNAMIC = DECODER | {
    "max_position_embeddings": 30, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
}  # fmt: skip
LONGROPE = DECODER | {
    "max_position_embeddings": 4096, "original_max_position_embeddings": 30,
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0],
    },
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 30}
LONGEST = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", DECODER, None),
    "llama, dynamic": ("LlamaConfig", "LlamaForCausalLM", DYNAMIC, 30),
    "llama, yarn": ("LlamaConfig", "LlamaForCausalLM", DECODER | {"max_position_embeddings": 120, "rope_parameters": YARN}, None),
    "phi3, longrope": ("Phi3Config", "Phi3ForCausalLM", LONGROPE, 30),
    "gpt2: a table of positions": ("GPT2Config", "GPT2LMHeadModel", SMALL | {"bos_token_id": 0, "eos_token_id": 1}, None),
}


def results_beside(model: nn.Module, short: torch.Tensor, longer: torch.Tensor) -> float:
    """Return the largest change of a text's logits by a longer text on the row below it."""
    ids = torch.zeros(2, len(longer), dtype=torch.long)
    ids[0, : len(short)] = short
    ids[1] = longer
    with torch.no_grad():
        return float((model(input_ids=ids).logits[0, : len(short)] - model(input_ids=short[None]).logits[0]).abs().max())


@pytest.mark.parametrize("kind", LONGEST)
def test_the_longest_text_that_leaves_others_alone(kind: str) -> None:
    """The number that the small copy gives is where the model itself begins to mix texts."""
    config_class, architecture, arguments, limit = LONGEST[kind]
    config, model_class = getattr(transformers, config_class)(**arguments), getattr(transformers, architecture)
    isolation = measure_isolation(config, model_class, "causal-lm")
    assert isolation.proven and isolation.exact_tokens == limit and isolation.loss_splits
    assert isolation.why_not_packed("sdpa") is None
    torch.manual_seed(0)
    model = loud(model_class(config))
    short = torch.randint(2, 96, (11,))
    assert results_beside(model, short, torch.randint(2, 96, (30,))) < 1e-3
    above = results_beside(model, short, torch.randint(2, 96, (31,)))
    assert (above > 1e-3) == (limit is not None), above


def test_longer_texts_are_not_packed(host: Host, tmp_path: Path) -> None:
    """The longest text decides, not the width of a row: short texts share rows of 48 tokens as before."""
    profile = profile_of(source_of(tmp_path, *LONGEST["phi3, longrope"][:3]))
    for longest, is_packed in ((30, True), (31, False)):
        lengths = LengthHistogram.of_documents((8,) * 9 + (longest,), 48)
        workload = Workload(sequence_length=48, global_batch=8, lengths=lengths)
        plans = [plan for plan in enumerate_plans(host, profile, workload) if isinstance(plan, Plan)]
        assert any(plan.packing for plan in plans) == is_packed and plans
        packed = plan_of(packing=True, attention="sdpa")
        costed = cost_plan(packed, host=host, profile=profile, workload=workload)
        assert isinstance(costed, Rejected) and ("above 30 the model rotates" in costed.reason) != is_packed
        if not is_packed:
            with pytest.raises(RequestError, match="above 30 the model rotates"):
                parse_fixed(("packing=True",), host, profile, workload)
    whole = Isolation(proven=True, exact_tokens=30)
    assert warning_about_splits(whole, 30) is None and "--sequence-length 30 avoids it" in str(warning_about_splits(whole, 31))
    shared = plan_of(num_processes=2, layout=Layout(context_parallel=2))
    assert why_not_isolated(whole, shared, longest=30) is None
    assert "context_parallel=1" in str(why_not_isolated(whole, shared))
    assert "a loss that shifts the labels itself" in str(why_not_isolated(Isolation(proven=True, loss_shifts=False), shared))
