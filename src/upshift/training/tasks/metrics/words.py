"""Compare the texts that a model writes down of sounds with those of the rows: the word error rate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from upshift.training.data.rows.token_rows import IGNORED
from upshift.training.tasks.metrics.task_metrics import Inputs, TaskMetrics

SPARE_TOKENS = 8  # special ones that a model writes before and after a text
LABELS = "labels"


def speech_metrics(tokenizer: Any, *, writes: bool, longest: int, limit: int | None) -> TaskMetrics:
    """Return the metrics of texts of sounds.

    Args:
        tokenizer: makes a text of tokens.
        writes: the model writes token by token; else it has a CTC head, whose likeliest letters are the text.
        longest: the tokens of the longest text that is held out. A model that does not end writes twice as many.
        limit: the most tokens that the model can write, or None.
    """
    length = min(2 * longest + SPARE_TOKENS, limit or 2 * longest + SPARE_TOKENS)

    def predict(model: nn.Module, inputs: Inputs, outputs: Any) -> Tensor:
        if not writes:
            return outputs["logits"].argmax(-1)  # type: ignore[no-any-return]
        with torch.compiler.set_stance("force_eager"):  # each length would be compiled anew
            return model.generate(  # type: ignore[operator, no-any-return]
                **{name: value for name, value in inputs.items() if name != LABELS}, max_length=length
            )

    def compute(predicted: np.ndarray, examples: Sequence[Any]) -> dict[str, float]:
        rows = np.where(predicted == IGNORED, tokenizer.pad_token_id, predicted)
        texts = [str(tokenizer.decode(row.tolist(), skip_special_tokens=True)) for row in rows]
        return {"wer": word_error_rate(texts, [example.text for example in examples])}

    return TaskMetrics(larger_is_better={"wer": False}, predict=predict, compute=compute)


def word_error_rate(texts: Sequence[str], real: Sequence[str]) -> float:
    """Return the words to insert, delete and replace in the texts, over the words of the real ones. It may exceed 1."""
    pairs = [(text.split(), other.split()) for text, other in zip(texts, real, strict=True)]
    return sum(num_edits(*pair) for pair in pairs) / sum(len(words) for _, words in pairs)


def num_edits(words: Sequence[str], real: Sequence[str]) -> int:
    """Return the smallest number of words to insert, delete and replace (Levenshtein)."""
    row = list(range(len(real) + 1))
    for number, word in enumerate(words, start=1):
        above, row = row, [number]
        for place, other in enumerate(real):
            row.append(min(above[place] + (word != other), above[place + 1] + 1, row[place] + 1))
    return row[-1]
