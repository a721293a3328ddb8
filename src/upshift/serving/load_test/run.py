"""Run a load test: send requests at each rate for some seconds, and summarize the answers."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import httpx2

from upshift.errors import JobFailed, RequestError
from upshift.serving.load_test.client import Asked, ask
from upshift.serving.load_test.traffic import Traffic, arrivals
from upshift.value import Value

SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
MOST_CONNECTIONS = 512
TIMEOUT_SECONDS = 120.0
MOST_PORT = 2**16 - 1


class Phase(Value):
    """The results of one rate. Times are in seconds and cover requests that were answered whole. ``goodput`` is the
    number of answers a second that kept the promise."""

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
    without_retry_after: int  # of the 429
    reasons: dict[str, int]


class LoadTest(Value):
    url: str
    model: str
    traffic: Traffic
    promised_ttft_ms: float | None
    predicted_capacity: float | None
    capacity: float | None
    phases: tuple[Phase, ...]


def load_test(
    url: str, traffic: Traffic, *, model: str | None = None, key: str | None = None,
    promised_ttft_ms: float | None = None, on_phase: Callable[[Phase], None] = lambda phase: None,
) -> LoadTest:  # fmt: skip
    """Run a load test on the server at ``url``.

    ``model`` names one of several served models. ``promised_ttft_ms`` replaces the server's own promise. Raise
    RequestError if nobody answers at ``url``, and JobFailed if no request was answered."""
    if not any(next(arrivals(traffic, rate), None) for rate in traffic.rates):
        rates = ", ".join(f"{rate:g}" for rate in traffic.rates)
        said = f"--rate {rates} asks nothing within --duration {traffic.seconds:g}"
        raise RequestError(f"{said}; give a higher rate or a longer time")
    return asyncio.run(_load_test(_address(url), traffic, model, key, promised_ttft_ms, on_phase))


def _address(url: str) -> str:
    """Return the part of the URL before /v1."""
    try:
        found = httpx2.URL(url)
        whole = found.scheme in ("http", "https") and bool(found.host) and (found.port or 0) <= MOST_PORT
    except httpx2.InvalidURL:
        whole = False
    if not whole:
        raise RequestError(f"{url!r} is no address; give one such as http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1")


async def _load_test(
    url: str, traffic: Traffic, model: str | None, key: str | None, promised: float | None, on_phase: Callable[[Phase], None]
) -> LoadTest:
    headers = {} if key is None else {b"Authorization": f"Bearer {key}".encode()}
    limits = httpx2.Limits(max_connections=MOST_CONNECTIONS, max_keepalive_connections=MOST_CONNECTIONS)
    async with httpx2.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=TIMEOUT_SECONDS) as client:
        name = await _model(client, url, model)
        said = await _promise(client, name)
        promised = promised if promised is not None else said.get("promised_ttft_ms")
        phases = []
        for rate in traffic.rates:
            answers, seconds = await _ask_all(client, name, traffic, rate)
            phases.append(phase_of(rate, seconds, answers, promised))
            on_phase(phases[-1])
    if not any(phase.answered_per_second for phase in phases):
        why = next((reason for phase in phases for reason in phase.reasons), "")
        raise JobFailed(f"no request was answered by {url}: {why}")
    return LoadTest(
        url=url, model=name, traffic=traffic, promised_ttft_ms=promised, phases=tuple(phases),
        predicted_capacity=said.get("predicted_capacity"), capacity=said.get("capacity"),
    )  # fmt: skip


async def _model(client: httpx2.AsyncClient, url: str, model: str | None) -> str:
    try:
        answer = await client.get("/v1/models")
        names = [str(one["id"]) for one in answer.raise_for_status().json()["data"]]
    except httpx2.HTTPError as error:
        raise RequestError(f"no server of OpenAI's addresses answers at {url}: {error or type(error).__name__}") from None
    except (ValueError, KeyError, TypeError):
        raise RequestError(f"{url}/v1/models is no list of models; give the address of a server of OpenAI's addresses") from None
    if not names:
        raise RequestError(f"no model is served at {url}; start its server with one")
    if model is None and len(names) == 1:
        return names[0]
    if model not in names:
        said = "several models are served" if model is None else f"--model {model} is not served"
        raise RequestError(f"{said} at {url}; give --model one of {', '.join(names)}")
    return model


async def _promise(client: httpx2.AsyncClient, model: str) -> dict[str, Any]:
    """Return the numbers of an Upshift server's promise for the model, or an empty dict for another server."""
    try:
        answer = await client.get("/health")
        found = answer.json()["models"][model].items()
    except (httpx2.HTTPError, ValueError, LookupError, TypeError, AttributeError):
        return {}
    return {name: value for name, value in found if isinstance(value, int | float)}


async def _ask_all(client: httpx2.AsyncClient, model: str, traffic: Traffic, rate: float) -> tuple[list[Asked], float]:
    start, asking = time.perf_counter(), []
    for arrival in arrivals(traffic, rate):
        await asyncio.sleep(max(start + arrival.at - time.perf_counter(), 0.0))
        one = ask(client, model, arrival.prompt, traffic.max_tokens, due=arrival.at, start=start)
        asking.append(asyncio.create_task(one))
    found = list(await asyncio.gather(*asking))
    return found, max(time.perf_counter() - start, traffic.seconds)


def phase_of(rate: float, seconds: float, answers: Sequence[Asked], promised_ttft_ms: float | None) -> Phase:
    done = [one for one in answers if one.done]
    first = [one.first_seconds for one in done if one.first_seconds is not None]
    tokens = [one.token_seconds for one in done if one.token_seconds is not None]
    kept = [one for one in done if promised_ttft_ms is None or 1e3 * (one.first_seconds or 0.0) <= promised_ttft_ms]
    return Phase(
        rate=rate, seconds=seconds, asked=len(answers), statuses=dict(Counter(str(one.status) for one in answers)),
        answered_per_second=len(done) / seconds, tokens_per_second=sum(one.tokens for one in done) / seconds,
        first_token=_shares(first), token=_shares(tokens),
        within_promise=len(kept) / len(done) if done and promised_ttft_ms is not None else None, goodput=len(kept) / seconds,
        without_retry_after=sum(one.status == 429 and not one.retry_after for one in answers),
        reasons=dict(Counter(one.why for one in answers if one.why).most_common(5)),
    )  # fmt: skip


def _shares(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {name: ordered[min(int(share * len(ordered)), len(ordered) - 1)] for name, share in SHARES.items()} if ordered else {}
