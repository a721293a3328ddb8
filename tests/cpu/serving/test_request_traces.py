"""Traces of requests: they continue the client's, have a span for each text, and hold no text."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx2
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from test_responses import Scripted
from test_serving_parts import of_several

from upshift.serving.app import Server, make_app
from upshift.serving.metrics import Metrics
from upshift.serving.model_pool import ModelPool
from upshift.serving.request_traces import RequestTraces, make_provider

TRACE = 0x0AF7651916CD43DD8448EB211C80319C
PARENT = {"traceparent": f"00-{TRACE:032x}-b7ad6b7169203331-01"}
PROMPT = {"model": "m", "prompt": "a secret question"}
ANSWER = ({"text": "a secret"}, {"text": " answer", "ending": "stop"})


def spans_of(engine: Any, *requests: dict[str, Any], paths: tuple[str, ...] = ()) -> list[ReadableSpan]:
    """Return the spans of requests for texts, and of requests to other paths."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    metrics, traces = Metrics(), RequestTraces(provider)
    app = traces.wrap(make_app(Server(ModelPool({"m": of_several(engine)}, metrics), metrics, traces=traces)))

    async def ask() -> None:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://m") as client:
            for request in requests:
                await client.post("/v1/completions", json=PROMPT | request, headers=PARENT)
            for path in paths:
                await client.get(path)

    asyncio.run(ask())
    return list(exporter.get_finished_spans())


@pytest.mark.parametrize("stream", [False, True])
def test_each_text_is_a_span_in_that_of_its_request(stream: bool) -> None:
    *texts, request = spans_of(Scripted(ANSWER), {"n": 2, "stream": stream})
    assert request.context.trace_id == TRACE and request.parent is not None
    assert [text.name for text in texts] == ["llm_request"] * 2
    for text in texts:
        assert text.parent is not None and text.parent.span_id == request.context.span_id
        assert text.context.trace_id == TRACE
        attributes = dict(text.attributes or {})
        seconds = attributes.pop("gen_ai.latency.time_to_first_token"), attributes.pop("gen_ai.latency.e2e")
        assert 0 < seconds[0] <= seconds[1]  # type: ignore[operator]
        assert attributes == {
            "gen_ai.response.model": "m",
            "gen_ai.usage.prompt_tokens": 3,
            "gen_ai.usage.completion_tokens": 4,
            "gen_ai.response.finish_reasons": ("stop",),
        }
    assert "secret" not in "".join(span.to_json() for span in (*texts, request))


def test_a_text_that_fails_says_so() -> None:
    *_, text, request = spans_of(Scripted(({"text": "so"}, RuntimeError("the engine died"))), {"stream": True})
    assert text.name == "llm_request" and text.status.status_code is StatusCode.ERROR
    assert dict(text.attributes or {})["gen_ai.usage.completion_tokens"] == 2


def test_what_monitors_ask_for_is_no_trace() -> None:
    spans = spans_of(Scripted(), paths=("/health", "/ping", "/metrics", "/load", "/v1/models"))
    assert [(span.attributes or {})["http.target"] for span in spans] == ["/v1/models"]


@pytest.fixture
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    received: list[ExportTraceServiceRequest] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", received
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("variable", "name"), [(None, "upshift"), ("mine", "mine")])
def test_spans_reach_the_collector(
    collector: tuple[str, list[ExportTraceServiceRequest]],
    variable: str | None,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if variable is not None:
        monkeypatch.setenv("OTEL_SERVICE_NAME", variable)
    url, received = collector
    traces = RequestTraces(make_provider(url))
    traces.start_text("m").end()
    traces.close()
    (resource,) = received[0].resource_spans
    names = [item.value.string_value for item in resource.resource.attributes if item.key == "service.name"]
    assert names == [name] and resource.scope_spans[0].spans[0].name == "llm_request"


@pytest.mark.parametrize("url", ["localhost:4318", "grpc://localhost:4317", "http://", "http://m:99999", "http://[1"])
def test_what_is_no_address_is_refused_before_anything_starts(url: str, upshift: Any) -> None:
    refused = upshift("serve", "no-model", "--otlp-traces-endpoint", url)
    assert refused.code == 2 and f"--otlp-traces-endpoint {url!r} is no address" in refused.err, refused.err
