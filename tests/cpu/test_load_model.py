"""upshift.load_model gives what transformers' from_pretrained gives, tensor by tensor, and holds less on the way."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from upshift.errors import RequestError
from upshift.loading.load import load_model

WIDTH = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 96}
ENCODER = WIDTH | {"intermediate_size": 48, "max_position_embeddings": 64}
DECODER = ENCODER | {"num_key_value_heads": 2}
EXPERTS = DECODER | {"num_experts_per_tok": 2}
TINY_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 28, "patch_size": 14}
LATENT = {  # attention of DeepSeek
    "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
SEQ2SEQ = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 96, "max_position_embeddings": 64,
}  # fmt: skip
MODELS = {  # name -> config class, model class, arguments
    "llama": ("LlamaConfig", "LlamaForCausalLM", DECODER),
    "llama, tied": ("LlamaConfig", "LlamaForCausalLM", DECODER | {"tie_word_embeddings": True}),
    "llama, long rope": (
        "LlamaConfig", "LlamaForCausalLM",
        DECODER | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", DECODER | {"tie_word_embeddings": True}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", DECODER | {"head_dim": 8, "sliding_window": 16}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 96, "n_positions": 64}),
    "t5": ("T5Config", "T5ForConditionalGeneration", {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 96}),
    "bart": ("BartConfig", "BartForConditionalGeneration", SEQ2SEQ),
    "bert": ("BertConfig", "BertForMaskedLM", ENCODER),
    "albert": ("AlbertConfig", "AlbertForMaskedLM", ENCODER | {"embedding_size": 16}),
    "modernbert": ("ModernBertConfig", "ModernBertForMaskedLM", ENCODER | {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}),
    "deberta": ("DebertaV2Config", "DebertaV2ForSequenceClassification", ENCODER | {"relative_attention": True, "pos_att_type": ["c2p"]}),
    "vit": ("ViTConfig", "ViTForImageClassification", TINY_VISION),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", EXPERTS | {"num_local_experts": 4}),
    "qwen3-moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", EXPERTS | {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8}),
    "deepseek-v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", EXPERTS | LATENT | {"num_hidden_layers": 3}),
    "gpt-oss": ("GptOssConfig", "GptOssForCausalLM", EXPERTS | {"num_local_experts": 4, "head_dim": 8}),
    "opt": ("OPTConfig", "OPTForCausalLM", WIDTH | {"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64}),
    "bloom": ("BloomConfig", "BloomForCausalLM", {"hidden_size": 32, "n_head": 4, "n_layer": 2, "vocab_size": 96}),
    "falcon": ("FalconConfig", "FalconForCausalLM", WIDTH),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", DECODER | {"pad_token_id": 0}),
    "mamba": ("MambaConfig", "MambaForCausalLM", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 96}),
    "jamba": (
        "JambaConfig", "JambaForCausalLM",
        EXPERTS | {"num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "pad_token_id": 0, "use_mamba_kernels": False},
    ),
    "whisper": ("WhisperConfig", "WhisperForConditionalGeneration", SEQ2SEQ | {"num_mel_bins": 8, "pad_token_id": 0, "max_source_positions": 32, "max_target_positions": 32}),
    "clip": ("CLIPConfig", "CLIPModel", {"text_config": ENCODER, "vision_config": TINY_VISION, "projection_dim": 16}),
    "wav2vec2": (
        "Wav2Vec2Config", "Wav2Vec2ForCTC",
        ENCODER | {"conv_dim": (32, 32), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "num_feat_extract_layers": 2},
    ),
    "llava": (
        "LlavaConfig", "LlavaForConditionalGeneration",
        {"text_config": DECODER | {"model_type": "llama"}, "vision_config": TINY_VISION | {"model_type": "clip_vision_model"}, "image_token_index": 95},
    ),
    "qwen2-vl": (
        "Qwen2VLConfig", "Qwen2VLForConditionalGeneration",
        {"text_config": DECODER | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}},
         "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4}},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Made when first asked for: a model with random weights, written by save_pretrained."""
    home = tmp_path_factory.mktemp("models")

    def folder(name: str) -> Path:
        path = home / name.replace(" ", "-")
        if not path.exists():
            config_class, architecture, arguments = MODELS[name]
            torch.manual_seed(0)
            config = getattr(transformers, config_class)(**arguments)
            getattr(transformers, architecture)(config).save_pretrained(path, max_shard_size="40KB" if len(name) % 2 else "5GB")
        return path

    return folder


def weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def ties(model: PreTrainedModel) -> list[list[str]]:
    by_identity: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_identity.setdefault(id(parameter), []).append(name)
    return sorted(map(sorted, by_identity.values()))


def assert_same(ours: PreTrainedModel, theirs: PreTrainedModel) -> None:
    assert type(ours) is type(theirs) and ours.training == theirs.training
    found, expected = weights(ours), weights(theirs)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].requires_grad) == (tensor.dtype, tensor.requires_grad), name
        assert found[name].is_contiguous() == tensor.is_contiguous() and torch.equal(found[name], tensor), name
    assert ties(ours) == ties(theirs)
    assert ours.config.to_dict() == theirs.config.to_dict()
    generation = [model.generation_config.to_dict() if model.can_generate() else None for model in (ours, theirs)]
    assert generation[0] == generation[1]


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_is_that_of_transformers(name, dtype, folders):
    path = folders(name)
    assert_same(load_model(str(path), dtype=dtype), getattr(transformers, MODELS[name][1]).from_pretrained(path, dtype=dtype or "auto"))
