"""Compare the tags that a classifier predicts for words with those of the rows: accuracy by words, precision and F1 by entities.

An entity is right if its type and its first and last word are. Entities are read from tags as seqeval and conlleval read them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from upshift.training.data.rows.token_rows import IGNORED
from upshift.training.tasks.metrics.task_metrics import Inputs, TaskMetrics, f1_of, share

OUTSIDE = "O"
ENTITY_TAG = re.compile(r"[BIESLU]-.+")
SAME_PREFIXES = {"L": "E", "U": "S"}  # of BILOU; those of IOBES
FIRST_AFTER = {"B": "BISEO", "S": "BISEO", "I": "ESO", "E": "ESO"}  # a tag begins an entity after these
LAST_BEFORE = {"E": "BISEO", "S": "BISEO", "B": "BSO", "I": "BSO"}  # a tag ends an entity before these
Entity = tuple[str, int, int]  # type, first word and last word


def tag_metrics(names: Sequence[str]) -> TaskMetrics:
    """Return the metrics of words with tags. ``names``: the tags by number; only those such as ``B-PER`` name entities."""
    has_entities = any(name != OUTSIDE for name in names) and all(name == OUTSIDE or ENTITY_TAG.fullmatch(name) for name in names)

    def predict(model: nn.Module, inputs: Inputs, outputs: Any) -> Tensor:
        """Return the tags of first tokens of words, and no tag elsewhere."""
        predicted: Tensor = outputs["logits"].argmax(-1)
        return predicted.masked_fill(inputs["labels"] == IGNORED, IGNORED)

    def compute(predicted: np.ndarray, examples: Sequence[Any]) -> dict[str, float]:
        found = [row[row != IGNORED].tolist() for row in predicted]
        real = [example.learned[example.learned != IGNORED].tolist() for example in examples]
        num_right = sum(one == other for pair in zip(found, real, strict=True) for one, other in zip(*pair, strict=True))
        accuracy = {"accuracy": num_right / sum(map(len, real))}
        return {**_entity_scores(found, real, names), **accuracy} if has_entities else accuracy

    names_of_metrics = ("f1", "precision", "recall", "accuracy") if has_entities else ("accuracy",)
    return TaskMetrics(larger_is_better=dict.fromkeys(names_of_metrics, True), predict=predict, compute=compute)


def _entity_scores(found: Sequence[list[int]], real: Sequence[list[int]], names: Sequence[str]) -> dict[str, float]:
    found_entities, real_entities = (
        {(row, *entity) for row, tags in enumerate(rows) for entity in read_entities([names[tag] for tag in tags])}
        for rows in (found, real)
    )
    num_right = len(found_entities & real_entities)
    return {
        "f1": f1_of(num_right, len(found_entities), len(real_entities)),
        "precision": share(num_right, len(found_entities)),
        "recall": share(num_right, len(real_entities)),
    }


def read_entities(tags: Sequence[str]) -> Iterator[Entity]:
    """Yield the entities of a row's tags, in order. A change of the type begins an entity, and ends one."""
    start: int | None = None
    previous, previous_kind = OUTSIDE, ""
    for place, tag in enumerate((*tags, OUTSIDE)):
        prefix, _, kind = tag.partition("-")
        prefix = SAME_PREFIXES.get(prefix, prefix)
        changes = previous_kind != kind
        is_after_entity = previous != OUTSIDE and (changes or prefix in LAST_BEFORE[previous])
        if start is not None and is_after_entity:
            yield previous_kind, start, place - 1
            start = None
        if prefix != OUTSIDE and (changes or previous in FIRST_AFTER[prefix]):
            start = place
        previous, previous_kind = prefix, kind
