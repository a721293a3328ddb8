"""Send a trace of each request to a collector of OpenTelemetry, such as Jaeger's or Grafana Tempo's.

A request is a span, which continues the trace of its ``traceparent`` header. Each text of its answer is a span in it, with the
name and the attributes that vLLM gives its spans (vllm/tracing). No span has the text of a user or of a model. OpenTelemetry is
imported only by servers that send traces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from upshift.serving.messages import Piece

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

TEXT_SPAN = "llm_request"
UNTRACED_PATHS = "/health$,/ping$,/metrics$,/load$"  # that monitors ask for every few seconds
UNNAMED = "unknown_service"  # the beginning of OpenTelemetry's name for a service without one


class RequestTraces:
    """The traces of one server."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("upshift.serving")

    def wrap(self, app: Any) -> Any:
        """Return an ASGI application whose requests are spans."""
        from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware

        return OpenTelemetryMiddleware(
            app, excluded_urls=UNTRACED_PATHS, tracer_provider=self._provider, exclude_spans=["receive", "send"]
        )

    def start_text(self, model: str) -> Span:
        """Start the span of one text in the span of its request."""
        return self._tracer.start_span(TEXT_SPAN, attributes={"gen_ai.response.model": model})

    def close(self) -> None:
        """Send the spans that were not sent yet, and stop."""
        self._provider.shutdown()


def end_text(span: Span, last: Piece | None, *, tokens: int, first_token: float, seconds: float) -> None:
    """End the span of a text. ``last`` is None for a text that did not reach its end.

    ``first_token`` and ``seconds`` are the seconds from the request to its first and to its last token."""
    from opentelemetry.trace import StatusCode

    if last is None:
        span.set_status(StatusCode.ERROR, "the client left, or the engine failed")
    else:
        span.set_attribute("gen_ai.usage.prompt_tokens", last.prompt_tokens)
        span.set_attribute("gen_ai.response.finish_reasons", [str(last.ending)])
    span.set_attribute("gen_ai.usage.completion_tokens", tokens)
    span.set_attribute("gen_ai.latency.time_to_first_token", first_token)
    span.set_attribute("gen_ai.latency.e2e", seconds)
    span.end()


def make_provider(endpoint: str) -> TracerProvider:
    """Return a provider that sends spans to the address of a collector by HTTP, in the background.

    OpenTelemetry reads variables of its own, such as OTEL_SERVICE_NAME and OTEL_EXPORTER_OTLP_HEADERS."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create()
    if str(resource.attributes.get(SERVICE_NAME, UNNAMED)).startswith(UNNAMED):
        resource = resource.merge(Resource({SERVICE_NAME: "upshift"}))
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider
