"""What a profile says of the cache of keys and values, against the cache that the whole model fills."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from command import Command

from upshift.inference.generation.model import cache_bytes, full_cache
from upshift.models.kv_cache import NAMES, returned_cache, with_cache
from upshift.models.profile import ModelProfile
from upshift.models.source import ModelSource, find_model
from upshift.models.tracing.profile_model import profile_model
from upshift.training.data.tokenizer import train_byte_level_bpe

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


SHARED_KEYS = {  # all queries read the keys of one head, by a field that is not num_key_value_heads
    "falcon": transformers.FalconConfig(
        vocab_size=200, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, multi_query=True, alibi=False
    ),
    "gpt_bigcode": transformers.GPTBigCodeConfig(vocab_size=200, n_embd=64, n_layer=2, n_head=4, multi_query=True),
}


def profile_of(config: transformers.PretrainedConfig) -> ModelProfile:
    fields = {**json.loads(config.to_json_string(use_diff=False)), "model_type": config.model_type}
    return profile_model(ModelSource(reference="small", directory=None, config=fields), sequence_length=128, variants=())


@pytest.mark.parametrize("config", [*CONFIGS.values(), *SHARED_KEYS.values()], ids=[*CONFIGS, *SHARED_KEYS])
def test_heads_and_bytes_are_those_of_the_cache(config: transformers.PretrainedConfig, tmp_path: Path) -> None:
    """The config's fields differ by model. Two questions have one answer: how many heads, and how large a cached token."""
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        cache = returned_cache(model(torch.zeros((1, 5), dtype=torch.long), use_cache=True))
    profile = profile_of(config)
    assert profile.heads == (config.num_attention_heads, cache.layers[0].keys.shape[1])
    model.save_pretrained(tmp_path)
    held = sum((layer.keys.numel() + layer.values.numel()) * 4 // 5 for layer in cache.layers)
    assert cache_bytes(find_model(str(tmp_path))) == (held, 0)
    assert held == 4 * sum(layers.count * layers.per_token for layers in profile.cache)


@pytest.mark.parametrize("name", CONFIGS)
def test_cached_elements(name: str) -> None:
    config = CONFIGS[name]
    profile = profile_of(config)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    assert sum(layers.count for layers in profile.cache) == config.num_hidden_layers
    for tokens in (10, 100):
        with torch.no_grad():
            cache = returned_cache(model(torch.zeros((1, tokens), dtype=torch.long), use_cache=True))
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


@pytest.mark.parametrize("name", CONFIGS)
def test_a_text_in_two_parts_is_the_text(name: str) -> None:
    """The second part reads the keys and values of the first, whatever transformers calls the argument that takes them."""
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    tokens = torch.arange(24)[None] % 200
    cache = full_cache()
    with torch.no_grad():
        whole = model(tokens, use_cache=False).logits
        first = model(tokens[:, :10], **with_cache(model, cache)).logits
        second = model(tokens[:, 10:], **with_cache(model, cache)).logits
    assert torch.allclose(torch.cat([first, second], 1), whole, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_each_model_has_its_own_name_for_the_cache(name: str) -> None:
    def forward(self: Any, ids: torch.Tensor, **given: Any) -> dict[str, Any]:
        return {name: given[name]}

    parameters = [inspect.Parameter(each, inspect.Parameter.POSITIONAL_OR_KEYWORD) for each in ("self", "ids", name, "use_cache")]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    model = type("OfACheckpoint", (torch.nn.Module,), {"forward": forward})()
    cache = full_cache()
    assert returned_cache(model(torch.zeros(1, 1), **with_cache(model, cache))) is cache


def test_a_model_that_takes_no_cache_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, upshift: Command) -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL | {"vocab_size": 260}))
    model.save_pretrained(tmp_path / "model")
    train_byte_level_bpe(["a text of some words"], 260).save_pretrained(tmp_path / "model")
    ask = ("generate", tmp_path / "model", "--prompt", "a text", "--max-new-tokens", 3, "--engine", "torch")
    assert upshift(*ask).code == 0
    forward = transformers.LlamaForCausalLM.forward

    def forgets(self: Any, *given: Any, **named: Any) -> Any:
        return forward(self, *given, **{key: value for key, value in named.items() if key not in NAMES})

    its_own = inspect.signature(forward)
    nameless = its_own.replace(parameters=[value for name, value in its_own.parameters.items() if name not in NAMES])
    for signature, words in ((its_own, "kept no keys and values"), (nameless, "takes no cache")):
        forgets.__signature__ = signature  # type: ignore[attr-defined]
        monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", forgets)
        done = upshift(*ask)
        assert done.code == 2 and words in done.err and done.out == "", done.err
