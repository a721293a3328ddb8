"""Tiny models of every type that transformers' auto mappings know: for model_matrix.py, xla_parity.py and the tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

LENGTH = 16
START = 2  # of a decoder's text
VOCABULARY = 96
SIZES = {
    32: "hidden_size d_model n_embd dim embed_dim emb_dim embedding_size word_embed_proj_dim d_embed lru_width "
        "attention_hidden_size decoder_hidden_size model_dim encoder_hidden_dim out_hidden_size projection_dim "
        "text_hidden_size adapter_in_dim encoder_hidden_size output_dim qformer_hidden_size vision_hidden_size",
    48: "intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim hidden_dim ffn_hidden_size "
        "shared_intermediate_size mlp_dim projector_hidden_size projector_intermediate_size",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers "
        "num_decoder_layers num_experts_per_tok moe_topk moe_k num_key_value_heads num_kv_heads n_kv_heads depth "
        "spatial_merge_size temporal_patch_size attn_layer_period",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts "
        "num_local_experts n_routed_experts linear_num_key_heads linear_num_value_heads",
    8: "head_dim d_kv kv_channels qk_nope_head_dim qk_rope_head_dim v_head_dim rotary_dim linear_key_head_dim "
        "linear_value_head_dim patch_size",
    16: "moe_intermediate_size q_lora_rank kv_lora_rank shared_expert_intermediate_size vocab_size_per_layer_input "
        "hidden_size_per_layer_input expert_ffn_hidden_size",
    VOCABULARY: "vocab_size",
    64: "max_position_embeddings n_positions n_ctx max_seq_len max_source_positions max_target_positions "
        "max_sequence_length context_length",
    1: "n_shared_experts first_k_dense_replace n_group topk_group attn_layer_offset",
    0: "pad_token_id",
}  # fmt: skip
KINDS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "image": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "image-text": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "speech": modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
}  # fmt: skip


def every_model(kinds: str) -> Iterator[tuple[str, str, str]]:
    """(kind, model type, class); the first class of a type and kind."""
    for kind in kinds.split(","):
        for model_type, found in KINDS[kind].items():
            yield kind, model_type, found if isinstance(found, str) else found[0]


OTHERWISE: tuple[dict[str, Any], ...] = (  # None: as it is
    {}, {"num_key_value_heads": 4}, {"head_dim": None}, {"head_dim": 8, "num_experts_per_tok": 1},
    {"mamba_n_heads": 8, "mamba_d_head": 8}, {"num_heads": 8, "head_dim": 8}, {"patch_size": 4, "image_size": 64},
    {"mrope_section": [2, 1, 1]}, {"attention_hidden_size": 64},
)  # fmt: skip
STAGES = {"hidden_sizes": 16, "embed_dims": 16, "depths": 1, "num_heads": 2, "num_attention_heads": 2}  # of as many as there are
DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
MOST_LAYERS = 7
MOST_PARAMETERS = 20e6


def tiny_config(config_class: Any, otherwise: dict[str, Any], default: Any = None) -> Any:
    """Return the class's default config with small sizes, parts of it likewise. A list of a kind for each layer is cut where it
    has had every kind. ``default``: the config to make small, if it is not the class's default."""
    default = config_class() if default is None else default
    fields = default.to_dict()
    asked = {name: size for name, size in (_small_fields(default, fields) | otherwise).items() if size is not None}
    asked = {name: size for name, size in asked.items() if name in fields}
    rope = fields.get("rope_parameters")
    if isinstance(rope, dict) and rope.get("rope_type") == "default" and "mrope_section" in otherwise:
        asked["rope_parameters"] = rope | {"mrope_section": otherwise["mrope_section"]}  # of the dimensions of a head
    if default.is_encoder_decoder:
        asked["decoder_start_token_id"] = _start(default)
    for name in default.sub_configs:
        part = _value(default, name)
        if isinstance(part, transformers.PretrainedConfig):
            small = tiny_config(type(part), otherwise, part)
            asked[name] = small.to_dict() if type(part) in transformers.CONFIG_MAPPING.values() else small
    return config_class(**asked)


def _small_fields(default: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Return small values of the fields of a config whose own values are ``fields``."""
    sizes = {name: size for size, names in SIZES.items() for name in names.split()}
    asked: dict[str, Any] = {name: size for name, size in sizes.items() if isinstance(_value(default, name), int)}
    for name, size in STAGES.items():
        if isinstance(stages := _value(default, name), list | tuple):
            asked[name] = [size] * len(stages)
    for name in ("bos_token_id", "eos_token_id"):
        if isinstance(_value(default, name), int | list):
            asked[name] = 1
    if isinstance(_value(default, "image_size"), int):
        asked["image_size"] = 32
    if hasattr(default, "use_cache"):
        asked["use_cache"] = False
    return _placeholders(fields) | asked | _layers(default) | {"attn_layer_indices": [1]}


def _placeholders(fields: dict[str, Any]) -> dict[str, int]:
    """Return ids within the vocabulary for the tokens that stand for images and sound. No prompt of a test has them."""
    names = [
        name for name, value in fields.items()
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int) and value >= VOCABULARY
    ]  # fmt: skip
    return {name: VOCABULARY - 1 - number for number, name in enumerate(names)}


def _start(default: Any) -> int:
    """Return a token that a text begins with. It is padding where it is so by default."""
    start, padding = (_value(default, name) for name in ("decoder_start_token_id", "pad_token_id"))
    return 0 if start is None or start == padding else START


def _layers(default: Any) -> dict[str, Any]:
    depth = next((count for name in DEPTHS if isinstance(count := _value(default, name), int)), 0)
    lists = {name: value for name, value in vars(default).items() if isinstance(value, list) and len(value) == depth > 2}
    kinds = {name: value for name, value in lists.items() if all(isinstance(kind, str) for kind in value)}
    if all(set(value) == {"linear_attention"} for value in kinds.values()) and "layer_types" in kinds:
        lists["layer_types"] = kinds["layer_types"] = ["linear_attention", "full_attention", *kinds["layer_types"][2:]]
    kinds |= {"layer_types": value} if (value := _value(default, "layer_types")) and not kinds else {}
    if not kinds:
        return {}
    needed = max(max(value.index(kind) for kind in dict.fromkeys(value)) + 1 for value in kinds.values())
    count = max(2, min(needed, MOST_LAYERS))
    return {name: value[:count] for name, value in lists.items()} | {
        name: count for name in DEPTHS if isinstance(_value(default, name), int)
    }


def _value(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # a config that differs by layer refuses to say one value of all
        return None


def every_tiny(model_type: str, architecture: str) -> Iterator[Any]:
    """Yield configs of a model type that its class can be built from, the first tried first. Raises the first problem where there
    are none: this script does not know the fields."""
    problem: Exception | None = None
    built = 0
    for otherwise in OTHERWISE:
        try:
            config = tiny_config(transformers.CONFIG_MAPPING[model_type], otherwise)
            config.architectures = [architecture]
            with torch.device("meta"):
                model = getattr(transformers, architecture)(config)
            parameters = sum(one.numel() for one in model.parameters())
            if parameters > MOST_PARAMETERS:
                raise ValueError(f"{parameters / 1e6:.0f} M parameters with the sizes that are known here")
        except Exception as error:  # each class has its own kinds
            problem = problem or error
            continue
        built += 1
        yield config
    if not built and problem is not None:
        raise problem


def made_tiny(model_type: str, architecture: str, folder: Path, otherwise: dict[str, Any]) -> Any:
    """Save a tiny model with every part at work. Raises what making it raises: fields that this script does not know."""
    config = tiny_config(transformers.CONFIG_MAPPING[model_type], otherwise)
    config.architectures = [architecture]
    torch.manual_seed(0)
    with torch.device("meta"):
        parameters = sum(one.numel() for one in getattr(transformers, architecture)(config).parameters())
    if parameters > MOST_PARAMETERS:
        raise ValueError(f"{parameters / 1e6:.0f} M parameters with the sizes that are known here")
    return save_tiny(config, architecture, folder)


def save_tiny(config: Any, architecture: str, folder: Path) -> Any:
    """Save a model of random weights, larger than transformers' own so that every part shows, and return its config."""
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model.config


def inputs_of(kind: str, config: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    if kind == "image":
        side = config.image_size if isinstance(getattr(config, "image_size", None), int) else 32
        return {"pixel_values": torch.rand(2, getattr(config, "num_channels", 3), side, side)}
    ids, mask = torch.randint(5, 90, (2, LENGTH)), torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, 12:] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    return given | {"decoder_input_ids": ids} if kind == "seq2seq" else given
