"""Read and write a model's JSON files as transformers does, and read attention sizes and the padding token from a config.

JSON has no number for infinity. transformers writes ``{"__float__": "Infinity"}`` in its place and turns it back when it reads
a config. Every config that Upshift reads or writes goes through these functions. They do not import transformers.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from upshift.errors import RequestError

# Names of the number of positions. The names that differ for encoder and decoder (LED), and for ALiBi's table (MPT), follow the
# usual one.
POSITIONS = ("max_position_embeddings", "max_encoder_position_embeddings", "max_decoder_position_embeddings", "max_seq_len")
FLOAT_TAG = "__float__"
TAGGED_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def read_json(path: Path) -> Any:
    """Return the JSON document in a model's file. Raise RequestError if the file cannot be read or is not valid JSON."""
    try:
        return decode_floats(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise RequestError(f"cannot read {path} ({error.strerror}); save the model again") from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path} is not valid JSON ({error}); save the model again") from None


def config_text(config: dict[str, Any]) -> str:
    """Return a config as the text of a config.json that transformers reads."""
    return json.dumps(encode_floats(config), indent=2, allow_nan=False) + "\n"


def decode_floats(document: Any) -> Any:
    """Return a JSON document with each tag replaced by its number."""
    if isinstance(document, dict):
        if set(document) == {FLOAT_TAG} and isinstance(document[FLOAT_TAG], str):
            return TAGGED_FLOATS.get(document[FLOAT_TAG], document)
        return {key: decode_floats(value) for key, value in document.items()}
    if isinstance(document, list):
        return [decode_floats(value) for value in document]
    return document


def encode_floats(document: Any) -> Any:
    """Return a document with each number that JSON does not have replaced by its tag."""
    if isinstance(document, float) and not math.isfinite(document):
        tag = "NaN" if math.isnan(document) else "Infinity" if document > 0 else "-Infinity"
        return {FLOAT_TAG: tag}
    if isinstance(document, dict):
        return {key: encode_floats(value) for key, value in document.items()}
    if isinstance(document, list | tuple):
        return [encode_floats(value) for value in document]
    return document


def text_configs(config: Any) -> tuple[Any, ...]:
    """Return the configs of the parts that read or write text: one, or an encoder's and a decoder's that are models of their own.

    transformers' ``get_text_config()`` gives the decoder's of two, or raises ValueError for a text encoder beside a decoder."""
    values: list[Any] = [getattr(config, name, None) for name in ("encoder", "text_encoder", "decoder")]
    parts = [value for value in values if hasattr(value, "get_text_config")]
    if len(parts) > 1:
        return tuple(part.get_text_config() for part in parts)
    return (config.get_text_config(),)


class Heads(NamedTuple):
    """The attention heads that a config states."""

    queries: int
    keys: int  # heads of keys and values
    width: int | None  # size of a head; None if the config does not say


def heads_of(text: Any) -> Heads | None:
    """Return the attention heads that a text config states, or None if it states no number.

    If layers differ, return the largest."""
    num_queries = _config_value(text, "num_attention_heads")
    num_keys = _config_value(text, "num_key_value_heads")
    if not isinstance(num_queries, int) or num_queries <= 0:
        return None
    width = _config_value(text, "head_dim")
    hidden_size = _config_value(text, "hidden_size")
    if not width and isinstance(hidden_size, int):
        width = hidden_size // num_queries
    return Heads(num_queries, num_keys if isinstance(num_keys, int) and num_keys > 0 else num_queries, width or None)


def _config_value(text: Any, name: str) -> Any:
    """Return a value of a config, or None if it has none. If layers differ, return the largest."""
    try:
        return getattr(text, name, None)
    except RuntimeError:  # transformers gives no single value if layers differ
        values = [getattr(layer, name, None) for layer in text.per_layer_config]
        return max((value for value in values if isinstance(value, int)), default=None)


def window_of(text: Any) -> int | None:
    """Return the number of tokens that some layers look back, or None if the config limits no layer."""
    sizes = (_config_value(text, name) for name in ("sliding_window", "attention_chunk_size"))
    return next((size for size in sizes if size), None)


def positions_in(text: Any) -> int | None:
    """Return the number of positions in the config, or None if there is no limit.

    A model may keep some positions for padding. ``profile_cache.positions_of`` returns the number of tokens that it takes.
    """
    limits = [value for name in POSITIONS if isinstance(value := getattr(text, name, None), int) and value > 0]
    return min(limits, default=None)


def stable_positions_in(text: Any) -> int | None:
    """Return the row length up to which the keys of a token do not change, or None if they never change.

    With ``longrope``, the longest row of a batch decides which of two factors rotates all rows (transformers'
    modeling_rope_utils.py). Keys that were cached earlier do not change with it.
    """
    parameters = getattr(text, "rope_parameters", None) or {}
    variants = [parameters, *(rope for rope in parameters.values() if isinstance(rope, dict))]
    limits = [
        rope.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
        for rope in variants
        if rope.get("rope_type") == "longrope"
    ]
    return min((limit for limit in limits if isinstance(limit, int)), default=None)


def label_names(config: Any) -> tuple[str, ...]:
    """Return the names of a classifier's labels, in the order of its scores."""
    names: dict[Any, str] = config.id2label or {}
    return tuple(names[index] for index in sorted(names))


def padding_of(text: Any) -> int | None:
    """Return the id of the padding token, or None if the config names none or the vocabulary does not have it."""
    token = getattr(text, "pad_token_id", None)
    vocab_size = getattr(text, "vocab_size", None)  # CANINE hashes characters, and has none
    return token if isinstance(token, int) and token >= 0 and (vocab_size is None or token < vocab_size) else None
