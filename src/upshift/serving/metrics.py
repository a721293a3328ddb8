"""Count and time requests for Prometheus.

Time texts for the metrics.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from upshift.serving.messages import Piece

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        make: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("upshift_requests", "answered", ("path", "status"), **make)
        self.tokens = Counter(
            "upshift_tokens", "of prompts, of those what was computed before, and of answers", ("model", "kind"), **make
        )
        self.first_token = Histogram(
            "upshift_first_token_seconds", "from a request to its first text", ("model",), buckets=SECONDS, **make
        )
        self.token = Histogram("upshift_token_seconds", "a token more, mean of an answer", ("model",), buckets=SECONDS, **make)
        self.in_flight = Gauge("upshift_requests_in_flight", "not yet answered", ("model",), **make)
        self.live = Gauge("upshift_sequences_live", "that share the engine's rows", ("model",), **make)
        self.waiting = Gauge("upshift_sequences_waiting", "for a row", ("model",), **make)
        self.resident = Gauge("upshift_engine_resident_bytes", "of the engine's process", ("model",), **make)
        self.start = Gauge("upshift_engine_start_seconds", "of its last start, by what it did", ("model", "part"), **make)
        self.restarts = Counter("upshift_engine_restarts", "after deaths", ("model",), **make)
        self.restart = Gauge("upshift_engine_restart_seconds", "from the last death until it was ready again", ("model",), **make)

    def page(self) -> bytes:
        return generate_latest(self.registry)


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
