"""What a profile says of the cache of keys and values, against the cache that the whole model fills."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers

from upshift.models.profile import ModelProfile
from upshift.models.profile_model import profile_model
from upshift.models.source import ModelSource

SMALL: dict[str, Any] = {
    "vocab_size": 200, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
CONFIGS = {
    "grouped heads": transformers.LlamaConfig(**SMALL),
    "a window": transformers.MistralConfig(**SMALL, sliding_window=32),
    "some windows": transformers.Gemma3TextConfig(**SMALL, head_dim=16, sliding_window=32),
    "latent": transformers.DeepseekV3Config(
        **(SMALL | {"num_key_value_heads": 4}), kv_lora_rank=16, q_lora_rank=32, qk_rope_head_dim=8, v_head_dim=16,
        qk_nope_head_dim=16, moe_intermediate_size=32, n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1,
        first_k_dense_replace=6,
    ),
}  # fmt: skip


def profile_of(config: transformers.PretrainedConfig) -> ModelProfile:
    fields = {**json.loads(config.to_json_string(use_diff=False)), "model_type": config.model_type}
    return profile_model(ModelSource(reference="small", directory=None, config=fields), sequence_length=128, variants=())


@pytest.mark.parametrize("name", CONFIGS)
def test_cached_elements(name: str) -> None:
    config = CONFIGS[name]
    profile = profile_of(config)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    assert sum(layers.count for layers in profile.cache) == config.num_hidden_layers
    for tokens in (10, 100):
        with torch.no_grad():
            cache = model(torch.zeros((1, tokens), dtype=torch.long), use_cache=True).past_key_values
        held = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
        # Between steps transformers keeps one token less than the window: the next token's own comes to it.
        kept = [min(tokens, (layers.window or tokens + 1) - 1) for layers in profile.cache]
        assert held == sum(layers.count * layers.per_token * seen for layers, seen in zip(profile.cache, kept, strict=True))


def test_a_profile_without_steps_says_what_ranks_may_share() -> None:
    profile = profile_of(CONFIGS["grouped heads"])
    assert profile.steps == ()
    assert profile.tensor_parallel is not None and profile.tensor_parallel.divisor == 2
    assert profile.cache[0].heads == 2
    assert profile.kv_elements is not None
    assert profile.kv_elements.at(3, 50) == pytest.approx(3 * 50 * 6 * 2 * 2 * 16)
