"""An engine's process that encodes: what came together is batched together."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from upshift.benchmarking.meters import resident_bytes
from upshift.errors import RequestError
from upshift.inference.encoding.encoder import Encoder
from upshift.inference.generation.files import check_prompts, read_prompts
from upshift.serving.made_up import WORDS
from upshift.serving.messages import Beat, Embed, EngineRequest, Ready, Refused, Vectors
from upshift.value import Value

TOGETHER = 512  # texts of several requests in one go


def embed(request: EngineRequest, inbox: queue.Queue[Any], tell: Callable[[list[Value]], None]) -> None:
    """Until the inbox gives None."""
    start = time.perf_counter()
    encoder = Encoder(
        request.model, quality=request.quality, engine=request.engine, max_latency_ms=request.max_ttft_ms,
        race_seconds=request.race_seconds,
    )  # fmt: skip
    texts = _expected(request)
    encoding = encoder.prepare(texts)
    seconds = {"racing and loading": time.perf_counter() - start}
    start = time.perf_counter()
    encoding.rows(encoder.tokens.of(texts))
    took = time.perf_counter() - start
    tell([Ready(
        task="encode", setup=encoding.setup.label(), rows=TOGETHER, cache_tokens=None, positions=None,
        resident_bytes=resident_bytes(), seconds=seconds | {"proving": took}, capacity=len(texts) / took,
    )])  # fmt: skip
    while True:
        first = inbox.get()
        asked = [first]
        while not inbox.empty() and sum(len(one.texts) for one in asked if isinstance(one, Embed)) < TOGETHER:
            asked.append(inbox.get_nowait())
        tell(_answers([one for one in asked if isinstance(one, Embed)], encoder, encoding))
        tell([Beat(live=0, waiting=inbox.qsize(), resident_bytes=resident_bytes())])
        if any(one is None for one in asked):
            return


def _expected(request: EngineRequest) -> list[str]:
    if request.prompts is not None:
        path = Path(request.prompts)
        check_prompts(path, "--prompts")
        return [text for text in islice(read_prompts(path), TOGETHER) if isinstance(text, str)]
    size = range(request.prompt_length)
    return [" ".join(WORDS[(place + word) % len(WORDS)] for word in size) for place in range(len(WORDS))]


def _answers(asked: list[Embed], encoder: Encoder, encoding: Any) -> list[Value]:
    said: list[Value] = []
    read: list[tuple[Embed, list[list[int]]]] = []
    for one in asked:
        try:
            read.append((one, encoder.tokens.of(one.texts)))
        except RequestError as error:
            said.append(Refused(id=one.id, status=400, why=str(error)))
    rows: np.ndarray = encoding.rows([ids for _, all_ids in read for ids in all_ids])
    start = 0
    for one, all_ids in read:
        mine = rows[start : start + len(all_ids)]
        start += len(all_ids)
        tokens = sum(map(len, all_ids))
        said.append(Vectors(id=one.id, rows=tuple(tuple(map(float, row)) for row in mine), tokens=tokens))
    return said
