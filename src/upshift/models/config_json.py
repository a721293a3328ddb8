"""Read and write the JSON files of a model as transformers reads and writes them, without transformers.

JSON has no number for infinity. transformers writes ``{"__float__": "Infinity"}`` in its place and turns it back when it reads
a config. Every config that Upshift reads or writes goes through these functions.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

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
