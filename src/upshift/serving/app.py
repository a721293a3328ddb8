"""Define the addresses of the server: OpenAI's, health, metrics and a page to talk to the model.

Check the API key, the body size and the upload rate before a request is read. Afterwards log a line without the
request's text, and count the request.

Check the body of a request before an address reads it: a JSON object in UTF-8, whatever type the client names.

``curl -d`` names every body a form. As with other OpenAI-compatible servers, such a body is read as the JSON that it
is. Browsers are the exception: a page of another site may send a form without asking, so there the type has to be
named.
"""

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
from upshift.serving.metrics import Metrics, timed
from upshift.serving.model_pool import Served
from upshift.serving.openai_requests import ChatRequest, CompletionRequest, EmbeddingRequest
from upshift.serving.openai_responses import RESPONSES, Answer, Asked, Choice, Refusal, answer_of, error_event, refusal, together
from upshift.serving.replicas import Replicas

MOST_DEPTH = 200  # of objects and lists in each other
WITH_BODY = "/v1/"  # addresses
JSON_TYPE = (b"content-type", b"application/json")
WORDS = {list: "an array", str: "a text", int: "a number", float: "a number", bool: "true or false", type(None): "null"}


def takes_body(scope: Any) -> bool:
    return bool(scope["method"] == "POST" and scope["path"].startswith(WITH_BODY))


def problem_of(scope: Any, body: bytes) -> Refusal | None:
    """Return why a body cannot be read, or None."""
    headers = dict(scope["headers"])
    encoding = headers.get(b"content-encoding", b"identity").strip().lower()
    if encoding not in (b"", b"identity"):
        return Refusal(415, f"a body with Content-Encoding {_shown(encoding)} is not read here; send it as it is")
    named = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    is_json = named == b"application/json" or (named.startswith(b"application/") and named.endswith(b"+json"))
    if named and not is_json and b"origin" in headers:
        return Refusal(415, f"a browser's body is read as application/json alone, not as {_shown(named)}")
    words = _problem_of_content(body)
    return None if words is None else Refusal(400, f"{words}; send a JSON object in UTF-8")


def as_json(scope: Any) -> Any:
    """Return the scope of the same request with the type of a body that was found to be JSON."""
    headers = [(name, value) for name, value in scope["headers"] if name.lower() != JSON_TYPE[0]]
    return {**scope, "headers": [*headers, JSON_TYPE]}


def _problem_of_content(body: bytes) -> str | None:
    if not body.strip():
        return "the body is empty"
    try:
        found = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        return "the body is not UTF-8"
    except RecursionError:
        return "the body is nested too deeply"
    except json.JSONDecodeError as error:
        return f"the body is not JSON ({error})"
    except ValueError as error:  # NaN, or a number of thousands of digits
        return f"the body has a number that is not possible ({str(error).partition(';')[0]})"
    if not isinstance(found, dict):
        return f"the body is {WORDS[type(found)]}"
    return "the body is nested too deeply" if _is_deep(found) else None


def _is_deep(document: Any) -> bool:
    level = [document]
    for _ in range(MOST_DEPTH):
        inside = [one for value in level for one in (value.values() if isinstance(value, dict) else value)]
        level = [one for one in inside if isinstance(one, dict | list)]
        if not level:
            return False
    return True


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _shown(value: bytes) -> str:
    return ascii(value.decode("latin-1"))[:100]


logger = logging.getLogger(__name__)
OPEN = ("/", "/health", "/docs", "/openapi.json")  # without a key


@dataclass(frozen=True)
class Limits:
    """The limits of requests, and the ``keys`` of clients. Without keys, everybody may send requests."""

    request_seconds: float = 600.0
    body_bytes: int = 4 * 2**20
    body_seconds: float = 30.0
    keys: tuple[str, ...] = ()


class TooLarge(Exception):
    pass


class Guard:
    """An ASGI middleware that guards the server. Metrics count ``paths`` by their names, and all others as one."""

    def __init__(self, app: Any, limits: Limits, metrics: Metrics, paths: frozenset[str]) -> None:
        self._app = app
        self._limits = limits
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.perf_counter(), 0

        async def sent(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        found = self._refused(scope)
        if found is not None:
            await answer_of(found)(scope, receive, sent)
        else:
            await self._pass(scope, receive, sent)
        seconds = time.perf_counter() - start
        logger.info("%s %s %s %.3f s", scope["method"], quote(scope["path"]), status, seconds)
        path = scope["path"] if scope["path"] in self._paths else "other"
        self._metrics.requests.labels(path, str(status)).inc()

    def _refused(self, scope: Any) -> Refusal | None:
        limits, headers = self._limits, dict(scope["headers"])
        if limits.keys and scope["path"] not in OPEN:
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            same = [hmac.compare_digest(given.strip(), key.encode()) for key in limits.keys]
            if scheme.lower() != b"bearer" or not any(same):
                return Refusal(401, "send a key that this server knows: Authorization: Bearer KEY")
        size = headers.get(b"content-length", b"0")
        if size.isdigit() and int(size) > limits.body_bytes:
            return _too_large(limits.body_bytes)
        return None

    async def _pass(self, scope: Any, receive: Any, send: Any) -> None:
        """Read the whole body here, so that a body that is too large or too slow never reaches an address."""
        limits = self._limits
        try:
            async with asyncio.timeout(limits.body_seconds):
                body = await _read(receive, limits.body_bytes)
        except TooLarge:
            await answer_of(_too_large(limits.body_bytes))(scope, receive, send)
            return
        except TimeoutError:
            await answer_of(Refusal(408, f"the body did not come within {limits.body_seconds:g} s"))(scope, receive, send)
            return
        if body is None:  # it left
            return
        if scope["path"] in self._paths and takes_body(scope):
            problem = problem_of(scope, body)
            if problem is not None:
                await answer_of(problem)(scope, receive, send)
                return
            scope = as_json(scope)
        await self._run(scope, body, receive, send)

    async def _run(self, scope: Any, body: bytes, receive: Any, send: Any) -> None:
        """Run the application until the request is answered, or the client disconnects."""
        gone, messages = asyncio.Event(), [{"type": "http.request", "body": body, "more_body": False}]

        async def read() -> Any:
            if messages:
                return messages.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            gone.set()

        answering, watching = asyncio.create_task(self._app(scope, read, send)), asyncio.create_task(watch())
        try:
            await asyncio.wait({answering, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                answering.cancel()
                await asyncio.wait({answering})
            if not answering.cancelled():
                answering.result()
        finally:
            watching.cancel()
            answering.cancel()


async def _read(receive: Any, most: int) -> bytes | None:
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > most:
            raise TooLarge
        if not message.get("more_body"):
            return b"".join(parts)


def _too_large(most: int) -> Refusal:
    return Refusal(413, f"the body is larger than {most:,} bytes")


EVENTS = "text/event-stream"


@dataclass
class Server:
    served: Served
    metrics: Metrics
    limits: Limits = field(default_factory=Limits)
    seeds: Any = field(default_factory=lambda: itertools.count(1))
    draining: bool = False

    async def chat(self, asked: ChatRequest) -> Response:
        return await self._generate(asked, "/v1/chat/completions")

    async def complete(self, asked: CompletionRequest) -> Response:
        return await self._generate(asked, "/v1/completions")

    async def embed(self, asked: EmbeddingRequest) -> Response:
        self._check_model(asked.model, "encode")
        async with self._using(asked.model, "encode") as (engine, left), asyncio.timeout(left):
            found = await engine.vectors(Embed(texts=asked.texts(), dimensions=asked.dimensions))
        self.metrics.tokens.labels(asked.model, "prompt").inc(found.tokens)
        data = [
            {"object": "embedding", "index": index, "embedding": _encoded(row, asked.encoding_format)}
            for index, row in enumerate(found.rows)
        ]
        usage = {"prompt_tokens": found.tokens, "total_tokens": found.tokens}
        return JSONResponse({"object": "list", "data": data, "model": asked.model, "usage": usage})

    def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._model(name) for name in self.served.engines]}

    def health(self) -> dict[str, Any]:
        """Return what runs and what it promises: ``upshift load-test`` compares its figures with these."""
        engines = {name: self._engine(engine) for name, engine in self.served.engines.items()}
        bad = any(engine.failed for engine in self.served.engines.values())
        return {"status": "draining" if self.draining else "failed" if bad else "ok", "models": engines}

    def _model(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": 0, "owned_by": "upshift"}

    def _engine(self, engine: Replicas) -> dict[str, Any]:
        said: dict[str, Any] = {"state": engine.state, "in_flight": engine.in_flight, "processes": engine.pids}
        if engine.ready is not None:
            said |= engine.ready.model_dump(exclude={"kind"})
        said |= engine.beat.model_dump(exclude={"kind"})
        return said | {"promised_ttft_ms": engine.request.max_ttft_ms, "promised_tpot_ms": engine.request.max_tpot_ms}

    async def _generate(self, asked: Asked, path: str) -> Response:
        self._check_model(asked.model, "generate")
        answer, events = Answer(asked), self._choices(asked)
        if not asked.stream:
            async with aclosing(events):
                async for choice in events:
                    answer.add(choice)
            self._count(answer)
            return JSONResponse(answer.whole())
        first = await anext(events)  # what is refused has a status, and no stream
        return StreamingResponse(self._events(answer, first, events, path), media_type=EVENTS)

    async def _events(self, answer: Answer, first: Any, events: Any, path: str) -> AsyncIterator[bytes]:
        begun: set[int] = set()
        try:
            async with aclosing(events):
                choice = first
                while choice is not None:
                    answer.add(choice)
                    yield answer.event(choice, first=choice.place not in begun)
                    begun.add(choice.place)
                    choice = await anext(events, None)
            yield answer.end()
        except Exception as error:  # the status is sent: the stream itself says what went wrong
            found = refusal(error)
            if found is None:
                raise
            self.metrics.requests.labels(path, f"{found.status} in a stream").inc()
            yield error_event(found.body())
        finally:
            self._count(answer)

    async def _choices(self, asked: Asked) -> AsyncGenerator[Choice]:
        async with self._using(asked.model, "generate") as (engine, left):
            seed = asked.seed if asked.seed is not None else next(self.seeds)
            prompts = asked.prompts()
            self._check_count(engine, len(prompts))
            texts = [engine.pieces(asked.of_engine(prompt, seed=(seed + index) % 2**63)) for index, prompt in enumerate(prompts)]
            timings = [timed(pieces, self.metrics, asked.model) for pieces in texts]
            async with aclosing(together(timings, left)) as choices:
                async for choice in choices:
                    yield choice

    @asynccontextmanager
    async def _using(self, name: str, task: str) -> AsyncIterator[tuple[Replicas, float]]:
        """Yield the loaded engine, and the seconds that are left of the time that a request may take."""
        start, most = time.monotonic(), self.limits.request_seconds
        async with AsyncExitStack() as using:
            try:
                async with asyncio.timeout(most):
                    engine = await using.enter_async_context(self.served.using(name))
            except TimeoutError:
                raise HTTPException(504, f"{name} was still being loaded after {most:g} s; try again") from None
            self._check_task(engine, name, task)
            yield engine, most - (time.monotonic() - start)

    def _count(self, answer: Answer) -> None:
        usage, model = answer.usage, answer.asked.model
        self.metrics.tokens.labels(model, "prompt").inc(usage.prompt_tokens)
        self.metrics.tokens.labels(model, "cached").inc(usage.prompt_tokens_details.cached_tokens)
        self.metrics.tokens.labels(model, "answer").inc(usage.completion_tokens)

    def _check_model(self, name: str, task: str) -> None:
        if name not in self.served.engines:
            known = ", ".join(self.served.engines)
            raise HTTPException(404, f"the model {name!r} is not served here; ask for one of {known}")

    def _check_count(self, engine: Replicas, count: int) -> None:
        assert engine.ready is not None
        most = engine.ready.rows + engine.ready.replicas * engine.request.max_waiting
        if count > most:
            why = f"{engine.ready.rows:,} are computed at once, and more wait only as far as --max-waiting allows"
            raise HTTPException(400, f"{count:,} choices are more than this server takes: {why}; ask for at most {most:,}")

    def _check_task(self, engine: Replicas, name: str, task: str) -> None:
        assert engine.ready is not None
        if engine.ready.task != task:
            other = "/v1/embeddings" if engine.ready.task == "encode" else "/v1/chat/completions or /v1/completions"
            raise HTTPException(400, f"the model {name!r} answers at {other}")


def make_app(server: Server) -> FastAPI:
    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        yield
        server.draining = True
        await server.served.stop()

    app = FastAPI(title="upshift serve", version="1", lifespan=life, docs_url="/docs", redoc_url=None)
    more: dict[str, Any] = {"responses": RESPONSES}
    app.post("/v1/chat/completions", **more)(server.chat)
    app.post("/v1/completions", **more)(server.complete)
    app.post("/v1/embeddings", **more)(server.embed)
    app.get("/v1/models")(server.models)
    app.get("/health")(server.health)

    @app.get("/metrics")
    def metrics() -> Response:
        server.served.observe()
        return Response(server.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/", include_in_schema=False)
    def page() -> HTMLResponse:
        return HTMLResponse((files("upshift.serving") / "chat.html").read_text(encoding="utf-8"))

    for kind in (RequestValidationError, HTTPException, UpshiftError, TimeoutError, Exception):
        app.add_exception_handler(kind, _refuse)
    paths = frozenset(route.path for route in app.routes if isinstance(route, Route))
    app.add_middleware(Guard, limits=server.limits, metrics=server.metrics, paths=paths)
    return app


async def _refuse(request: Request, error: Exception) -> Response:
    found = refusal(error)
    if found is None:
        logger.error("a request failed", exc_info=error)
    return answer_of(found)


def _encoded(row: str, form: str) -> Any:
    if form == "base64":
        return row
    numbers = base64.b64decode(row)
    return struct.unpack(f"<{len(numbers) // 4}f", numbers)
