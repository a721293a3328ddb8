"""The tokenizer of a model, and how many tokens the model takes."""

from __future__ import annotations

from typing import Any

from upshift.errors import RequestError
from upshift.models.build import read_config
from upshift.models.describe import max_positions
from upshift.models.source import ModelSource


def load_tokenizer(source: ModelSource) -> Any:
    """Raises RequestError where there is none, or a slow one alone."""
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(source.directory)
    except (OSError, ValueError) as error:
        raise RequestError(f"{source.reference!r} has no tokenizer that loads ({error}); save one beside the model") from None
    if not tokenizer.is_fast:
        raise RequestError(f"{source.reference!r} has no tokenizer.json; save its tokenizer with save_pretrained")
    return tokenizer


def positions(source: ModelSource) -> int | None:
    """Tokens that the model has positions for; None where it sets no limit."""
    import torch
    from transformers import AutoModel

    with torch.device("meta"):
        return max_positions(AutoModel.from_config(read_config(source)))
