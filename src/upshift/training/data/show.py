"""Describe what a model learns of its training data: sequences as parts of text that are learned or not, and counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from upshift.training.data.dataset import TrainingData
from upshift.training.data.rows.token_rows import IGNORED

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
    if data.objective.kind != "masked-lm" or sequences.labels is not None:
        labelled = data.objective.changed(has_pairs=False, has_ratings=False)  # count the labels of pairs, not the pairs
        step = 2 if data.objective.has_ratings else 1  # nothing is learned of mismatched sequences
        num_learned = labelled.num_labels(sequences, np.arange(0, len(sequences), step), seed=0, epoch=0)  # nothing is drawn
    return DataCounts(len(sequences), int(sequences.lengths.sum()), num_learned)


def show_sequences(data: TrainingData, num_sequences: int) -> Iterator[list[TextPart]]:
    """Yield the first sequences of the training split, each as parts of text. Without a tokenizer a part is a list of ids."""
    for index in range(min(num_sequences, len(data.training))):
        yield _parts(_tokens_of(data, index), data.tokenizer)


def _tokens_of(data: TrainingData, index: int) -> list[tuple[int, bool | None]]:
    """Return the tokens of a sequence, and whether each is learned. A token that is learned is the label, not the input."""
    sequences = data.training
    kind = data.objective.kind
    start = int(sequences.starts[index])
    length = int(sequences.lengths[index])
    tokens = sequences.tokens[start : start + length].tolist()
    if sequences.labels is None:
        default = None if kind == "masked-lm" else True
        learned: list[bool | None] = [default] * length
        num_inputs = length // 2 if kind == "seq2seq-lm" else 0
        learned[:num_inputs] = [False] * num_inputs
    else:
        labels = sequences.labels[start : start + length].tolist()
        learned = [label != IGNORED for label in labels]
        tokens = [token if label == IGNORED else label for token, label in zip(tokens, labels, strict=True)]
    if kind == "causal-lm":
        tokens[0] = int(sequences.tokens[start])
        learned[0] = False  # nothing stands before it, from which it could be predicted
    members = list(zip(tokens, learned, strict=True))
    if sequences.source_lengths is None:
        return members
    source_length = int(sequences.source_lengths[index])  # the tokens after it are only room for the labels
    return members[:source_length] + [member for member in members[source_length:] if member[1]]


def _parts(tokens: list[tuple[int, bool | None]], tokenizer: Any | None) -> list[TextPart]:
    parts = []
    for is_learned, members in groupby(tokens, key=lambda member: member[1]):
        ids = [token for token, _ in members]
        text = " ".join(map(str, ids))
        if tokenizer is not None:
            text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        parts.append(TextPart(text.translate(CONTROL_CHARACTERS), is_learned))
    return parts
