"""Requests for vectors take turns: one with many texts, or with long ones, does not keep the others waiting."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_serve_engines import Letters

from upshift.serving.engine import embedding
from upshift.serving.engine.embedding import MAX_BATCH_TEXTS, MIN_PASS_TOKENS, PART_TEXTS, EmbeddingWorker
from upshift.serving.messages import Cancel, Embed, EngineRequest, Refused, Vector

TEXTS = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 80)), min_size=1, max_size=6)  # how many, of how many letters


class Sized(Letters):
    """An encoder that keeps the numbers of texts and tokens of its passes."""

    def __init__(self, model: str, **more: Any) -> None:
        super().__init__(model, **more)
        self.sizes: list[tuple[int, int]] = []

    def rows(self, ids: list[list[int]]) -> np.ndarray:
        self.sizes.append((len(ids), sum(map(len, ids))))
        return super().rows(ids)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> EmbeddingWorker:
    monkeypatch.setattr(embedding, "Encoder", Sized)
    monkeypatch.setattr(embedding, "PASS_SECONDS", 0.0)  # the times of this machine do not count
    return EmbeddingWorker(EngineRequest(model="m", prompt_length=2))


def letters(number: int, length: int) -> str:
    return chr(ord("a") + number % 8) * length


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(requests=TEXTS, bad=st.integers(0, 12), canceled=st.integers(0, 12))
def test_every_text_gets_its_own_vector_in_turns(
    worker: EmbeddingWorker, requests: list[tuple[int, int]], bad: int, canceled: int
) -> None:
    """One request may have a text that cannot be encoded, and the client of one may leave."""
    worker.waiting.clear()
    worker._failed_passes = 0  # those of earlier examples
    sizes = worker.encoder.sizes = []  # type: ignore[union-attr]
    texts = [[letters(number + index, length) for index in range(count)] for number, (count, length) in enumerate(requests)]
    if bad < len(texts):
        texts[bad][len(texts[bad]) // 2] = "wow!"
    for number, one in enumerate(texts):
        assert worker.take(Embed(id=number, texts=tuple(one))) == []
    said: list[Any] = []
    passes = 0
    while worker.waiting:
        if passes == 2 and canceled < len(texts):
            worker.take(Cancel(id=canceled))
        worker.encode_waiting()
        said += worker.take_answers()
        passes += 1
    assert max(count for count, _ in sizes) <= MAX_BATCH_TEXTS
    assert max(tokens for _, tokens in sizes) <= MIN_PASS_TOKENS
    for number, one in enumerate(texts):
        own = [message for message in said if message.id == number]
        if number == bad:
            refused = [message.why for message in own if isinstance(message, Refused)]
            assert number == canceled or (len(refused) == 1 and "no exclamation marks" in refused[0])
            continue
        vectors = [np.frombuffer(base64.b64decode(message.row), dtype="<f4")[0] for message in own]
        expected = [ord(text[0]) - ord("!") for text in one]
        if number == canceled:
            expected = expected[: len(vectors)]
        else:
            assert [message.last for message in own] == [False] * (len(own) - 1) + [True]
        assert vectors == expected


def test_a_small_request_goes_before_the_end_of_a_large_one(worker: EmbeddingWorker) -> None:
    """It waits for the pass that runs, and for one part of each of the others."""
    worker.take(Embed(id=1, texts=("abcdefghij" * 8,) * 2000))
    worker.take(Embed(id=2, texts=("z" * 10_000,) * 20))
    worker.encode_waiting()
    worker.take_answers()
    worker.take(Embed(id=3, texts=("b",)))
    passes = tokens = 0
    said: list[Any] = []
    while not any(isinstance(message, Vector) and message.id == 3 for message in said):
        worker.encoder.sizes.clear()  # type: ignore[union-attr]
        worker.encode_waiting()
        said = worker.take_answers()
        tokens += sum(count for _, count in worker.encoder.sizes)  # type: ignore[union-attr]
        passes += 1
    assert passes <= 4 and tokens <= 3 * max(PART_TEXTS * 80, 10_000)
    assert len(worker.waiting) == 2, "the large ones go on"
