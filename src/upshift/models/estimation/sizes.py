"""Read the sizes of a decoder from its config."""

from __future__ import annotations

from typing import NamedTuple

from upshift.errors import RequestError
from upshift.models.source import ALL_LINEAR, ModelSource

LEAVE_OUT = "leave out --quick, or quick=True in Python, and Upshift traces the model"
# Fields with which a config states another computation than that of the table.
OTHER_COMPUTATIONS = (
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "kv_lora_rank",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "vision_config",
    "audio_config",
    "layer_types_block",
    "ssm_cfg",
    "mamba_d_state",
)
NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "rms_norm_eps")


class DecoderSizes(NamedTuple):
    """The sizes of a decoder with a gated feed-forward part."""

    hidden: int
    feed_forward: int
    layers: int
    heads: int
    key_heads: int
    head_width: int
    vocabulary: int
    tied: bool
    rank: int  # of the adapter; 0: none

    @property
    def queries(self) -> int:
        return self.heads * self.head_width

    @property
    def keys(self) -> int:
        return self.key_heads * self.head_width

    @property
    def linear_shapes(self) -> tuple[tuple[int, int], ...]:
        """Return the shapes (outputs, inputs) of a layer's matrices."""
        hidden, feed_forward = self.hidden, self.feed_forward
        attention = ((self.queries, hidden), (self.keys, hidden), (self.keys, hidden), (hidden, self.queries))
        return (*attention, (feed_forward, hidden), (feed_forward, hidden), (hidden, feed_forward))

    @property
    def matrices(self) -> int:
        """Return the number of weights in a layer's matrices."""
        return sum(outputs * inputs for outputs, inputs in self.linear_shapes)

    @property
    def adapter(self) -> int:
        """Return the number of weights of a layer's adapter."""
        return self.rank * sum(outputs + inputs for outputs, inputs in self.linear_shapes)

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def total(self) -> int:
        """Return the number of parameters without the adapter."""
        return self.layers * (self.matrices + 2 * self.hidden) + self.hidden + self.embedding * (1 if self.tied else 2)

    @property
    def features(self) -> dict[str, float]:
        """Return the terms of which the table's sums are made, by name."""
        hidden, feed_forward, queries, keys, rank = self.hidden, self.feed_forward, self.queries, self.keys, self.rank
        return {
            "one": 1,
            "H": hidden,
            "F": feed_forward,
            "Q": queries,
            "K": keys,
            "A": self.heads,
            "V": self.vocabulary,
            "D": self.head_width,
            "R": rank,
            "HQ": hidden * queries,
            "HK": hidden * keys,
            "HF": hidden * feed_forward,
            "HV": self.embedding,
            "W": self.matrices,
            "L": self.adapter,
            "RH": rank * hidden,
            "RF": rank * feed_forward,
            "QQ": queries * self.head_width,
        }


def sizes_of(source: ModelSource) -> DecoderSizes:
    """Return the sizes. Raise RequestError for a model, or an adapter, that the table is not for."""
    config = source.config
    classes = config.get("architectures") or [""]
    missing = [name for name in NEEDED if not isinstance(config.get(name), int | float)]
    other = [name for name in OTHER_COMPUTATIONS if config.get(name)]
    reason = None
    if not str(classes[0]).endswith("ForCausalLM"):
        reason = f"its class is {classes[0] or 'not stated'}"
    elif missing or other:
        reason = f"its config has no {missing[0]}" if missing else f"its config has {other[0]}"
    if reason is not None:
        raise RequestError(
            f"a quick plan has formulas only for decoders with gated layers and RMSNorm, and {source.reference!r} is another "
            f"model ({reason}); {LEAVE_OUT}"
        )
    heads = int(config["num_attention_heads"])
    return DecoderSizes(
        hidden=int(config["hidden_size"]),
        feed_forward=int(config["intermediate_size"]),
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        key_heads=int(config.get("num_key_value_heads") or heads),
        head_width=int(config.get("head_dim") or config["hidden_size"] // heads),
        vocabulary=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", False)),
        rank=_rank_of(source),
    )


def _rank_of(source: ModelSource) -> int:
    check_adapter(source)
    return 0 if source.adapter is None else int(source.adapter["r"])


def check_adapter(source: ModelSource) -> None:
    """Raise RequestError for an adapter that the table is not for."""
    adapter = source.adapter
    if adapter is None:
        return
    others = [name for name in ("modules_to_save", "use_dora", "rank_pattern", "lora_dropout") if adapter.get(name)]
    if adapter.get("target_modules") != ALL_LINEAR or others:
        found = others[0] if others else "target_modules"
        raise RequestError(f"a quick plan has formulas only for LoRA around all linear layers, not with {found}; {LEAVE_OUT}")
    if source.base_dtype != "bfloat16" and source.quantized_from is None:
        raise RequestError(
            f"a quick plan has formulas only for LoRA around weights in bfloat16, and the config of {source.base_reference!r} "
            f"says {source.base_dtype}; {LEAVE_OUT}"
        )


def positions_in_config(source: ModelSource) -> int | None:
    """Return the number of positions that the config states, or None if it states none."""
    positions = source.config.get("max_position_embeddings")
    return positions if isinstance(positions, int) else None
