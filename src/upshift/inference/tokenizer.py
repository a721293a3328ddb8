"""Load the tokenizer of a model, and list its files.

Pad rows of token ids of unequal lengths to one array.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from upshift.errors import RequestError
from upshift.models.source import ModelSource

FILES = (
    "tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "chat_template*", "vocab.*", "merges.txt", "*.model",
)  # fmt: skip


def load_tokenizer(source: ModelSource) -> Any:
    """Load the tokenizer. Raise RequestError if there is none, or only a slow one."""
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(source.directory)
    except (OSError, ValueError) as error:
        raise RequestError(f"{source.reference!r} has no tokenizer that loads ({error}); save one beside the model") from None
    if not tokenizer.is_fast:
        raise RequestError(f"{source.reference!r} has no tokenizer.json; save its tokenizer with save_pretrained")
    return tokenizer


def tokenizer_files(source: ModelSource) -> list[Path]:
    """Return the files that transformers reads of a tokenizer and its chat template."""
    found = [] if source.directory is None else [path for pattern in FILES for path in source.directory.glob(pattern)]
    return sorted({path for path in found if path.is_file()})


def padded_rows(rows: Sequence[Sequence[int]], *, pad: int = 0, left: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and mask of 0 and 1, int64 [N, S], padded on one side. S is the length of the longest row, or 1 if
    all are empty."""
    longest = max(1, *(len(row) for row in rows))
    ids = np.full((len(rows), longest), pad, dtype=np.int64)
    mask = np.zeros_like(ids)
    for number, row in enumerate(rows):
        places = slice(longest - len(row), longest) if left else slice(len(row))
        ids[number, places] = row
        mask[number, places] = 1
    return ids, mask
