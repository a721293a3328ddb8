"""Define the HTTP application of the server: OpenAI's addresses, health, metrics and a chat page.

``Guard`` checks each request before an address sees it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from upshift.errors import JobFailed, RequestError, UpshiftError
from upshift.serving.batches import Batches, BatchFolder, LineAnswer
from upshift.serving.engine_process import RequestRefused, Vectors
from upshift.serving.messages import DescribeTokenizer, Detokenize, Embed, Piece, Ready, Task
from upshift.serving.metrics import Metrics, time_pieces
from upshift.serving.model_pool import ModelPool
from upshift.serving.openai_requests import ChatRequest, CompletionRequest, EmbeddingRequest, RequestBody
from upshift.serving.openai_responses import Answer, Choice, TextRequest, Usage, add_prompt, error_event, merge_choices
from upshift.serving.protocols.adapter_loading import LoadAdapterRequest, UnloadAdapterRequest
from upshift.serving.protocols.anthropic_answers import MessageAnswer
from upshift.serving.protocols.anthropic_requests import MessagesPrompt, MessagesRequest
from upshift.serving.protocols.batch_addresses import add_batch_addresses
from upshift.serving.protocols.description import DescribedApp
from upshift.serving.protocols.embeddings import CohereEmbedRequest, TeiEmbedRequest, read_floats
from upshift.serving.protocols.ollama_addresses import OllamaAddresses
from upshift.serving.protocols.responses_addresses import ResponsesAddresses
from upshift.serving.protocols.responses_requests import ResponsesRequest
from upshift.serving.protocols.scoring import RerankRequest, ScoreRequest, ScoringRequest, engine_request, scores_of
from upshift.serving.protocols.tokenize import DetokenizeRequest, TokenizeRequest
from upshift.serving.refusals import (
    ANTHROPIC_RESPONSES,
    FAULT,
    OLLAMA_RESPONSES,
    RESPONSES,
    Refusal,
    body_error,
    error_response,
    refusal_of,
)
from upshift.serving.replicas import ReplicaSet
from upshift.serving.request_checks import Guard, Limits, RootPath, route_path
from upshift.serving.request_traces import RequestTraces
from upshift.versions import installed_version

logger = logging.getLogger(__name__)

EVENT_STREAM = "text/event-stream"
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # the second one is nginx's: send each event at once
TASK_PATHS: dict[Task, str] = {
    "generate": "/v1/chat/completions or /v1/completions",
    "encode": "/v1/embeddings, /v2/embed, /embed, /rerank and /score",
    "score": "/rerank and /score",
}
TASKS: tuple[Task, ...] = tuple(TASK_PATHS)
SEED_BITS = 62  # of the seed of a request without one
CORS_HEADERS = ("x-request-id", "retry-after")  # that scripts of other sites may read


@dataclass(frozen=True)
class Site:
    """The path under which a proxy offers the server, and the origins of the web pages that may use it."""

    root_path: str = ""
    origins: tuple[str, ...] = ()


NO_ADDRESS = "Not Found"  # Starlette's words
NamedRequest = TypeVar("NamedRequest", bound=RequestBody | MessagesPrompt)


class ProtocolAnswer(Protocol):
    """An answer in the form of one protocol. Its methods return the events of a stream."""

    def start(self, first: Piece) -> bytes:
        """``first`` is the first piece, whose events ``add`` returns."""
        ...

    def add(self, piece: Piece) -> bytes: ...

    def finish(self, usage: Usage) -> bytes: ...

    def error(self, refusal: Refusal) -> bytes: ...

    def body(self, usage: Usage) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        ...


@dataclass
class Server:
    """The handlers of all addresses."""

    pool: ModelPool
    metrics: Metrics
    limits: Limits = field(default_factory=Limits)
    traces: RequestTraces | None = None

    def __post_init__(self) -> None:
        self.responses = ResponsesAddresses(self)

    async def chat(self, request: ChatRequest) -> Response:
        return await self._generate(request, "/v1/chat/completions")

    async def complete(self, request: CompletionRequest) -> Response:
        return await self._generate(request, "/v1/completions")

    async def answer_line(self, endpoint: str, body: dict[str, Any]) -> LineAnswer:
        """Answer a request of a batch, as the address answers it."""
        body_type, handler = self._line_handlers[endpoint]
        try:
            for field_name in ("stream", "background"):
                if body.get(field_name):
                    raise RequestError(f"a request of a batch is answered in the batch's file; leave out {field_name}")
            response = await handler(body_type.model_validate(body))
        except Exception as error:  # of any type: it is the answer to this request, and the batch goes on
            if isinstance(error, ValidationError):
                error = body_error(error)
            refusal = refusal_of(error)
            if refusal is None:
                logger.error("a request of a batch failed", exc_info=error)
                refusal = FAULT
            return LineAnswer(refusal.status, refusal.body(), refusal.retry_after)
        return LineAnswer(response.status_code, json.loads(bytes(response.body)))

    @property
    def _line_handlers(self) -> dict[str, tuple[Any, Callable[[Any], Awaitable[Response]]]]:
        return {
            "/v1/chat/completions": (ChatRequest, self.chat),
            "/v1/completions": (CompletionRequest, self.complete),
            "/v1/embeddings": (EmbeddingRequest, self.embed),
            "/v1/responses": (ResponsesRequest, self.responses.respond),
        }

    async def message(self, request: MessagesRequest) -> Response:
        request = self.name_model(request)
        chat = request.to_chat()
        return await self.answer_chat(MessageAnswer(chat), chat, "/v1/messages")

    async def count_tokens(self, request: MessagesPrompt) -> dict[str, int]:
        request = self.name_model(request)
        return {"input_tokens": await self.count_prompt(request.to_chat())}

    async def count_prompt(self, chat: ChatRequest) -> int:
        """Return the number of tokens of a chat's prompt."""
        chat.check()
        async with self._load(chat.model, ("generate",)) as (engine, seconds_left), asyncio.timeout(seconds_left):
            tokens = await engine.tokens(chat.tokenize_request())
        return len(tokens.ids)

    async def answer_chat(
        self,
        answer: ProtocolAnswer,
        chat: TextRequest,
        path: str,
        on_end: Callable[[Usage], None] = lambda usage: None,
        media_type: str = EVENT_STREAM,
    ) -> Response:
        """Answer in another form than OpenAI's. ``on_end`` receives the token counts of a whole answer. ``media_type`` is that of
        a stream."""
        self.check_model(chat.model)
        chat.check()
        counts = Answer(chat)
        choices = self._generate_choices(chat)
        if chat.stream:
            first_choice = await anext(choices)  # a request that is rejected here gets an error status instead of a stream
            events = self._stream_protocol(answer, counts, first_choice, choices, path, on_end)
            return StreamingResponse(events, media_type=media_type, headers=STREAM_HEADERS)
        async with aclosing(choices):
            async for choice in choices:
                counts.add(choice)
                answer.add(choice.piece)
        self._count_tokens(counts)
        on_end(counts.usage)
        return JSONResponse(answer.body(counts.usage))

    async def _stream_protocol(
        self, answer: ProtocolAnswer, counts: Answer, first_choice: Any, choices: Any, path: str, on_end: Callable[[Usage], None]
    ) -> AsyncIterator[bytes]:
        """Yield the events of an answer, as ``_stream_events`` does."""
        yield answer.start(first_choice.piece)
        try:
            async with aclosing(choices):
                choice = first_choice
                while choice is not None:
                    counts.add(choice)
                    yield answer.add(choice.piece)
                    choice = await anext(choices, None)
            on_end(counts.usage)
            yield answer.finish(counts.usage)
        except Exception as error:  # of any type: the client gets it as an event
            yield answer.error(self._refuse_in_stream(error, path))
        finally:
            self._count_tokens(counts)

    def _refuse_in_stream(self, error: Exception, path: str) -> Refusal:
        """Count an error in a stream, and return the refusal for it."""
        refusal = refusal_of(error)
        if refusal is None:
            logger.error("a stream failed", exc_info=error)
            refusal = FAULT
        self.metrics.requests.labels(path, f"{refusal.status} in a stream").inc()
        return refusal

    async def embed(self, request: EmbeddingRequest) -> Response:
        request = self.name_model(request)
        vectors = await self.compute_vectors(request.model, Embed(texts=request.texts(), dimensions=request.dimensions))
        is_encoded = request.encoding_format == "base64"
        data = [
            {"object": "embedding", "index": index, "embedding": row if is_encoded else read_floats(row)}
            for index, row in enumerate(vectors.rows)
        ]
        usage = {"prompt_tokens": vectors.tokens, "total_tokens": vectors.tokens}
        return JSONResponse({"object": "list", "data": data, "model": request.model, "usage": usage})

    async def embed_for_cohere(self, request: CohereEmbedRequest) -> Response:
        return await self._embed_texts(request)

    async def embed_for_tei(self, request: TeiEmbedRequest) -> Response:
        return await self._embed_texts(request)

    async def load_model(self, name: str, task: Task) -> Ready:
        """Load a model of a task, if it is not loaded. Return the report of its engine."""
        async with self._load(name, (task,)) as (engine, _):
            assert engine.ready is not None
            return engine.ready

    async def _embed_texts(self, request: CohereEmbedRequest | TeiEmbedRequest) -> Response:
        name = self.choose_model(request.model)
        vectors = await self.compute_vectors(name, request.engine_request())
        return JSONResponse(request.answer(name, vectors.rows, vectors.tokens))

    async def compute_vectors(self, name: str, request: Embed) -> Vectors:
        """Return the vectors of texts, and count their tokens."""
        async with self._load(name, ("encode",)) as (engine, seconds_left), asyncio.timeout(seconds_left):
            vectors = await engine.vectors(request)
        self.metrics.tokens.labels(name, "prompt").inc(vectors.tokens)
        return vectors

    async def rerank(self, request: RerankRequest) -> Response:
        return await self._score(request)

    async def score(self, request: ScoreRequest) -> Response:
        return await self._score(request)

    async def _score(self, request: ScoringRequest) -> Response:
        """Answer with the scores of pairs of texts: a cross-encoder's, or the cosine of embeddings."""
        name = self.choose_model(request.model)
        async with self._load(name, ("score", "encode")) as (engine, seconds_left), asyncio.timeout(seconds_left):
            assert engine.ready is not None
            reads_pairs = engine.ready.task == "score"
            vectors = await engine.vectors(engine_request(request, reads_pairs=reads_pairs))
        self.metrics.tokens.labels(name, "prompt").inc(vectors.tokens)
        scores = scores_of(request, vectors.rows, reads_pairs=reads_pairs)
        return JSONResponse(request.answer(name, scores, vectors.tokens))

    async def tokenize(self, request: TokenizeRequest) -> dict[str, Any]:
        async with self._load_any(request.model) as (engine, seconds_left), asyncio.timeout(seconds_left):
            tokens = await engine.tokens(request.engine_request())
            positions = None if engine.ready is None else engine.ready.positions
        texts = tokens.texts if request.return_token_strs else None
        return {"count": len(tokens.ids), "max_model_len": positions, "tokens": tokens.ids, "token_strs": texts}

    async def detokenize(self, request: DetokenizeRequest) -> dict[str, Any]:
        async with self._load_any(request.model) as (engine, seconds_left), asyncio.timeout(seconds_left):
            return {"prompt": await engine.text(Detokenize(tokens=tuple(request.tokens)))}

    async def tokenizer_info(self, model: str | None = None) -> dict[str, Any]:
        async with self._load_any(model) as (engine, seconds_left), asyncio.timeout(seconds_left):
            settings: dict[str, Any] = json.loads(await engine.text(DescribeTokenizer()))
        return settings

    async def invoke(self, body: dict[str, Any]) -> Response:
        """Answer a request of SageMaker's, whose fields say for which address it is."""
        handlers: dict[str, tuple[Any, Callable[[Any], Awaitable[Response]]]] = {
            "messages": (ChatRequest, self.chat),
            "prompt": (CompletionRequest, self.complete),
            "input": (EmbeddingRequest, self.embed),
            "query": (RerankRequest, self.rerank),
            "queries": (ScoreRequest, self.score),
            "text_1": (ScoreRequest, self.score),
        }
        name = next((name for name in handlers if name in body), None)
        if name is None:
            raise HTTPException(400, f"the body is for no address; give one of {', '.join(handlers)}")
        body_type, handler = handlers[name]
        try:
            request = body_type.model_validate(body)
        except ValidationError as error:
            raise body_error(error) from None
        return await handler(request)

    def load(self) -> dict[str, int]:
        return {"server_load": sum(engine.in_flight for engine in self.pool.engines.values())}

    def ping(self) -> Response:
        return Response(status_code=503 if self.health()["status"] == "failed" else 200)

    def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._describe_model(name) for name in self.pool.names]}

    def model(self, name: str) -> dict[str, Any]:
        self.check_model(name)
        return self._describe_model(name)

    def _describe_model(self, name: str) -> dict[str, Any]:
        """Return a model in OpenAI's form. An adapter has the name of its model in ``parent``, as vLLM has."""
        parent = {"parent": self.pool.adapters[name]} if name in self.pool.adapters else {}
        return {"id": name, "object": "model", "created": 0, "owned_by": "upshift", **parent}

    async def load_adapter(self, request: LoadAdapterRequest) -> Response:
        folder = self.limits.adapter_folder
        if folder is None:
            raise HTTPException(403, "clients load no adapters here; start the server with --adapter-folder")
        if request.lora_name in self.pool.names:
            raise HTTPException(400, f"{request.lora_name!r} is served already; unload it first, or choose another name")
        references = {name: engine.request.model for name, engine in self.pool.engines.items()}
        base, order = await asyncio.to_thread(request.order, folder, references)
        async with self._load(base, ("generate",)) as (engine, seconds_left), asyncio.timeout(seconds_left):
            try:
                await engine.change_adapters(order)
            except RequestRefused as refused:
                raise HTTPException(refused.status, str(refused).replace(order.folder, request.lora_path)) from None
        self.pool.adapters[request.lora_name] = base
        return Response(f"Success: LoRA adapter '{request.lora_name}' added successfully.", media_type="text/plain")

    async def unload_adapter(self, request: UnloadAdapterRequest) -> Response:
        if self.limits.adapter_folder is None:
            raise HTTPException(403, "clients unload no adapters here; start the server with --adapter-folder")
        base = self.pool.adapters.get(request.lora_name)
        if base is None:
            loaded = ", ".join(self.pool.adapters) or "none"
            raise HTTPException(404, f"the adapter {request.lora_name!r} is not loaded here; loaded are: {loaded}")
        async with self._load(base, ("generate",)) as (engine, seconds_left), asyncio.timeout(seconds_left):
            await engine.change_adapters(request.order())
        self.pool.adapters.pop(request.lora_name, None)
        return Response(f"Success: LoRA adapter '{request.lora_name}' removed successfully.", media_type="text/plain")

    def version(self) -> dict[str, Any]:
        return {"version": installed_version("upshift")}

    def health(self) -> dict[str, Any]:
        """Return the state and the promises of all engines. ``upshift load-test`` reads them."""
        models = {name: self._describe_engine(engine) for name, engine in self.pool.engines.items()}
        has_failed = any(engine.has_failed for engine in self.pool.engines.values())
        return {"status": "failed" if has_failed else "ok", "models": models}

    def _describe_engine(self, engine: ReplicaSet) -> dict[str, Any]:
        description: dict[str, Any] = {"state": engine.state, "in_flight": engine.in_flight, "processes": engine.pids}
        description["spare_bytes"] = engine.spare_bytes
        if engine.ready is not None:
            description |= engine.ready.model_dump(exclude={"kind"})
        description |= engine.heartbeat.model_dump(exclude={"kind"})
        generates = engine.ready is None or engine.ready.task == "generate"
        promised_tpot_ms = engine.request.max_tpot_ms if generates else None
        return description | {"promised_ttft_ms": engine.request.max_ttft_ms, "promised_tpot_ms": promised_tpot_ms}

    async def _generate(self, request: TextRequest, path: str) -> Response:
        """Answer a request for text: at once, or as a stream of events."""
        request = self.name_model(request)
        request.check()
        answer = Answer(request)
        choices = self._generate_choices(request)
        if not request.stream:
            async with aclosing(choices):
                async for choice in choices:
                    answer.add(choice)
            self._count_tokens(answer)
            return JSONResponse(answer.body())
        first_choice = await anext(choices)  # a request that is rejected here gets an error status instead of a stream
        events = self._stream_events(answer, first_choice, choices, path)
        return StreamingResponse(events, media_type=EVENT_STREAM, headers=STREAM_HEADERS)

    async def _stream_events(self, answer: Answer, first_choice: Any, choices: Any, path: str) -> AsyncIterator[bytes]:
        """Yield the answer as server-sent events. An error becomes an event, because the status is already sent."""
        started: set[int] = set()
        try:
            async with aclosing(choices):
                choice = first_choice
                while choice is not None:
                    calls = answer.add(choice)
                    is_first = choice.number not in started
                    if is_first or not choice.piece.is_empty:
                        yield answer.event(choice, calls, first=is_first)
                    started.add(choice.number)
                    choice = await anext(choices, None)
            yield answer.last_events()
        except Exception as error:  # of any type: the client gets it as an event
            yield error_event(self._refuse_in_stream(error, path).body())
        finally:
            self._count_tokens(answer)

    async def _generate_choices(self, request: TextRequest) -> AsyncGenerator[Choice]:
        """Yield the pieces of all texts of a request as they come."""
        async with self._load(request.model, ("generate",)) as (engine, seconds_left):
            seed = request.seed if request.seed is not None else secrets.randbits(SEED_BITS)
            prompts = request.prompts()
            self._check_choice_count(engine, len(prompts))
            texts: list[AsyncIterator[Any]] = []
            for index, prompt in enumerate(prompts):
                engine_request = request.engine_request(prompt, seed=choice_seed(seed, index))
                if request.model in self.pool.adapters:
                    engine_request = engine_request.model_copy(update={"adapter": request.model})
                pieces = engine.pieces(engine_request)
                timed_pieces = time_pieces(pieces, self.metrics, request.model, self.traces)
                texts.append(add_prompt(timed_pieces, request, await self._echoed_text(engine, request, prompt)))
            async with aclosing(merge_choices(texts, seconds_left)) as choices:
                async for choice in choices:
                    yield choice

    async def _echoed_text(self, engine: ReplicaSet, request: TextRequest, prompt: Any) -> str:
        """Return the text of a prompt if the answer begins with it, or an empty text."""
        if not request.echo:
            return ""
        if isinstance(request, ChatRequest):
            return str(prompt[-1]["content"])
        return prompt if isinstance(prompt, str) else await engine.text(Detokenize(tokens=prompt))

    def _load_any(self, name: str | None) -> AbstractAsyncContextManager[tuple[ReplicaSet, float]]:
        """Return what ``_load`` does, for any task."""
        return self._load(self.choose_model(name), TASKS)

    def choose_model(self, name: str | None) -> str:
        """Return the name of a model that is served here. Without a name, there must be one model."""
        if name is None and len(self.pool.engines) > 1:
            raise HTTPException(400, f"model is missing; give one of {', '.join(self.pool.engines)}")
        chosen = next(iter(self.pool.engines)) if name is None else name
        self.check_model(chosen)
        return chosen

    @asynccontextmanager
    async def _load(self, name: str, tasks: tuple[Task, ...]) -> AsyncIterator[tuple[ReplicaSet, float]]:
        """Yield the loaded engine of a model, or of an adapter's model, and the seconds that remain for the request."""
        name = self.pool.adapters.get(name, name)
        start = time.monotonic()
        limit = self.limits.request_seconds
        async with AsyncExitStack() as contexts:
            try:
                async with asyncio.timeout(limit):
                    engine = await contexts.enter_async_context(self.pool.using(name))
            except TimeoutError:
                raise HTTPException(504, f"{name} was still being loaded after {limit:g} s; try again") from None
            except UpshiftError as error:
                if self.pool.engines[name].state != "failed":
                    raise
                logger.error("%s could not be loaded: %s", name, error)  # in words for who started the server, with its paths
                raise JobFailed(f"{name} could not be loaded; the server's log says why") from None
            self._check_task(engine, name, tasks)
            yield engine, limit - (time.monotonic() - start)

    def _count_tokens(self, answer: Answer) -> None:
        usage = answer.usage
        model = answer.request.model
        cached = usage.prompt_tokens_details.cached_tokens
        self.metrics.record_tokens(model, prompt=usage.prompt_tokens, cached=cached, answer=usage.completion_tokens)

    def name_model(self, request: NamedRequest) -> NamedRequest:
        """Return a request with the name of its model. Without a name, there must be one model, which is meant."""
        named: Any = request.model_copy(update={"model": self.choose_model(request.model or None)})
        result: NamedRequest = named
        return result

    def check_model(self, name: str) -> None:
        if name not in self.pool.names:
            valid_names = ", ".join(self.pool.names)
            raise HTTPException(404, f"the model {name!r} is not served here; ask for one of {valid_names}")

    def _check_choice_count(self, engine: ReplicaSet, count: int) -> None:
        assert engine.ready is not None
        limit = engine.ready.rows + engine.ready.replicas * engine.request.max_waiting
        if count > limit:
            reason = f"{engine.ready.rows:,} are computed at once, and more wait only as far as --max-waiting allows"
            raise HTTPException(400, f"{count:,} choices are more than this server takes: {reason}; ask for at most {limit:,}")

    def _check_task(self, engine: ReplicaSet, name: str, tasks: tuple[Task, ...]) -> None:
        """Raise HTTPException if the model does another task than this address."""
        assert engine.ready is not None
        if engine.ready.task not in tasks:
            raise HTTPException(400, f"the model {name!r} answers at {TASK_PATHS[engine.ready.task]}")


def choice_seed(seed: int, index: int) -> int:
    """Return the seed of one of a request's texts, below 2**63. The first text has the request's own seed.

    The others have seeds that no request with a seed nearby has."""
    if index == 0:
        return seed % 2**63
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def make_app(server: Server, site: Site = Site()) -> FastAPI:
    """Return the ASGI application of a server."""
    folder = server.limits.batch_folder
    rows = sum(engine.request.concurrency for engine in server.pool.engines.values())
    batches = None if folder is None else Batches(BatchFolder(folder), server.answer_line, rows)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if batches is not None:
            batches.resume()
        yield
        if batches is not None:
            await batches.stop()
        await server.responses.stop()
        await server.pool.stop()

    app = DescribedApp(title="upshift serve", version="1", lifespan=lifespan, docs_url=None, redoc_url=None)
    _add_addresses(app, server, batches)

    @app.get("/metrics")
    def metrics() -> Response:
        server.pool.update_gauges()
        return Response(server.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    for path, name in (("/", "chat.html"), ("/docs", "docs.html")):
        app.get(path, include_in_schema=False)(partial(_read_page, name))

    for route in [route for route in app.routes if isinstance(route, APIRoute) and "GET" in (route.methods or ())]:
        app.head(route.path, include_in_schema=False)(route.endpoint)  # as monitors ask whether an address is there
    for error_type in (RequestValidationError, HTTPException, UpshiftError, TimeoutError):
        app.add_exception_handler(error_type, _handle_error)
    paths = frozenset(route.path for route in app.routes if isinstance(route, Route))
    app.add_middleware(Guard, limits=server.limits, metrics=server.metrics, paths=paths)
    if site.origins:  # outside of the guard: a browser asks for permission without a key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=site.origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=CORS_HEADERS,
        )
    if site.root_path:
        app.add_middleware(RootPath, prefix=site.root_path)
    return app


def _read_page(name: str) -> HTMLResponse:
    """Return a page of the package. It loads nothing from other sites, so that it works without a network."""
    return HTMLResponse((files("upshift.serving") / name).read_text(encoding="utf-8"))


def _add_addresses(app: FastAPI, server: Server, batches: Batches | None) -> None:
    errors: dict[str, Any] = {"responses": RESPONSES}
    app.post("/v1/chat/completions", **errors)(server.chat)
    app.post("/v1/completions", **errors)(server.complete)
    app.post("/v1/embeddings", **errors)(server.embed)
    app.post("/v2/embed", **errors)(server.embed_for_cohere)
    app.post("/embed", **errors)(server.embed_for_tei)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        app.post(path, **errors)(server.rerank)
    for path in ("/score", "/v1/score"):
        app.post(path, **errors)(server.score)
    server.responses.add_to(app, errors)
    OllamaAddresses(server).add_to(app, {"responses": OLLAMA_RESPONSES})
    app.post("/v1/messages", responses=ANTHROPIC_RESPONSES)(server.message)
    app.post("/v1/messages/count_tokens", responses=ANTHROPIC_RESPONSES)(server.count_tokens)
    app.post("/tokenize", **errors)(server.tokenize)
    app.post("/detokenize", **errors)(server.detokenize)
    app.get("/tokenizer_info", **errors)(server.tokenizer_info)
    app.post("/invocations", include_in_schema=False)(server.invoke)  # its bodies are those of other addresses
    app.get("/load")(server.load)
    app.get("/ping")(server.ping)
    add_batch_addresses(app, batches, errors)
    app.post("/v1/load_lora_adapter", **errors)(server.load_adapter)
    app.post("/v1/unload_lora_adapter", **errors)(server.unload_adapter)
    app.get("/v1/models")(server.models)
    app.get("/v1/models/{name:path}", **errors)(server.model)
    app.get("/version")(server.version)
    app.get("/health")(server.health)


async def _handle_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code == 404 and error.detail == NO_ADDRESS:
        error = HTTPException(404, f"this server has no address {request.url.path[:100]!r}; GET /docs lists those that it has")
    refusal = refusal_of(error)
    if refusal is None:
        logger.error("a request failed", exc_info=error)
    return error_response(refusal or FAULT, route_path(request.scope))
