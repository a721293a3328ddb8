"""Define the HTTP application of the server: OpenAI's addresses, health, metrics and a chat page.

A middleware checks each request before an address sees it: the API key, the size of the body, the upload rate, and that
the body is a JSON object in UTF-8. It logs one line per request, without the request's text, and counts the request."""

from __future__ import annotations

import asyncio
import base64
import hmac
import itertools
import json
import logging
import struct
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, NoReturn
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.routing import Route

from upshift.errors import UpshiftError
from upshift.serving.messages import Embed
from upshift.serving.metrics import Metrics, time_pieces
from upshift.serving.model_pool import ModelPool
from upshift.serving.openai_requests import ChatRequest, CompletionRequest, EmbeddingRequest
from upshift.serving.openai_responses import (
    RESPONSES,
    Answer,
    Choice,
    Refusal,
    TextRequest,
    error_event,
    error_response,
    merge_choices,
    refusal_of,
)
from upshift.serving.replicas import ReplicaSet

logger = logging.getLogger(__name__)

EVENT_STREAM = "text/event-stream"
PUBLIC_PATHS = ("/", "/health", "/docs", "/openapi.json")  # no API key is needed
API_PREFIX = "/v1/"  # addresses that read a body
MAX_DEPTH = 200  # of nested objects and lists
JSON_TYPE = (b"content-type", b"application/json")
TYPE_NAMES = {
    list: "an array",
    str: "a text",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


@dataclass(frozen=True)
class Limits:
    """The limits of requests, and the API keys of clients. Without keys, everybody may send requests."""

    request_seconds: float = 600.0
    body_bytes: int = 4 * 2**20
    body_seconds: float = 30.0
    keys: tuple[str, ...] = ()


@dataclass
class Server:
    """The handlers of all addresses. ``seeds`` gives a seed to each request without one."""

    pool: ModelPool
    metrics: Metrics
    limits: Limits = field(default_factory=Limits)
    seeds: Any = field(default_factory=lambda: itertools.count(1))
    draining: bool = False

    async def chat(self, request: ChatRequest) -> Response:
        return await self._generate(request, "/v1/chat/completions")

    async def complete(self, request: CompletionRequest) -> Response:
        return await self._generate(request, "/v1/completions")

    async def embed(self, request: EmbeddingRequest) -> Response:
        self._check_model(request.model)
        async with self._load(request.model, "encode") as (engine, seconds_left), asyncio.timeout(seconds_left):
            vectors = await engine.vectors(Embed(texts=request.texts(), dimensions=request.dimensions))
        self.metrics.tokens.labels(request.model, "prompt").inc(vectors.tokens)
        data = [
            {"object": "embedding", "index": index, "embedding": _encode_vector(row, request.encoding_format)}
            for index, row in enumerate(vectors.rows)
        ]
        usage = {"prompt_tokens": vectors.tokens, "total_tokens": vectors.tokens}
        return JSONResponse({"object": "list", "data": data, "model": request.model, "usage": usage})

    def models(self) -> dict[str, Any]:
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "upshift"} for name in self.pool.engines]
        return {"object": "list", "data": data}

    def health(self) -> dict[str, Any]:
        """Return the state and the promises of all engines. ``upshift load-test`` reads them."""
        models = {name: self._describe_engine(engine) for name, engine in self.pool.engines.items()}
        status = "ok"
        if self.draining:
            status = "draining"
        elif any(engine.has_failed for engine in self.pool.engines.values()):
            status = "failed"
        return {"status": status, "models": models}

    def _describe_engine(self, engine: ReplicaSet) -> dict[str, Any]:
        description: dict[str, Any] = {"state": engine.state, "in_flight": engine.in_flight, "processes": engine.pids}
        if engine.ready is not None:
            description |= engine.ready.model_dump(exclude={"kind"})
        description |= engine.heartbeat.model_dump(exclude={"kind"})
        promises = {"promised_ttft_ms": engine.request.max_ttft_ms, "promised_tpot_ms": engine.request.max_tpot_ms}
        return description | promises

    async def _generate(self, request: TextRequest, path: str) -> Response:
        """Answer a request for text: at once, or as a stream of events."""
        self._check_model(request.model)
        answer = Answer(request)
        choices = self._generate_choices(request)
        if not request.stream:
            async with aclosing(choices):
                async for choice in choices:
                    answer.add(choice)
            self._count_tokens(answer)
            return JSONResponse(answer.body())
        first_choice = await anext(choices)  # a request that is rejected here gets an error status instead of a stream
        return StreamingResponse(self._stream_events(answer, first_choice, choices, path), media_type=EVENT_STREAM)

    async def _stream_events(self, answer: Answer, first_choice: Any, choices: Any, path: str) -> AsyncIterator[bytes]:
        """Yield the answer as server-sent events. An error becomes an event, because the status is already sent."""
        started: set[int] = set()
        try:
            async with aclosing(choices):
                choice = first_choice
                while choice is not None:
                    answer.add(choice)
                    yield answer.event(choice, first=choice.number not in started)
                    started.add(choice.number)
                    choice = await anext(choices, None)
            yield answer.last_events()
        except Exception as error:  # of any type: the client gets it as an event
            refusal = refusal_of(error)
            if refusal is None:
                raise
            self.metrics.requests.labels(path, f"{refusal.status} in a stream").inc()
            yield error_event(refusal.body())
        finally:
            self._count_tokens(answer)

    async def _generate_choices(self, request: TextRequest) -> AsyncGenerator[Choice]:
        """Yield the pieces of all texts of a request as they come."""
        async with self._load(request.model, "generate") as (engine, seconds_left):
            seed = request.seed if request.seed is not None else next(self.seeds)
            prompts = request.prompts()
            self._check_choice_count(engine, len(prompts))
            texts: list[AsyncIterator[Any]] = []
            for index, prompt in enumerate(prompts):
                pieces = engine.pieces(request.engine_request(prompt, seed=(seed + index) % 2**63))
                texts.append(time_pieces(pieces, self.metrics, request.model))
            async with aclosing(merge_choices(texts, seconds_left)) as choices:
                async for choice in choices:
                    yield choice

    @asynccontextmanager
    async def _load(self, name: str, task: str) -> AsyncIterator[tuple[ReplicaSet, float]]:
        """Yield the loaded engine of a model, and the seconds that remain for the request."""
        start = time.monotonic()
        limit = self.limits.request_seconds
        async with AsyncExitStack() as contexts:
            try:
                async with asyncio.timeout(limit):
                    engine = await contexts.enter_async_context(self.pool.using(name))
            except TimeoutError:
                raise HTTPException(504, f"{name} was still being loaded after {limit:g} s; try again") from None
            self._check_task(engine, name, task)
            yield engine, limit - (time.monotonic() - start)

    def _count_tokens(self, answer: Answer) -> None:
        usage = answer.usage
        model = answer.request.model
        self.metrics.tokens.labels(model, "prompt").inc(usage.prompt_tokens)
        self.metrics.tokens.labels(model, "cached").inc(usage.prompt_tokens_details.cached_tokens)
        self.metrics.tokens.labels(model, "answer").inc(usage.completion_tokens)

    def _check_model(self, name: str) -> None:
        if name not in self.pool.engines:
            valid_names = ", ".join(self.pool.engines)
            raise HTTPException(404, f"the model {name!r} is not served here; ask for one of {valid_names}")

    def _check_choice_count(self, engine: ReplicaSet, count: int) -> None:
        assert engine.ready is not None
        limit = engine.ready.rows + engine.ready.replicas * engine.request.max_waiting
        if count > limit:
            reason = f"{engine.ready.rows:,} are computed at once, and more wait only as far as --max-waiting allows"
            raise HTTPException(400, f"{count:,} choices are more than this server takes: {reason}; ask for at most {limit:,}")

    def _check_task(self, engine: ReplicaSet, name: str, task: str) -> None:
        """Raise HTTPException if the model does another task than this address."""
        assert engine.ready is not None
        if engine.ready.task != task:
            paths = "/v1/embeddings" if engine.ready.task == "encode" else "/v1/chat/completions or /v1/completions"
            raise HTTPException(400, f"the model {name!r} answers at {paths}")


def _encode_vector(row: str, encoding_format: str) -> Any:
    """Return an fp32 vector in base64 as it is for "base64", and as numbers for "float"."""
    if encoding_format == "base64":
        return row
    data = base64.b64decode(row)
    return struct.unpack(f"<{len(data) // 4}f", data)


def make_app(server: Server) -> FastAPI:
    """Return the ASGI application of a server."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        server.draining = True
        await server.pool.stop()

    app = FastAPI(title="upshift serve", version="1", lifespan=lifespan, docs_url="/docs", redoc_url=None)
    errors: dict[str, Any] = {"responses": RESPONSES}
    app.post("/v1/chat/completions", **errors)(server.chat)
    app.post("/v1/completions", **errors)(server.complete)
    app.post("/v1/embeddings", **errors)(server.embed)
    app.get("/v1/models")(server.models)
    app.get("/health")(server.health)

    @app.get("/metrics")
    def metrics() -> Response:
        server.pool.update_gauges()
        return Response(server.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/", include_in_schema=False)
    def page() -> HTMLResponse:
        return HTMLResponse((files("upshift.serving") / "chat.html").read_text(encoding="utf-8"))

    for error_type in (RequestValidationError, HTTPException, UpshiftError, TimeoutError, Exception):
        app.add_exception_handler(error_type, _handle_error)
    paths = frozenset(route.path for route in app.routes if isinstance(route, Route))
    app.add_middleware(Guard, limits=server.limits, metrics=server.metrics, paths=paths)
    return app


async def _handle_error(request: Request, error: Exception) -> Response:
    refusal = refusal_of(error)
    if refusal is None:
        logger.error("a request failed", exc_info=error)
    return error_response(refusal)


class BodyTooLarge(Exception):
    pass


class Guard:
    """An ASGI middleware that checks requests before the application reads them, logs them and counts them.

    ``paths`` are the paths that the metrics count by name. All other paths are counted together."""

    def __init__(self, app: Any, limits: Limits, metrics: Metrics, paths: frozenset[str]) -> None:
        self._app = app
        self._limits = limits
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        status = 0

        async def send_and_note_status(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        refusal = self._check_headers(scope)
        if refusal is not None:
            await error_response(refusal)(scope, receive, send_and_note_status)
        else:
            await self._check_body_and_run(scope, receive, send_and_note_status)
        seconds = time.perf_counter() - start
        logger.info("%s %s %s %.3f s", scope["method"], quote(scope["path"]), status, seconds)
        path = scope["path"] if scope["path"] in self._paths else "other"
        self._metrics.requests.labels(path, str(status)).inc()

    def _check_headers(self, scope: Any) -> Refusal | None:
        """Return a refusal if the API key is missing or wrong, or if the body is announced as too large."""
        limits = self._limits
        headers = dict(scope["headers"])
        if limits.keys and scope["path"] not in PUBLIC_PATHS:
            scheme, _, client_key = headers.get(b"authorization", b"").partition(b" ")
            # Compare with every key, in constant time, so that the time does not depend on the key.
            matches = [hmac.compare_digest(client_key.strip(), key.encode()) for key in limits.keys]
            if scheme.lower() != b"bearer" or not any(matches):
                return Refusal(401, "send a key that this server knows: Authorization: Bearer KEY")
        size = headers.get(b"content-length", b"0")
        if size.isdigit() and int(size) > limits.body_bytes:
            return _refuse_size(limits.body_bytes)
        return None

    async def _check_body_and_run(self, scope: Any, receive: Any, send: Any) -> None:
        """Read the whole body before the application runs, so that a body that is too large or too slow never reaches
        an address."""
        limits = self._limits
        try:
            async with asyncio.timeout(limits.body_seconds):
                body = await _read_body(receive, limits.body_bytes)
        except BodyTooLarge:
            await error_response(_refuse_size(limits.body_bytes))(scope, receive, send)
            return
        except TimeoutError:
            refusal = Refusal(408, f"the body did not come within {limits.body_seconds:g} s")
            await error_response(refusal)(scope, receive, send)
            return
        if body is None:  # the client has disconnected
            return
        if scope["path"] in self._paths and takes_body(scope):
            problem = check_body(scope, body)
            if problem is not None:
                await error_response(problem)(scope, receive, send)
                return
            scope = mark_as_json(scope)
        await self._run(scope, body, receive, send)

    async def _run(self, scope: Any, body: bytes, receive: Any, send: Any) -> None:
        """Run the application until it has answered the request, or the client disconnects."""
        disconnected = asyncio.Event()
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_body() -> Any:
            if messages:
                return messages.pop()
            await disconnected.wait()
            return {"type": "http.disconnect"}

        async def watch_connection() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            disconnected.set()

        answer_task = asyncio.create_task(self._app(scope, receive_body, send))
        watch_task = asyncio.create_task(watch_connection())
        try:
            await asyncio.wait({answer_task, watch_task}, return_when=asyncio.FIRST_COMPLETED)
            if not answer_task.done():
                answer_task.cancel()
                await asyncio.wait({answer_task})
            if not answer_task.cancelled():
                answer_task.result()
        finally:
            watch_task.cancel()
            answer_task.cancel()


async def _read_body(receive: Any, max_bytes: int) -> bytes | None:
    """Return the body of a request, or None if the client disconnects. Raise BodyTooLarge above ``max_bytes``."""
    chunks = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > max_bytes:
            raise BodyTooLarge
        if not message.get("more_body"):
            return b"".join(chunks)


def _refuse_size(max_bytes: int) -> Refusal:
    return Refusal(413, f"the body is larger than {max_bytes:,} bytes")


def takes_body(scope: Any) -> bool:
    """Return whether the request is for an address that reads a body."""
    return bool(scope["method"] == "POST" and scope["path"].startswith(API_PREFIX))


def check_body(scope: Any, body: bytes) -> Refusal | None:
    """Return a refusal if the body is not a JSON object in UTF-8. Return None if it is.

    ``curl -d`` names every body a form. As with other OpenAI-compatible servers, such a body is read as JSON. From a
    browser, the header must name JSON: a page of another site may send a form without permission, but not JSON."""
    headers = dict(scope["headers"])
    encoding = headers.get(b"content-encoding", b"identity").strip().lower()
    if encoding not in (b"", b"identity"):
        return Refusal(415, f"a body with Content-Encoding {_quote_header(encoding)} is not read here; send it as it is")
    media_type = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    is_json = media_type == b"application/json" or (media_type.startswith(b"application/") and media_type.endswith(b"+json"))
    if media_type and not is_json and b"origin" in headers:
        return Refusal(415, f"a browser's body is read as application/json alone, not as {_quote_header(media_type)}")
    problem = _find_content_problem(body)
    return None if problem is None else Refusal(400, f"{problem}; send a JSON object in UTF-8")


def mark_as_json(scope: Any) -> Any:
    """Return the scope of the same request with the content type of JSON."""
    headers = [(name, value) for name, value in scope["headers"] if name.lower() != JSON_TYPE[0]]
    return {**scope, "headers": [*headers, JSON_TYPE]}


def _find_content_problem(body: bytes) -> str | None:
    """Return why the body is not a JSON object that can be read, or None."""
    if not body.strip():
        return "the body is empty"
    try:
        document = json.loads(body.decode("utf-8"), parse_constant=_reject_constant)
    except UnicodeDecodeError:
        return "the body is not UTF-8"
    except RecursionError:
        return "the body is nested too deeply"
    except json.JSONDecodeError as error:
        return f"the body is not JSON ({error})"
    except ValueError as error:  # NaN, or a number with thousands of digits
        return f"the body has a number that is not possible ({str(error).partition(';')[0]})"
    if not isinstance(document, dict):
        return f"the body is {TYPE_NAMES[type(document)]}"
    return "the body is nested too deeply" if _is_too_deep(document) else None


def _is_too_deep(document: Any) -> bool:
    """Return whether objects and lists are nested more than MAX_DEPTH levels deep."""
    level = [document]
    for _ in range(MAX_DEPTH):
        items: list[Any] = []
        for container in level:
            items += container.values() if isinstance(container, dict) else container
        level = [item for item in items if isinstance(item, dict | list)]
        if not level:
            return False
    return True


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _quote_header(value: bytes) -> str:
    return ascii(value.decode("latin-1"))[:100]
