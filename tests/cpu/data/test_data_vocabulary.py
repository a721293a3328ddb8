"""Ids at the end of a vocabulary: the first that a model lacks is named with its row, and padding is an id that it has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from upshift.training.batches.objective import Objective
from upshift.training.data import dataset
from upshift.training.data.rows.token_rows import TokenRow
from upshift.training.data.tokens import TokenizedCorpus


@pytest.mark.parametrize(("pad", "expected"), [(0, 0), (4, 4), (5, 0), (9, 0)])
def test_padding_is_an_id_that_the_model_has(pad: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    objective = Objective(pad_token_id=pad, vocab_size=5)
    monkeypatch.setattr(dataset, "find_objective", lambda source, tokenizer, has_rewards: objective)
    source: Any = None
    assert dataset._find_objective(source, object()).pad_token_id == expected


def test_the_first_row_with_an_id_outside_the_vocabulary_is_named() -> None:
    """A label counts as an id does."""
    rows = [
        ("row 1", "a text"), ("row 2", TokenRow(np.array([1, 4]), None)),
        ("row 3", TokenRow(np.array([1, 2]), np.array([-100, 5]))), ("row 4", TokenRow(np.array([9]), None)),
    ]  # fmt: skip
    tokenized = TokenizedCorpus.from_documents([np.array([1, 9])])
    documents = SimpleNamespace(with_places=lambda: iter(rows))
    corpus: Any = SimpleNamespace(is_tokenized=True, documents=documents, evaluation=None)
    refusal = str(dataset._outside_vocabulary(corpus, tokenized, 5))
    assert refusal.startswith("row 3 holds token id 5, the model's vocabulary has 5 (ids 0 to 4)")
    texts: Any = SimpleNamespace(is_tokenized=False)
    assert str(dataset._outside_vocabulary(texts, tokenized, 5)).startswith("the tokenized data holds token id 9")
