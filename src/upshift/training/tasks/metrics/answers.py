"""Compare the answers that a model finds in contexts with those of the rows: exact matches, and F1 of words, as SQuAD does.

The answer is chosen among the likeliest starts and ends of all rows of a context, as in transformers' run_qa.py.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from upshift.training.tasks.metrics.task_metrics import TaskMetrics, f1_of

NUM_ENDS = 20  # likeliest starts, and ends, that are tried
LONGEST_ANSWER = 30  # tokens
ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


class ContextRow(NamedTuple):
    """A row of a context. ``spans``: the characters [T, 2] of its tokens, -1 outside of the context.

    ``start``: the place of its first token among those of a padded row. ``no_answer``: that of the token that says so."""

    spans: np.ndarray
    start: int
    no_answer: int


class Question(NamedTuple):
    """A question: its context, its rows, and the texts of its answers. It may have none."""

    context: str
    rows: list[ContextRow]
    answers: tuple[str, ...]


def answer_metrics(questions: Sequence[Question]) -> TaskMetrics:
    """Return the metrics of answers. ``questions``: those whose rows are the examples of the evaluation, in their order."""
    may_lack_answer = any(not question.answers for question in questions)

    def compute(predicted: Any, examples: Sequence[Any]) -> dict[str, float]:
        starts, ends = predicted
        number = 0
        scores = []
        for question in questions:
            rows = slice(number, number + len(question.rows))
            number = rows.stop
            text = find_answer(question, starts[rows], ends[rows], may_lack_answer=may_lack_answer)
            scores.append(compare_answers(text, question.answers))
        exact, f1 = (sum(column) / len(scores) for column in zip(*scores, strict=True))
        return {"exact_match": exact, "f1": f1}

    return TaskMetrics(
        larger_is_better={"f1": True, "exact_match": True},
        predict=lambda model, inputs, outputs: (outputs["start_logits"].float(), outputs["end_logits"].float()),
        compute=compute,
    )


def find_answer(question: Question, starts: np.ndarray, ends: np.ndarray, *, may_lack_answer: bool) -> str:
    """Return the likeliest answer, or an empty text for none.

    Args:
        starts, ends: the scores [rows, width] of the tokens as the first and the last one of the answer.
        may_lack_answer: no answer is right if all rows score it higher than any answer.
    """
    best, best_score = "", -np.inf
    without_answer = np.inf
    for row, row_starts, row_ends in zip(question.rows, starts, ends, strict=True):
        own = slice(row.start, row.start + len(row.spans))
        start_scores, end_scores = row_starts[own], row_ends[own]
        without_answer = min(without_answer, start_scores[row.no_answer] + end_scores[row.no_answer])
        for start, end in _likeliest_ends(start_scores, end_scores, row):
            score = start_scores[start] + end_scores[end]
            if score > best_score:
                best, best_score = question.context[row.spans[start, 0] : row.spans[end, 1]], score
    return "" if may_lack_answer and without_answer > best_score else best


def _likeliest_ends(start_scores: np.ndarray, end_scores: np.ndarray, row: ContextRow) -> Iterator[tuple[int, int]]:
    """Yield the places of the first and the last token of possible answers."""
    starts, ends = (np.argsort(scores)[: -NUM_ENDS - 1 : -1].tolist() for scores in (start_scores, end_scores))
    for start in starts:
        for end in ends:
            is_inside = row.spans[start, 0] >= 0 and row.spans[end, 0] >= 0
            if is_inside and start <= end < start + LONGEST_ANSWER:
                yield start, end


def compare_answers(text: str, answers: Sequence[str]) -> tuple[float, float]:
    """Return whether a text is one of the answers, and its best F1 among them. An empty text is right if there is none."""
    words = normalized(text).split()
    pairs = []
    for answer in answers or ("",):
        real = normalized(answer).split()
        common = sum((Counter(words) & Counter(real)).values())
        is_equal = words == real
        pairs.append((float(is_equal), f1_of(common, len(words), len(real)) if words and real else float(is_equal)))
    exact, f1 = (max(column) for column in zip(*pairs, strict=True))
    return exact, f1


def normalized(text: str) -> str:
    """Return a text in lower case, without punctuation, articles and double spaces, as SQuAD compares it."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())
