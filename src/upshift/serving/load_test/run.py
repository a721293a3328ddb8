"""Run a load test: send requests at each rate for some seconds, and summarize the answers."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import httpx2

from upshift.errors import JobFailed, RequestError
from upshift.serving.load_test.client import RequestResult, error_message, send_request
from upshift.serving.load_test.traffic import Traffic, arrivals
from upshift.value import Value

QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
MAX_CONNECTIONS = 512
TIMEOUT_SECONDS = 120.0
MAX_PORT = 2**16 - 1
KEY_STATUSES = (401, 403)  # that a missing or wrong API key causes


class Phase(Value):
    """The results of one rate.

    Times are in seconds, of requests that were answered completely. ``goodput`` is the number of answers per second that
    kept the promise. ``without_retry_after`` counts answers with status 429 that lack the header Retry-After."""

    rate: float
    seconds: float
    asked: int
    statuses: dict[str, int]
    answered_per_second: float
    tokens_per_second: float
    first_token: dict[str, float]
    token: dict[str, float]
    within_promise: float | None
    goodput: float
    without_retry_after: int
    reasons: dict[str, int]


class LoadTest(Value):
    """The results of all rates, with what the server promised and measured at its start."""

    url: str
    model: str
    traffic: Traffic
    promised_ttft_ms: float | None
    predicted_capacity: float | None
    capacity: float | None
    phases: tuple[Phase, ...]


def load_test(
    url: str,
    traffic: Traffic,
    *,
    model: str | None = None,
    key: str | None = None,
    promised_ttft_ms: float | None = None,
    on_phase: Callable[[Phase], None] = lambda phase: None,
) -> LoadTest:
    """Run a load test on the server at ``url``.

    ``model`` names one of several served models. ``promised_ttft_ms`` replaces the server's own promise. Raise
    RequestError if no server answers at ``url``, and JobFailed if no request was answered."""
    if not any(next(arrivals(traffic, rate), None) for rate in traffic.rates):
        rates = ", ".join(f"{rate:g}" for rate in traffic.rates)
        problem = f"--rate {rates} asks nothing within --duration {traffic.seconds:g}"
        raise RequestError(f"{problem}; give a higher rate or a longer time")
    return asyncio.run(_load_test(_base_url(url), traffic, model, key, promised_ttft_ms, on_phase))


def _base_url(url: str) -> str:
    """Return the part of the URL before /v1. Raise RequestError if it is no URL of a server."""
    try:
        parsed = httpx2.URL(url)
        is_valid = parsed.scheme in ("http", "https") and bool(parsed.host) and (parsed.port or 0) <= MAX_PORT
    except httpx2.InvalidURL:
        is_valid = False
    if not is_valid:
        raise RequestError(f"{url!r} is no address; give one such as http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1")


async def _load_test(
    url: str, traffic: Traffic, model: str | None, key: str | None, promised: float | None, on_phase: Callable[[Phase], None]
) -> LoadTest:
    headers = {} if key is None else {b"Authorization": f"Bearer {key}".encode()}
    limits = httpx2.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=MAX_CONNECTIONS)
    async with httpx2.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=TIMEOUT_SECONDS) as client:
        name = await _choose_model(client, url, model)
        health = await _read_health(client, name)
        if promised is None:
            promised = health.get("promised_ttft_ms")
        phases = []
        for rate in traffic.rates:
            results, seconds = await _send_requests(client, name, traffic, rate)
            phases.append(summarize_phase(rate, seconds, results, promised))
            on_phase(phases[-1])
    if not any(phase.answered_per_second for phase in phases):
        reason = next((reason for phase in phases for reason in phase.reasons), "")
        raise JobFailed(f"no request was answered by {url}: {reason}")
    return LoadTest(
        url=url,
        model=name,
        traffic=traffic,
        promised_ttft_ms=promised,
        phases=tuple(phases),
        predicted_capacity=health.get("predicted_capacity"),
        capacity=health.get("capacity"),
    )


async def _choose_model(client: httpx2.AsyncClient, url: str, model: str | None) -> str:
    """Return the model to test: the requested one, or the only one that is served. Raise RequestError if there is none."""
    try:
        response = await client.get("/v1/models")
        names = [str(entry["id"]) for entry in response.raise_for_status().json()["data"]]
    except httpx2.HTTPStatusError as error:
        status = error.response.status_code
        remedy = "give --api-key-file with a key of the server" if status in KEY_STATUSES else "give the address of the server"
        message = error_message(error.response.content)
        raise RequestError(f"{url}/v1/models answers with status {status}: {message}; {remedy}") from None
    except httpx2.HTTPError as error:
        raise RequestError(f"no server of OpenAI's addresses answers at {url}: {error or type(error).__name__}") from None
    except (ValueError, KeyError, TypeError):
        raise RequestError(f"{url}/v1/models is no list of models; give the address of a server of OpenAI's addresses") from None
    if not names:
        raise RequestError(f"no model is served at {url}; start its server with one")
    if model is None and len(names) == 1:
        return names[0]
    if model not in names:
        problem = "several models are served" if model is None else f"--model {model} is not served"
        raise RequestError(f"{problem} at {url}; give --model one of {', '.join(names)}")
    return model


async def _read_health(client: httpx2.AsyncClient, model: str) -> dict[str, Any]:
    """Return the numbers that an Upshift server reports of the model, or an empty dict for another server."""
    try:
        response = await client.get("/health")
        fields = response.json()["models"][model].items()
    except (httpx2.HTTPError, ValueError, LookupError, TypeError, AttributeError):
        return {}
    return {name: value for name, value in fields if isinstance(value, int | float)}


async def _send_requests(
    client: httpx2.AsyncClient, model: str, traffic: Traffic, rate: float
) -> tuple[list[RequestResult], float]:
    """Send the requests of one rate when they are due. Return their results, and the seconds until the last answer."""
    start = time.perf_counter()
    tasks = []
    for arrival in arrivals(traffic, rate):
        await asyncio.sleep(max(start + arrival.due - time.perf_counter(), 0.0))
        request = send_request(client, model, arrival.prompt, traffic.max_tokens, due=arrival.due, start=start)
        tasks.append(asyncio.create_task(request))
    results = list(await asyncio.gather(*tasks))
    return results, max(time.perf_counter() - start, traffic.seconds)


def summarize_phase(rate: float, seconds: float, results: Sequence[RequestResult], promised_ttft_ms: float | None) -> Phase:
    """Return the summary of the requests of one rate."""
    answered = [result for result in results if result.is_answered]
    first_seconds = [result.first_seconds for result in answered if result.first_seconds is not None]
    token_seconds = [result.token_seconds for result in answered if result.token_seconds is not None]
    in_time = answered
    within_promise = None
    if promised_ttft_ms is not None:
        in_time = [
            result for result in answered if result.first_seconds is not None and 1e3 * result.first_seconds <= promised_ttft_ms
        ]
        within_promise = len(in_time) / len(answered) if answered else None
    return Phase(
        rate=rate,
        seconds=seconds,
        asked=len(results),
        statuses=dict(Counter(str(result.status) for result in results)),
        answered_per_second=len(answered) / seconds,
        tokens_per_second=sum(result.tokens for result in answered) / seconds,
        first_token=_quantiles(first_seconds),
        token=_quantiles(token_seconds),
        within_promise=within_promise,
        goodput=len(in_time) / seconds,
        without_retry_after=sum(result.status == 429 and not result.retry_after for result in results),
        reasons=dict(Counter(result.why for result in results if result.why).most_common(5)),
    )


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    """Return the values at QUANTILES by name, or nothing without values."""
    ordered = sorted(values)
    if not ordered:
        return {}
    last = len(ordered) - 1
    return {name: ordered[min(int(quantile * len(ordered)), last)] for name, quantile in QUANTILES.items()}
