"""Encode texts in an engine's process. Requests that wait together are batched together, first come, first served."""

from __future__ import annotations

import base64
import queue
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from upshift.benchmarking.meters import resident_bytes
from upshift.errors import RequestError
from upshift.inference.encoding.encoder import Encoder
from upshift.inference.generation.prompts import check_prompts, read_prompts
from upshift.serving.engine.generation import check_ids
from upshift.serving.load_test.traffic import WORDS
from upshift.serving.messages import EXPECTED, Beat, Cancel, Embed, EngineRequest, Ready, Refused, Vector
from upshift.value import Value

TOGETHER = 512  # texts of several requests in one go


class Embedding:
    def __init__(self, request: EngineRequest) -> None:
        start = time.perf_counter()
        self.request = request
        self.encoder = Encoder(
            request.model, quality=request.quality, engine=request.engine, max_latency_ms=request.max_ttft_ms,
            race_seconds=request.race_seconds,
        )  # fmt: skip
        self.vocabulary: int | None = getattr(self.encoder.source.hf_config.get_text_config(), "vocab_size", None)
        self.waiting: deque[Embed] = deque()
        texts = _expected(request)
        ids = self._read(texts)
        self.encoding = self.encoder.prepare(texts)
        seconds = {"racing and loading": time.perf_counter() - start}
        start = time.perf_counter()
        self.encoding.rows(ids)
        took = time.perf_counter() - start
        self.text_seconds = took / len(texts)
        self.ready = Ready(
            task="encode", setup=self.encoding.setup.label(), rows=TOGETHER, cache_tokens=None, positions=None,
            resident_bytes=resident_bytes(), seconds=seconds | {"proving": took}, capacity=len(texts) / took,
        )  # fmt: skip

    def take(self, asked: Embed | Cancel) -> list[Value]:
        """Add the request to the queue, or cancel a request. Return the refusal of a rejected request at once."""
        if isinstance(asked, Cancel):
            self.waiting = deque(one for one in self.waiting if one.id != asked.id)
        elif len(self.waiting) > self.request.max_waiting:  # the first of them is computed next
            seconds = self.text_seconds * sum(len(one.texts) for one in self.waiting)
            why = f"{len(self.waiting):,} requests wait already"
            return [Refused(id=asked.id, status=429, why=why, retry_after=seconds)]
        else:
            self.waiting.append(asked)
        return []

    def work(self) -> list[Value]:
        """Encode the first waiting request and those behind it, until ``TOGETHER`` texts are reached. Return the
        answers."""
        asked: list[Embed] = []
        while self.waiting and sum(len(one.texts) for one in asked) < TOGETHER:
            asked.append(self.waiting.popleft())
        said: list[Value] = []
        read: list[tuple[Embed, list[list[int]]]] = []
        for one in asked:
            try:
                read.append((one, self._read(one.texts)))
            except Exception as error:  # of the tokenizer: of this request alone
                said.append(Refused.failed(one.id, error))
        return said + self._answers(read)

    def _answers(self, asked: list[tuple[Embed, list[list[int]]]]) -> list[Value]:
        """Encode all requests together. If that fails, encode each request by itself, so that a bad request fails
        alone."""
        said: list[Value] = []
        try:
            rows: np.ndarray = self.encoding.rows([ids for _, all_ids in asked for ids in all_ids])
        except Exception as error:  # of one of them
            if len(asked) == 1:
                return [Refused.failed(asked[0][0].id, error)]
            return [value for one in asked for value in self._answers([one])]
        start = 0
        for one, all_ids in asked:
            said += self._told(one, rows[start : start + len(all_ids)], all_ids)
            start += len(all_ids)
        return said

    def _told(self, asked: Embed, rows: np.ndarray, all_ids: list[list[int]]) -> list[Value]:
        """Return one message for each text, because together they may be longer than a line may be."""
        finite = np.isfinite(rows).all(1)
        if not finite.all():
            place = int(finite.argmin())
            why = f"input {place} has no vector of finite numbers: those of the model are too large for its precision"
            return [Refused(id=asked.id, status=500, why=why, failure="OverflowError")]
        if asked.dimensions is not None:
            if asked.dimensions > rows.shape[1]:
                why = f"dimensions is {asked.dimensions:,}, and the model gives vectors of {rows.shape[1]:,}; ask for fewer"
                return [Refused(id=asked.id, status=400, why=why)]
            rows = shortened(rows, asked.dimensions, normalize=self.encoder.recipe.normalize)
        last = len(rows) - 1
        return [
            Vector(id=asked.id, row=base64.b64encode(row.astype("<f4").tobytes()).decode(), tokens=len(ids), last=place == last)
            for place, (row, ids) in enumerate(zip(rows, all_ids, strict=True))
        ]

    def _read(self, texts: Any) -> list[list[int]]:
        found = self.encoder.tokens.of(texts)
        for ids in found:
            check_ids(ids, self.vocabulary)
        return found


def embed(request: EngineRequest, inbox: queue.Queue[Any], tell: Callable[[list[Value]], None]) -> None:
    """Answer requests until the inbox gives None."""
    engine = Embedding(request)
    tell([engine.ready])
    while True:
        said: list[Value] = []
        while not (engine.waiting or said) or not inbox.empty():
            asked = inbox.get()
            if asked is None:
                return
            said += engine.take(asked)
        tell(said)
        tell([*engine.work(), Beat(live=0, waiting=len(engine.waiting), resident_bytes=resident_bytes())])


def _expected(request: EngineRequest) -> list[str]:
    if request.prompts is not None:
        path = Path(request.prompts)
        check_prompts(path, "--prompts")
        texts = [text for text in islice(read_prompts(path), TOGETHER) if isinstance(text, str)]
        if not texts:
            raise RequestError(f"--prompts {path} has chats alone, and {request.model!r} encodes texts; write a text a line")
        return texts
    size = range(request.prompt_length or EXPECTED[0])
    return [" ".join(WORDS[(place + word) % len(WORDS)] for word in size) for place in range(len(WORDS))]


def shortened(rows: np.ndarray, dimensions: int, *, normalize: bool) -> np.ndarray:
    """Return the first ``dimensions`` columns of rows [N, D] as [N, dimensions].

    The rows are scaled to length one again if ``normalize`` is set (Kusupati and others 2022, arXiv:2205.13147)."""
    found = rows[:, :dimensions]
    return found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12) if normalize else found
