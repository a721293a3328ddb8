"""Load the tokenizer of a model, list its files, and pad rows of token ids of unequal lengths to one array. Turn panics of Rust
code into errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from upshift.errors import RequestError
from upshift.models.source import ModelSource
from upshift.text import NO_VOCABULARY, has_words

FILES = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.*",
    "merges.txt",
    "*.model",
)


def load_tokenizer(source: ModelSource) -> Any:
    """Load the fast tokenizer of a model. Raise RequestError if it has none."""
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(source.directory)
    except (OSError, ValueError) as error:
        raise RequestError(f"{source.reference!r} has no tokenizer that loads ({error}); save one beside the model") from None
    if not tokenizer.is_fast:
        raise RequestError(f"{source.reference!r} has no tokenizer.json; save its tokenizer with save_pretrained")
    if not has_words(tokenizer):
        raise RequestError(f"{source.reference!r} has no tokenizer that loads ({NO_VOCABULARY}); save one beside the model")
    return tokenizer


def tokenizer_files(source: ModelSource) -> list[Path]:
    """Return the files from which transformers loads a tokenizer and its chat template."""
    if source.directory is None:
        return []
    matches = [path for pattern in FILES for path in source.directory.glob(pattern)]
    return sorted({path for path in matches if path.is_file()})


def padded_rows(rows: Sequence[Sequence[int]], *, pad: int = 0, left: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and mask of 0 and 1, both int64 [N, S], padded on one side.

    S is the length of the longest row, or 1 if all rows are empty."""
    length = max(1, *(len(row) for row in rows))
    ids = np.full((len(rows), length), pad, dtype=np.int64)
    mask = np.zeros_like(ids)
    for index, row in enumerate(rows):
        span = slice(length - len(row), length) if left else slice(len(row))
        ids[index, span] = row
        mask[index, span] = 1
    return ids, mask


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise RuntimeError in place of an error that is no Exception: a panic of Rust code, such as that of tokenizers.

    Such a panic would end the engine, with the requests of others."""
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # the class of panics can be imported from nowhere
        raise as_exception(error) from error


def as_exception(error: BaseException) -> Exception:
    return error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
