"""Read and write the JSON files of a model as transformers reads and writes them, without transformers.

JSON has no number for infinity. transformers writes ``{"__float__": "Infinity"}`` in its place and turns it back when it reads
a config. Every config that Upshift reads or writes goes through these functions.

Read the sizes of attention and the padding token from a config.

The names that transformers gives them are read here, and in models alone.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from upshift.errors import RequestError

FLOAT_TAG = "__float__"
FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def read_json(path: Path) -> Any:
    """Return the document in a file of a model. Raise RequestError for a file that is no JSON."""
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
    """Return a JSON document with the numbers that its tags stand for."""
    if isinstance(document, dict):
        if set(document) == {FLOAT_TAG} and isinstance(document[FLOAT_TAG], str):
            return FLOATS.get(document[FLOAT_TAG], document)
        return {key: decode_floats(value) for key, value in document.items()}
    if isinstance(document, list):
        return [decode_floats(value) for value in document]
    return document


def encode_floats(document: Any) -> Any:
    """Return a document with tags in place of the numbers that JSON does not have."""
    if isinstance(document, float) and not math.isfinite(document):
        tag = "NaN" if math.isnan(document) else "Infinity" if document > 0 else "-Infinity"
        return {FLOAT_TAG: tag}
    if isinstance(document, dict):
        return {key: encode_floats(value) for key, value in document.items()}
    if isinstance(document, list | tuple):
        return [encode_floats(value) for value in document]
    return document


# The names for encoders and decoders that differ (LED) follow the usual one.
POSITIONS = ("max_position_embeddings", "max_encoder_position_embeddings", "max_decoder_position_embeddings")


class Heads(NamedTuple):
    queries: int
    keys: int  # and values
    width: int | None  # numbers of a head; None: the config does not say


def heads_of(text: Any) -> Heads | None:
    """Return the attention heads that a text config of transformers states, the largest where layers differ, or None if it states
    no number."""
    queries, keys = (_value(text, name) for name in ("num_attention_heads", "num_key_value_heads"))
    if not isinstance(queries, int) or queries <= 0:
        return None
    width, hidden = (_value(text, name) for name in ("head_dim", "hidden_size"))
    if not width and isinstance(hidden, int):
        width = hidden // queries
    return Heads(queries, keys if isinstance(keys, int) and keys > 0 else queries, width or None)


def _value(text: Any, name: str) -> Any:
    """Return a value of a config, the largest one where layers differ, or None if it has none."""
    try:
        return getattr(text, name, None)
    except RuntimeError:  # transformers says no single value of layers that differ
        values = [getattr(layer, name, None) for layer in text.per_layer_config]
        return max((value for value in values if isinstance(value, int)), default=None)


def window_of(text: Any) -> int | None:
    """Return how many tokens back some layers look, or None if by the config all layers look at all tokens before."""
    sizes = (_value(text, name) for name in ("sliding_window", "attention_chunk_size"))
    return next((size for size in sizes if size), None)


def positions_in(text: Any) -> int | None:
    """Return the number of positions of the config, or None if there is no limit.

    A model may keep some positions for padding: ``models.store.positions_of`` returns how many tokens the model takes.
    """
    limits = [value for name in POSITIONS if isinstance(value := getattr(text, name, None), int) and value > 0]
    return min(limits, default=None)


def alike_positions_in(text: Any) -> int | None:
    """Return how many positions a row may have before all of its keys are computed otherwise, or None if they never are.

    With ``longrope`` the longest row of a batch decides by which of two factors all rows are rotated (transformers'
    modeling_rope_utils.py). Keys that are kept from before do not change with it.
    """
    said = getattr(text, "rope_parameters", None) or {}
    kinds = [said, *(rope for rope in said.values() if isinstance(rope, dict))]
    limits = [
        rope.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
        for rope in kinds
        if rope.get("rope_type") == "longrope"
    ]
    return min((limit for limit in limits if isinstance(limit, int)), default=None)


def padding_of(text: Any) -> int | None:
    """Return the id of the padding token, or None if the config names none, or one that is not in the vocabulary."""
    token = getattr(text, "pad_token_id", None)
    return token if token is not None and 0 <= token < text.vocab_size else None
