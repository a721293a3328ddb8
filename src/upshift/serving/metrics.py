"""Count and time the requests of a server for Prometheus."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from upshift.serving.messages import Piece

BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds


class Metrics:
    """The counters, histograms and gauges of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        shared: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("upshift_requests", "answered", ("path", "status"), **shared)
        self.tokens = Counter(
            "upshift_tokens", "of prompts, of those what was computed before, and of answers", ("model", "kind"), **shared
        )
        self.first_token = Histogram(
            "upshift_first_token_seconds", "from a request to its first text", ("model",), buckets=BUCKETS, **shared
        )
        self.token = Histogram("upshift_token_seconds", "a token more, mean of an answer", ("model",), buckets=BUCKETS, **shared)
        self.in_flight = Gauge("upshift_requests_in_flight", "not yet answered", ("model",), **shared)
        self.live = Gauge("upshift_sequences_live", "that share the engine's rows", ("model",), **shared)
        self.waiting = Gauge("upshift_sequences_waiting", "for a row", ("model",), **shared)
        self.resident = Gauge("upshift_engine_resident_bytes", "of the engine's process", ("model",), **shared)
        self.start = Gauge("upshift_engine_start_seconds", "of its last start, by what it did", ("model", "part"), **shared)
        self.restarts = Counter("upshift_engine_restarts", "after deaths", ("model",), **shared)
        self.restart = Gauge(
            "upshift_engine_restart_seconds", "from the last death until it was ready again", ("model",), **shared
        )

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


async def time_pieces(pieces: Any, metrics: Metrics, model: str) -> AsyncIterator[Piece]:
    """Yield the pieces of one text, and record the time to its first token and the mean time of its further tokens."""
    start = time.perf_counter()
    first_piece_time = 0.0
    token_count = 0
    async with aclosing(pieces):
        async for piece in pieces:
            if not first_piece_time:
                first_piece_time = time.perf_counter()
                metrics.first_token.labels(model).observe(first_piece_time - start)
            token_count += piece.tokens
            if piece.ending is not None and token_count > 1:
                seconds = time.perf_counter() - first_piece_time
                metrics.token.labels(model).observe(seconds / (token_count - 1))
            yield piece
