"""The causal language model of transformers that all engines start from, and what it must be like."""

from __future__ import annotations

from typing import Any

from upshift.errors import RequestError
from upshift.models.build import read_config
from upshift.models.source import ModelSource

ATTENTION_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")


def check_causal(source: ModelSource) -> None:
    """Raises RequestError for a model that keeps something else than keys and values of its own tokens."""
    config: Any = read_config(source)
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        raise RequestError(
            f"{source.reference!r} is an encoder-decoder ({config.model_type}), which upshift cannot generate with yet; "
            f"use transformers' generate()"
        )
    names = [name for name in source.config.get("architectures") or () if not name.endswith(("ForCausalLM", "LMHeadModel"))]
    if names:
        raise RequestError(f"{source.reference!r} is a {names[0]}, which generates no text; give a ...ForCausalLM model")
    other = sorted(set(getattr(text, "layer_types", None) or ()) - set(ATTENTION_LAYERS))
    if other or not hasattr(text, "num_attention_heads"):
        kind = other[0] if other else config.model_type
        raise RequestError(
            f"{source.reference!r} has layers of {kind}, whose state is not keys and values; upshift cannot generate "
            f"with it yet; use transformers' generate()"
        )


def cache_bytes(source: ModelSource) -> int:
    """Keys and values of one token of one sequence, in fp32."""
    text: Any = read_config(source).get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * 4 * int(text.num_hidden_layers * heads * width)


def load_causal(source: ModelSource, dtype: Any) -> Any:
    from transformers import AutoModelForCausalLM

    assert source.directory is not None
    return AutoModelForCausalLM.from_pretrained(source.directory, dtype=dtype).eval()


def plain_cache(past: tuple[Any, ...] = ()) -> Any:
    """Keys and values of all tokens, also where a layer looks back less far: its mask says so. ``past``: keys and values of
    the first layer, then of the next."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    cache = DynamicCache()
    for keys, values in zip(past[0::2], past[1::2], strict=True):
        layer = DynamicLayer()
        layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
        layer.keys, layer.values = keys, values
        cache.layers.append(layer)
    return cache
