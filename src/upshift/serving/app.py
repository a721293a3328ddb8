"""Define the addresses of the server: OpenAI's, health, metrics and a page to talk to the model."""

from __future__ import annotations

import asyncio
import base64
import itertools
import logging
import struct
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.routing import Route

from upshift.errors import UpshiftError
from upshift.serving.answers import Answer, Asked, Choice, error_event, together
from upshift.serving.guard import Guard, Limits
from upshift.serving.messages import Embed
from upshift.serving.metrics import Metrics
from upshift.serving.refusals import RESPONSES, answer_of, refusal
from upshift.serving.replicas import Replicas
from upshift.serving.requests import ChatRequest, CompletionRequest, EmbeddingRequest
from upshift.serving.served import Served
from upshift.serving.timed import timed

logger = logging.getLogger(__name__)
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
