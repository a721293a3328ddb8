"""Count and time the requests of a server for Prometheus, under names of Upshift. The same figures have names of vLLM, too."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from upshift.serving.messages import Piece
from upshift.serving.request_traces import RequestTraces, end_text

TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)
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

        self.vllm = VllmMetrics(self.registry)

    def record_tokens(self, model: str, *, prompt: int, cached: int, answer: int) -> None:
        """Count the tokens of a request for text. ``cached`` tokens of its prompt were computed before."""
        for kind, count in (("prompt", prompt), ("cached", cached), ("answer", answer)):
            self.tokens.labels(model, kind).inc(count)
        self.vllm.prompt_tokens.labels(model).inc(prompt)
        self.vllm.generation_tokens.labels(model).inc(answer)
        self.vllm.prefix_cache_queries.labels(model).inc(prompt)
        self.vllm.prefix_cache_hits.labels(model).inc(cached)

    def record_sequences(self, model: str, *, live: int, waiting: int) -> None:
        """Set the numbers of sequences that an engine computes, and that wait for it."""
        self.live.labels(model).set(live)
        self.waiting.labels(model).set(waiting)
        self.vllm.running.labels(model).set(live)
        self.vllm.waiting.labels(model).set(waiting)

    def record_first_token(self, model: str, seconds: float) -> None:
        self.first_token.labels(model).observe(seconds)
        self.vllm.first_token.labels(model).observe(seconds)

    def record_text(self, model: str, last: Piece, *, tokens: int, seconds: float, token_seconds: float | None) -> None:
        """Record a text that has ended, after ``seconds``. ``token_seconds``: the mean time of a token after the first one."""
        if token_seconds is not None:
            self.token.labels(model).observe(token_seconds)
            self.vllm.token.labels(model).observe(token_seconds)
        self.vllm.seconds.labels(model).observe(seconds)
        self.vllm.request_prompt_tokens.labels(model).observe(last.prompt_tokens)
        self.vllm.request_generation_tokens.labels(model).observe(tokens)
        self.vllm.success.labels(model, last.ending).inc()

    def record_abort(self, model: str) -> None:
        """Count a text that did not reach its end: the client left, or the engine failed."""
        self.vllm.success.labels(model, "abort").inc()

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class VllmMetrics:
    """The metrics under vLLM's names (vllm/v1/metrics/loggers.py), for its dashboards, autoscalers and routers.

    Only those are here whose figures mean the same."""

    def __init__(self, registry: CollectorRegistry) -> None:
        model: dict[str, Any] = {"labelnames": ("model_name",), "registry": registry}
        self.running = Gauge("vllm:num_requests_running", "that the engine computes", **model)
        self.waiting = Gauge("vllm:num_requests_waiting", "for a row of the engine", **model)
        self.prompt_tokens = Counter("vllm:prompt_tokens", "of prompts", **model)
        self.generation_tokens = Counter("vllm:generation_tokens", "of answers", **model)
        self.prefix_cache_queries = Counter("vllm:prefix_cache_queries", "tokens of prompts, looked up in the cache", **model)
        self.prefix_cache_hits = Counter("vllm:prefix_cache_hits", "tokens of prompts that were in the cache", **model)
        self.first_token = Histogram(
            "vllm:time_to_first_token_seconds", "from a request to its first text", buckets=BUCKETS, **model
        )
        self.token = Histogram(
            "vllm:request_time_per_output_token_seconds", "a token more, mean of an answer", buckets=BUCKETS, **model
        )
        self.seconds = Histogram("vllm:e2e_request_latency_seconds", "of a whole text", buckets=BUCKETS, **model)
        self.request_prompt_tokens = Histogram("vllm:request_prompt_tokens", "of a prompt", buckets=TOKEN_BUCKETS, **model)
        self.request_generation_tokens = Histogram("vllm:request_generation_tokens", "of a text", buckets=TOKEN_BUCKETS, **model)
        self.success = Counter(
            "vllm:request_success", "texts that ended", labelnames=("model_name", "finished_reason"), registry=registry
        )


async def time_pieces(pieces: Any, metrics: Metrics, model: str, traces: RequestTraces | None = None) -> AsyncIterator[Piece]:
    """Yield the pieces of one text, and record its tokens, its times and its end."""
    span = None if traces is None else traces.start_text(model)
    start = time.perf_counter()
    first_piece_time = 0.0
    token_count = 0
    last: Piece | None = None
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                now = time.perf_counter()
                if not first_piece_time:
                    first_piece_time = now
                    metrics.record_first_token(model, now - start)
                token_count += piece.tokens
                if piece.ending is not None:
                    last = piece
                    token_seconds = (now - first_piece_time) / (token_count - 1) if token_count > 1 else None
                    metrics.record_text(model, piece, tokens=token_count, seconds=now - start, token_seconds=token_seconds)
                yield piece
    finally:
        if first_piece_time and last is None:
            metrics.record_abort(model)
        if span is not None:
            now = time.perf_counter()
            end_text(span, last, tokens=token_count, first_token=(first_piece_time or now) - start, seconds=now - start)
