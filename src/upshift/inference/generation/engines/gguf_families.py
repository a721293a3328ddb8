"""Check that llama.cpp computes a model of a family as its config says, and write the model's sizes into a GGUF file.

A file names an architecture and its sizes. Everything else is fixed in llama.cpp's own code, so a config that says something else
is rejected. The facts are from llama.cpp's sources (src/models and conversion, September 2026).
"""

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
PLAIN_ROPES = ("default", "linear")
ROTATED = (".q_proj.weight", ".q_proj.bias", ".k_proj.weight", ".k_proj.bias")
TRANSPOSED = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")  # Conv1D keeps inputs first

Change = Callable[[str, Any, Any], Any]  # (name in transformers, tensor, config) -> the tensor as llama.cpp has it


def _as_it_is(name: str, tensor: Any, text: Any) -> Any:
    return tensor


def _pairs(name: str, tensor: Any, text: Any) -> Any:
    """Reorder rotated rows: llama.cpp rotates neighbours of a head, and transformers rotates its halves."""
    if not name.endswith(ROTATED):
        return tensor
    return tensor.unflatten(0, (-1, 2, head_width(text) // 2)).transpose(1, 2).flatten(0, 2)


def _transposed(name: str, tensor: Any, text: Any) -> Any:
    return tensor.T if name.endswith(TRANSPOSED) else tensor


def _norms_from_zero(name: str, tensor: Any, text: Any) -> Any:
    """Add 1 to the weights of norms, because Gemma's norms multiply with 1 + weight."""
    return tensor + 1.0 if name.endswith("norm.weight") else tensor


def _scaled(queries: str, largest: int) -> Change:
    """Return the change that scales queries, as llama.cpp and transformers scale them by different numbers.

    llama.cpp scales them by the width of a head. In the largest model of the family, which has ``largest`` layers, it scales
    them by the width of the hidden states over the number of heads. transformers scales them by a number of the config.
    """

    def changed(name: str, tensor: Any, text: Any) -> Any:
        width = text.hidden_size // _heads(text).queries if text.num_hidden_layers == largest else head_width(text)
        found = _norms_from_zero(name, tensor, text)
        return found * sqrt(width / text.query_pre_attn_scalar) if name.endswith(queries) else found

    return changed


class Family(NamedTuple):
    architecture: str  # by llama.cpp's name
    able: Mapping[str, Callable[[Any], bool]]  # by field of the config: whether llama.cpp computes a value
    change: Change = _as_it_is
    ropes: tuple[str, ...] = PLAIN_ROPES
    windows: bool = False  # some layers look back a limited number of tokens


GEMMA = {"attention_bias": not_, "use_bidirectional_attention": not_}
FAMILIES: dict[str, Family] = {  # by the config's model_type
    "llama": Family("llama", {"hidden_act": SILU}, _pairs, ropes=(*PLAIN_ROPES, "llama3")),
    "mistral": Family("llama", {"hidden_act": SILU}, _pairs, ropes=(*PLAIN_ROPES, "llama3")),
    "qwen2": Family("qwen2", {"hidden_act": SILU}),
    "qwen3": Family("qwen3", {"hidden_act": SILU, "attention_bias": not_}),
    "phi3": Family("phi3", {"hidden_act": SILU}),
    "gemma": Family("gemma", {"hidden_act": TANH, **GEMMA}, _norms_from_zero),
    "gemma2": Family(
        "gemma2", {"hidden_activation": TANH, "attn_logit_softcapping": truth, "final_logit_softcapping": truth, **GEMMA},
        _scaled("q_proj.weight", largest=46), windows=True,
    ),
    "gemma3_text": Family(
        "gemma3", {"hidden_activation": TANH, "attn_logit_softcapping": not_, **GEMMA},
        _scaled("q_norm.weight", largest=62), windows=True,
    ),
    "gpt2": Family(
        "gpt2",
        {
            "activation_function": TANH, "scale_attn_weights": truth, "scale_attn_by_inverse_layer_idx": not_,
            "add_cross_attention": not_,
        },
        _transposed, ropes=(),
    ),
}  # fmt: skip


def family_of(text: Any) -> Family:
    """Return the family of ``text``, a config of transformers. Raise RequestError if llama.cpp computes it otherwise."""
    found = FAMILIES[text.model_type]
    wrong = list(_unable(text, found))
    if wrong:
        raise RequestError(f"llama.cpp does not compute a {text.model_type!r} with {', '.join(wrong)}")
    return found


def _unable(text: Any, family: Family) -> Iterator[str]:
    for name, able in family.able.items():
        value = getattr(text, name, None)
        if not able(value):
            yield f"{name}={value!r}"
    for kind in {rope["rope_type"] for rope in ropes(text).values()}:
        if kind not in family.ropes:
            yield f"rope_type={kind!r}"
    window = window_of(text)
    if window is not None and window < _positions(text) and not family.windows:
        yield f"sliding_window={window}"


def ropes(text: Any) -> dict[str, Any]:
    """Return the rotary parameters by kind of layer, or under ``full_attention`` for all. Empty: positions are learned."""
    said = getattr(text, "rope_parameters", None) or {}
    return said if "full_attention" in said else {"full_attention": said} if said else {}


def head_width(text: Any) -> int:
    width = _heads(text).width
    assert width is not None  # every family's config has it, or hidden_size
    return width


def _heads(text: Any) -> Heads:
    heads = heads_of(text)
    assert heads is not None
    return heads


def _positions(text: Any) -> int:
    positions = positions_in(text)
    assert positions is not None
    return positions


def describe(writer: Any, text: Any, family: Family) -> None:
    """Write the sizes into ``writer``, a gguf.GGUFWriter. Token ids go in, logits come out: no vocabulary but its size."""
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(text.vocab_size)
    writer.add_context_length(_positions(text))
    writer.add_embedding_length(text.hidden_size)
    writer.add_block_count(text.num_hidden_layers)
    writer.add_feed_forward_length(getattr(text, "intermediate_size", None) or text.n_inner or 4 * text.hidden_size)
    writer.add_head_count(_heads(text).queries)
    writer.add_head_count_kv(_heads(text).keys)
    writer.add_key_length(head_width(text))
    writer.add_value_length(head_width(text))
    if hasattr(text, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(text.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(text.layer_norm_epsilon)
    _describe_positions(writer, text, family)
    if getattr(text, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(text.attn_logit_softcapping)
    if getattr(text, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(text.final_logit_softcapping)


def _describe_positions(writer: Any, text: Any, family: Family) -> None:
    from gguf import RopeScalingType

    found = ropes(text)
    if found:
        rope = found["full_attention"]
        writer.add_rope_dimension_count(int(head_width(text) * rope.get("partial_rotary_factor", 1.0)))
        writer.add_rope_freq_base(rope["rope_theta"])
        if rope["rope_type"] == "linear":
            writer.add_rope_scaling_type(RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
    if "sliding_attention" in found:
        writer.add_rope_freq_base_swa(found["sliding_attention"]["rope_theta"])
    if family.windows:
        writer.add_sliding_window(window_of(text))
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in text.layer_types])


def rope_factors(text: Any) -> Any:
    """Return the divisors of llama.cpp's frequencies [width of a head / 2], or None if the file's own numbers say it all."""
    rope = ropes(text).get("full_attention", {})
    if rope.get("rope_type") != "llama3":
        return None
    import torch

    width = head_width(text)
    plain = rope["rope_theta"] ** -(torch.arange(0, width, 2, dtype=torch.float32) / width)
    return plain / ROPE_FUNCTIONS.get()["llama3"](text, device=torch.device("cpu"))[0]
