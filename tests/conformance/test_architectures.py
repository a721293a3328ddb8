"""One model of every family that transformers builds differently: traced whole, or refused in words that name the module."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from upshift.errors import RequestError
from upshift.models.build import build_model, choose_class, disable_cache
from upshift.models.describe import attention_kernels
from upshift.models.ops.block_attention import set_attention
from upshift.models.profile import Variant
from upshift.models.profile_cache import SegmentStore, isolation_of
from upshift.models.source import ModelSource, find_model
from upshift.models.tracing.trace import trace_model

LENGTH, STATE_SPACE_LENGTH = 48, 8  # state-space models are traced token by token
SMALL = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 96}
DECODER = SMALL | {"intermediate_size": 48, "num_key_value_heads": 2}
EXPERTS = DECODER | {"num_experts_per_tok": 2}
# name -> (config class, architecture, arguments)
MODELS: dict[str, tuple[str, str, dict[str, object]]] = {
    "gemma2: soft-capping, alternating windows": (
        "Gemma2Config", "Gemma2ForCausalLM", DECODER | {"head_dim": 8, "sliding_window": 16},
    ),
    "gemma3: windows, 2 of 3": (
        "Gemma3TextConfig", "Gemma3ForCausalLM", DECODER | {"num_hidden_layers": 3, "head_dim": 8, "sliding_window": 16},
    ),
    "mixtral: experts": ("MixtralConfig", "MixtralForCausalLM", EXPERTS | {"num_local_experts": 4}),
    "qwen3-moe: experts": (
        "Qwen3MoeConfig", "Qwen3MoeForCausalLM", EXPERTS | {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
    ),
    "deepseek-v3: latent attention, shared experts": (
        "DeepseekV3Config", "DeepseekV3ForCausalLM",
        EXPERTS | {
            "num_hidden_layers": 3, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
            "moe_intermediate_size": 16, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8,
            "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
        },
    ),
    "mistral: windows": ("MistralConfig", "MistralForCausalLM", DECODER | {"sliding_window": 16}),
    "phi3: fused projections": ("Phi3Config", "Phi3ForCausalLM", DECODER | {"pad_token_id": 0}),
    "falcon: parallel blocks": ("FalconConfig", "FalconForCausalLM", SMALL),
    "bloom: alibi": ("BloomConfig", "BloomForCausalLM", {"hidden_size": 32, "n_head": 4, "n_layer": 2, "vocab_size": 96}),
    "opt: learned positions": (
        "OPTConfig", "OPTForCausalLM", SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 128},
    ),
    "mamba: state space": ("MambaConfig", "MambaForCausalLM", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 96}),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", SMALL | {"intermediate_size": 48}),
    "distilbert": (
        "DistilBertConfig", "DistilBertForMaskedLM",
        {"dim": 32, "n_heads": 4, "n_layers": 2, "hidden_dim": 48, "vocab_size": 96},
    ),
    "albert: shared layers": ("AlbertConfig", "AlbertForMaskedLM", SMALL | {"embedding_size": 16, "intermediate_size": 48}),
    "bart: encoder and decoder": (
        "BartConfig", "BartForConditionalGeneration",
        {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
         "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 96, "max_position_embeddings": 64},
    ),
    "distilbert: question answering": (
        "DistilBertConfig", "DistilBertForQuestionAnswering",
        {"dim": 32, "n_heads": 4, "n_layers": 2, "hidden_dim": 48, "vocab_size": 96},
    ),
    "electra: regression": (
        "ElectraConfig", "ElectraForSequenceClassification",
        SMALL | {"embedding_size": 16, "intermediate_size": 48, "num_labels": 1},
    ),
    "deberta-v2: disentangled attention, classes": (
        "DebertaV2Config", "DebertaV2ForSequenceClassification",
        SMALL | {
            "intermediate_size": 48, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8,
            "share_att_key": True, "num_labels": 3,
        },
    ),
    "roberta: several classes a text": (
        "RobertaConfig", "RobertaForSequenceClassification",
        SMALL | {"intermediate_size": 48, "num_labels": 5, "problem_type": "multi_label_classification"},
    ),
    "albert: token classes": (
        "AlbertConfig", "AlbertForTokenClassification", SMALL | {"embedding_size": 16, "intermediate_size": 48},
    ),
}  # fmt: skip


def source_of(name: str, folder: Path) -> ModelSource:
    config_class, architecture, arguments = MODELS[name]
    config: PretrainedConfig = getattr(transformers, config_class)(**arguments, architectures=[architecture])
    for token in ("pad_token_id", "bos_token_id", "eos_token_id"):
        value = getattr(config, token, None)
        if isinstance(value, int) and value >= config.get_text_config().vocab_size:
            setattr(config, token, 0)
    config.save_pretrained(folder)
    return find_model(str(folder))


CAUSAL = [name for name in MODELS if MODELS[name][1].endswith("ForCausalLM")]


@pytest.mark.parametrize("name", CAUSAL)
def test_block_attention_gives_the_loss_of_sdpa(name, tmp_path):
    model = loud(source_of(name, tmp_path))
    if "block" not in attention_kernels(model):
        pytest.skip(f"{type(model).__name__} takes no sdpa")
    ids = torch.randint(1, 96, (2, 48))
    found = []
    for kernel in ("sdpa", "block"):
        set_attention(model, kernel)
        found.append(loss_and_gradient(model, [{"input_ids": ids, "labels": ids}]))
    assert found[1] == pytest.approx(found[0], rel=1e-4)


@pytest.mark.parametrize("kernel", ["sdpa", "block", "eager"])
@pytest.mark.parametrize("name", CAUSAL)
def test_packed_texts_have_the_loss_and_gradients_of_each_alone(name, kernel, tmp_path):
    """Where the model was seen to keep them apart; where it was not, this reference sees it, too."""
    source = source_of(name, tmp_path)
    isolation, model = isolation_of(source), loud(source)
    if kernel not in attention_kernels(model):
        pytest.skip(f"{type(model).__name__} takes no {kernel}")
    assert isolation.proven, isolation.reason
    lengths = (20, 28)
    texts = [torch.randint(1, 96, (1, length)) for length in lengths]
    labels = [text.clone() for text in texts]
    for label in labels:
        label[:, 0] = -100
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    row = {"input_ids": torch.cat(texts, 1), "position_ids": positions, "labels": torch.cat(labels, 1)}
    set_attention(model, "eager")
    alone = loss_and_gradient(model, [{"input_ids": text, "labels": label} for text, label in zip(texts, labels, strict=True)])
    set_attention(model, kernel)
    reason = isolation.why_not_packed(kernel)
    if reason is not None and "position_ids" in reason:
        return  # it has no argument for what a row would say
    packed = loss_and_gradient(model, [row])
    assert (packed == pytest.approx(alone, rel=1e-3)) == (reason is None), reason


def loud(source: ModelSource) -> PreTrainedModel:
    """With weights that are large enough for a leak to show in the loss."""
    config = source.hf_config
    torch.manual_seed(0)
    model = build_model(config, choose_class(config, "")[0], dtype=torch.float32).eval()
    disable_cache(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5.0)
    return model


def loss_and_gradient(model: PreTrainedModel, batches: list[dict[str, torch.Tensor]]) -> tuple[float, float]:
    """The mean loss of all labels, and the norm of its whole gradient."""
    counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
    model.zero_grad()
    total = 0.0
    for batch, count in zip(batches, counts, strict=True):
        loss = model(**batch).loss * (count / sum(counts))
        loss.backward()
        total += loss.item()
    norms = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
    return total, torch.stack(norms).norm().item()


@pytest.mark.parametrize("name", MODELS)
def test_traced_whole(name, tmp_path):
    """In bf16, whose casts come on top of what fp32 runs; FLOPs and parameters are those of fp32."""
    source = source_of(name, tmp_path)
    length = STATE_SPACE_LENGTH if "state space" in name else LENGTH
    variants = (Variant("bf16", "sdpa", False), Variant("bf16", "eager", False))
    store = SegmentStore(tmp_path / "kept")
    profile = trace_model(source, key="", versions={}, sequence_length=length, variants=variants, store=store)
    read = source.hf_config
    with torch.device("meta"):
        model = build_model(read, choose_class(read, "")[0], dtype=torch.float32)
    assert profile.parameters.total == sum(parameter.numel() for parameter in model.parameters())
    assert profile.steps and profile.forward_flops.at(2, length) > 0
    for step in profile.steps:
        segments = [*step.gaps, *(segment for stack in step.stacks for segment in stack.plain)]
        assert sum(segment.forward.left.at(2, length) for segment in segments) > 0, "something is kept for the backward pass"


def test_multiple_choice_is_refused_with_the_reason():
    config = transformers.BertConfig(**SMALL, intermediate_size=48, architectures=["BertForMultipleChoice"])
    with pytest.raises(RequestError, match="several rows for each example"):
        choose_class(config, "swag")
