"""Describe the families of models that llama.cpp computes, and write a model's sizes into a GGUF file.

A GGUF file names an architecture and its sizes. Everything else is fixed in llama.cpp's code, so a config with other values is
rejected. The facts are from llama.cpp's sources (src/models and conversion, September 2026)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import sqrt
from operator import not_, truth
from typing import Any, NamedTuple

from upshift.errors import RequestError
from upshift.internals.transformers_names import ROPE_FUNCTIONS
from upshift.models.config import Heads, heads_of, positions_in, window_of

TANH = ("gelu_new", "gelu_pytorch_tanh").__contains__
SILU = ("silu", "swish").__contains__
COMMON_ROPES = ("default", "linear")
ROTATED = (".q_proj.weight", ".q_proj.bias", ".k_proj.weight", ".k_proj.bias")
TRANSPOSED = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")  # weights of Conv1D, which are [inputs, outputs]

Change = Callable[[str, Any, Any], Any]  # from name in transformers, tensor and config to the tensor for llama.cpp


def _unchanged(name: str, tensor: Any, config: Any) -> Any:
    return tensor


def _reorder_rotated(name: str, tensor: Any, config: Any) -> Any:
    """Reorder rotated rows: llama.cpp rotates neighbouring rows of a head, and transformers rotates its two halves."""
    if not name.endswith(ROTATED):
        return tensor
    return tensor.unflatten(0, (-1, 2, head_width(config) // 2)).transpose(1, 2).flatten(0, 2)


def _transpose(name: str, tensor: Any, config: Any) -> Any:
    return tensor.T if name.endswith(TRANSPOSED) else tensor


def _add_one_to_norms(name: str, tensor: Any, config: Any) -> Any:
    """Add 1 to the weights of norms, because Gemma's norms multiply by 1 + weight."""
    return tensor + 1.0 if name.endswith("norm.weight") else tensor


def _scale_queries(queries: str, largest: int) -> Change:
    """Return the change that scales queries, because llama.cpp and transformers scale them by different numbers.

    llama.cpp scales them by the width of a head. In the largest model of the family, which has ``largest`` layers, it scales
    them by the hidden width divided by the number of heads. transformers scales them by a number of the config."""

    def change(name: str, tensor: Any, config: Any) -> Any:
        if config.num_hidden_layers == largest:
            scaling_width = config.hidden_size // _heads(config).queries
        else:
            scaling_width = head_width(config)
        shifted = _add_one_to_norms(name, tensor, config)
        if not name.endswith(queries):
            return shifted
        return shifted * sqrt(scaling_width / config.query_pre_attn_scalar)

    return change


class Family(NamedTuple):
    """A family of models with one architecture in llama.cpp."""

    architecture: str  # its name in llama.cpp
    supports: Mapping[str, Callable[[Any], bool]]  # by field of the config: whether llama.cpp supports a value
    change: Change = _unchanged
    ropes: tuple[str, ...] = COMMON_ROPES
    windows: bool = False  # some layers use sliding windows


GEMMA = {"attention_bias": not_, "use_bidirectional_attention": not_}
FAMILIES: dict[str, Family] = {  # by the config's model_type
    "llama": Family("llama", {"hidden_act": SILU}, _reorder_rotated, ropes=(*COMMON_ROPES, "llama3")),
    "mistral": Family("llama", {"hidden_act": SILU}, _reorder_rotated, ropes=(*COMMON_ROPES, "llama3")),
    "qwen2": Family("qwen2", {"hidden_act": SILU}),
    "qwen3": Family("qwen3", {"hidden_act": SILU, "attention_bias": not_}),
    "phi3": Family("phi3", {"hidden_act": SILU}),
    "gemma": Family("gemma", {"hidden_act": TANH, **GEMMA}, _add_one_to_norms),
    "gemma2": Family(
        "gemma2",
        {"hidden_activation": TANH, "attn_logit_softcapping": truth, "final_logit_softcapping": truth, **GEMMA},
        _scale_queries("q_proj.weight", largest=46),
        windows=True,
    ),
    "gemma3_text": Family(
        "gemma3",
        {"hidden_activation": TANH, "attn_logit_softcapping": not_, **GEMMA},
        _scale_queries("q_norm.weight", largest=62),
        windows=True,
    ),
    "gpt2": Family(
        "gpt2",
        {
            "activation_function": TANH,
            "scale_attn_weights": truth,
            "scale_attn_by_inverse_layer_idx": not_,
            "add_cross_attention": not_,
        },
        _transpose,
        ropes=(),
    ),
}


def family_of(config: Any) -> Family:
    """Return the family of a text config of transformers. Raise RequestError if llama.cpp computes such a model otherwise."""
    family = FAMILIES[config.model_type]
    unsupported = list(_unsupported_fields(config, family))
    if unsupported:
        raise RequestError(f"llama.cpp does not compute a {config.model_type!r} with {', '.join(unsupported)}")
    return family


def _unsupported_fields(config: Any, family: Family) -> Iterator[str]:
    for name, is_supported in family.supports.items():
        value = getattr(config, name, None)
        if not is_supported(value):
            yield f"{name}={value!r}"
    for rope_type in dict.fromkeys(rope["rope_type"] for rope in ropes(config).values()):
        if rope_type not in family.ropes:
            yield f"rope_type={rope_type!r}"
    window = window_of(config)
    if window is not None and window < _positions(config) and not family.windows:
        yield f"sliding_window={window}"


def ropes(config: Any) -> dict[str, Any]:
    """Return the rotary parameters by type of layer, or under ``full_attention`` for all layers.

    Return an empty dict if positions are learned."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if not parameters or "full_attention" in parameters:
        return parameters
    return {"full_attention": parameters}


def head_width(config: Any) -> int:
    """Return the width of an attention head."""
    width = _heads(config).width
    assert width is not None  # every family's config has head_dim or hidden_size
    return width


def _heads(config: Any) -> Heads:
    heads = heads_of(config)
    assert heads is not None
    return heads


def _positions(config: Any) -> int:
    positions = positions_in(config)
    assert positions is not None
    return positions


def describe(writer: Any, config: Any, family: Family) -> None:
    """Write the sizes into ``writer``, a gguf.GGUFWriter. Write the size of the vocabulary, and no words."""
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(_positions(config))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(getattr(config, "intermediate_size", None) or config.n_inner or 4 * config.hidden_size)
    writer.add_head_count(_heads(config).queries)
    writer.add_head_count_kv(_heads(config).keys)
    writer.add_key_length(head_width(config))
    writer.add_value_length(head_width(config))
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    _describe_positions(writer, config, family)
    if getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _describe_positions(writer: Any, config: Any, family: Family) -> None:
    from gguf import RopeScalingType

    rope_by_layer = ropes(config)
    if rope_by_layer:
        rope = rope_by_layer["full_attention"]
        writer.add_rope_dimension_count(int(head_width(config) * rope.get("partial_rotary_factor", 1.0)))
        writer.add_rope_freq_base(rope["rope_theta"])
        if rope["rope_type"] == "linear":
            writer.add_rope_scaling_type(RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
    if "sliding_attention" in rope_by_layer:
        writer.add_rope_freq_base_swa(rope_by_layer["sliding_attention"]["rope_theta"])
    if family.windows:
        writer.add_sliding_window(window_of(config))
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])


def rope_divisors(config: Any) -> Any:
    """Return the divisors of llama.cpp's rotary frequencies, [head width / 2], or None if it computes the right ones."""
    rope = ropes(config).get("full_attention", {})
    if rope.get("rope_type") != "llama3":
        return None
    import torch

    head_size = head_width(config)
    frequencies = rope["rope_theta"] ** -(torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
    return frequencies / ROPE_FUNCTIONS.get()["llama3"](config, device=torch.device("cpu"))[0]
