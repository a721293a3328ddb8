"""Describe what a model learns of its training data: sequences as parts of text that are learned or not, and counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from upshift.training.data.corpus import IGNORED
from upshift.training.data.dataset import TrainingData

CONTROL_CHARACTERS = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), 127)}  # a terminal would obey them


@dataclass(frozen=True)
class TextPart:
    """A part of a sequence."""

    text: str
    is_learned: bool | None  # None: tokens are drawn while the model is trained, so no part is learned always


@dataclass(frozen=True)
class DataCounts:
    """The counts of a split. Learned tokens are those whose prediction counts in the loss."""

    num_sequences: int
    num_tokens: int
    num_learned: int | None


def count_tokens(data: TrainingData) -> DataCounts:
    """Return the counts of the training split."""
    sequences = data.training
    num_learned = None
    if data.objective.kind == "causal-lm" or sequences.labels is not None:
        num_learned = int(data.objective.counted_labels(sequences, np.arange(len(sequences))).sum())
    return DataCounts(len(sequences), int(sequences.lengths.sum()), num_learned)


def show_sequences(data: TrainingData, num_sequences: int) -> Iterator[list[TextPart]]:
    """Yield the first sequences of the training split, each as parts of text. Without a tokenizer a part is a list of ids."""
    sequences = data.training
    is_causal = data.objective.kind == "causal-lm"
    starts = sequences.starts.tolist()[:num_sequences]
    for start, length in zip(starts, sequences.lengths.tolist(), strict=False):
        tokens = sequences.tokens[start : start + length].tolist()
        learned: list[bool | None] = [True if is_causal else None] * length
        if sequences.labels is not None:
            learned = (sequences.labels[start : start + length] != IGNORED).tolist()
        if is_causal:
            learned[0] = False  # nothing stands before it, from which it could be predicted
        yield _parts(tokens, learned, data.tokenizer)


def _parts(tokens: list[int], learned: list[bool | None], tokenizer: Any | None) -> list[TextPart]:
    parts = []
    for is_learned, members in groupby(zip(tokens, learned, strict=True), key=lambda member: member[1]):
        ids = [token for token, _ in members]
        text = " ".join(map(str, ids))
        if tokenizer is not None:
            text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        parts.append(TextPart(text.translate(CONTROL_CHARACTERS), is_learned))
    return parts
