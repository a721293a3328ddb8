"""Time texts for the metrics."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from upshift.serving.messages import Piece
from upshift.serving.metrics import Metrics


async def timed(pieces: Any, metrics: Metrics, model: str) -> AsyncIterator[Piece]:
    start, first, tokens = time.perf_counter(), 0.0, 0
    async with aclosing(pieces):
        async for piece in pieces:
            if not first:
                first = time.perf_counter()
                metrics.first_token.labels(model).observe(first - start)
            tokens += piece.tokens
            if piece.ending is not None and tokens > 1:
                metrics.token.labels(model).observe((time.perf_counter() - first) / (tokens - 1))
            yield piece
