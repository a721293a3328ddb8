"""Answer at Ollama's addresses: /api/chat, /api/generate, /api/embed, /api/tags, /api/show, /api/ps and /api/version.

Ollama's clients read times as nanoseconds, and an answer in a stream as lines of JSON."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, NamedTuple, Protocol

import psutil
from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from upshift.errors import RequestError, UpshiftError
from upshift.hardware.detect import find_nvml
from upshift.hardware.nvml import Gpus, read_gpus
from upshift.inference.weights import weight_files, weights_identity, weights_size
from upshift.models.source import ModelSource, find_model
from upshift.serving.engine_process import Vectors
from upshift.serving.messages import Embed, Piece, Ready, Task
from upshift.serving.model_pool import ModelPool
from upshift.serving.openai_requests import ChatRequest
from upshift.serving.openai_responses import TextRequest, Usage
from upshift.serving.protocols.ollama_requests import (
    OllamaChat,
    OllamaEmbed,
    OllamaEmbedding,
    OllamaPrompt,
    OllamaRequest,
    OllamaShow,
    is_zero,
)
from upshift.serving.refusals import Refusal, read_body
from upshift.serving.replicas import ReplicaSet

LINES = "application/x-ndjson"
LATEST = ":latest"  # as Ollama's clients end the name of a model
NEVER = "2300-01-01T00:00:00Z"  # when a model is unloaded; Ollama's client shows a time so far away as "Forever"
STARTED = datetime.now(UTC).isoformat()
CAPABILITIES: dict[Task, list[str]] = {"generate": ["completion"], "encode": ["embedding"], "score": []}
WRITING_CLASSES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")  # as transformers ends the names of such classes


class TextServer(Protocol):
    """The parts of a server that these addresses need."""

    pool: ModelPool

    def choose_model(self, name: str | None) -> str: ...

    async def load_model(self, name: str, task: Task) -> Ready: ...

    async def answer_chat(
        self, answer: Any, chat: TextRequest, path: str, on_end: Callable[[Usage], None], media_type: str
    ) -> Response: ...

    async def compute_vectors(self, name: str, request: Embed) -> Vectors: ...

    async def count_prompt(self, chat: ChatRequest) -> int: ...

    async def tokenizer_info(self, model: str | None) -> dict[str, Any]: ...

    def version(self) -> dict[str, Any]: ...


class Times:
    """The durations of one request in nanoseconds. ``clock`` returns the present time."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._start = clock()
        self._load = 0

    def end_load(self) -> None:
        """Record that the model is loaded."""
        self._load = self._clock() - self._start

    def computed(self) -> int:
        """Return the time since the model was loaded."""
        return self._clock() - self._start - self._load

    def fields(self) -> dict[str, int]:
        return {"total_duration": self._clock() - self._start, "load_duration": self._load}


class OllamaAnswer:
    """An answer whose pieces become lines of JSON. Pass every piece to ``add`` exactly once. ``is_chat``: it is a message."""

    def __init__(self, model: str, times: Times, *, is_chat: bool) -> None:
        self._model = model
        self._times = times
        self._is_chat = is_chat
        self._first = 0  # nanoseconds from the end of the load to the first piece
        self._text = self._thinking = ""
        self._calls: list[dict[str, Any]] = []
        self._reason = "stop"

    def start(self, first: Piece) -> bytes:
        return b""

    def add(self, piece: Piece) -> bytes:
        """Add a piece of the answer. Return its line for a stream."""
        self._first = self._first or self._times.computed()
        calls = [{"function": {"name": call.name, "arguments": json.loads(call.arguments)}} for call in piece.calls]
        self._text += piece.text
        self._thinking += piece.reasoning
        self._calls += calls
        if piece.ending is not None:
            self._reason = "length" if piece.ending == "length" else "stop"
        if not (piece.text or piece.reasoning or calls):
            return b""
        return _line({**self._content(piece.text, piece.reasoning, calls), "done": False})

    def finish(self, usage: Usage) -> bytes:
        return _line({**self._content("", "", []), **self._ending(usage)})

    def error(self, refusal: Refusal) -> bytes:
        return _line(refusal.ollama_body())

    def body(self, usage: Usage) -> dict[str, Any]:
        """Return a whole answer."""
        return {**self._content(self._text, self._thinking, self._calls), **self._ending(usage)}

    def empty(self, reason: str) -> dict[str, Any]:
        """Return the answer to a request without a prompt. ``reason`` says what was done: ``load`` or ``unload``."""
        return {**self._content("", "", []), "done": True, "done_reason": reason}

    def _content(self, text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        common = {"model": self._model, "created_at": datetime.now(UTC).isoformat()}
        reasoning = {"thinking": thinking} if thinking else {}
        if not self._is_chat:
            return {**common, "response": text, **reasoning}
        shown_calls = {"tool_calls": calls} if calls else {}
        return {**common, "message": {"role": "assistant", "content": text, **reasoning, **shown_calls}}

    def _ending(self, usage: Usage) -> dict[str, Any]:
        return {
            "done": True,
            "done_reason": self._reason,
            **self._times.fields(),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": self._first,
            "eval_count": usage.completion_tokens,
            "eval_duration": self._times.computed() - self._first,
        }


class OllamaAddresses:
    """The handlers of Ollama's addresses. The configs of the models are read here, when the server starts.

    ``clock`` returns the present time in nanoseconds."""

    def __init__(self, server: TextServer, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._server = server
        self._clock = clock
        self._sources = {name: _find_source(engine.request.model) for name, engine in server.pool.engines.items()}

    def add_to(self, app: FastAPI, errors: dict[str, Any]) -> None:
        """Add the addresses to an application. ``errors`` describes their errors."""
        app.post("/api/chat", **errors)(self.chat)
        app.post("/api/generate", **errors)(self.generate)
        app.post("/api/embed", **errors)(self.embed)
        app.post("/api/embeddings", **errors)(self.embed_one)
        app.post("/api/show", **errors)(self.show)
        app.get("/api/tags")(self.tags)
        app.get("/api/ps")(self.running)
        app.get("/api/version")(self._server.version)

    async def chat(self, request: OllamaChat) -> Response:
        return await self._answer(request, "/api/chat", is_chat=True)

    async def generate(self, request: OllamaPrompt) -> Response:
        return await self._answer(request, "/api/generate", is_chat=False)

    async def _answer(self, request: OllamaChat | OllamaPrompt, path: str, *, is_chat: bool) -> Response:
        name = self._choose_model(request.model)
        times = Times(self._clock)
        answer = OllamaAnswer(name, times, is_chat=is_chat)
        if request.is_empty:
            return await self._load_or_unload(request, name, answer)
        request = request.model_copy(update={"model": name})
        request.to_request(chats=True).check()  # what is wrong with it is said before the model is loaded
        ready = await self._server.load_model(name, "generate")
        times.end_load()
        unloads = is_zero(request.keep_alive)
        return await self._server.answer_chat(
            answer,
            request.to_request(chats=ready.chats),
            path,
            on_end=lambda usage: self._end(name, unloads=unloads),
            media_type=LINES,
        )

    async def _load_or_unload(self, request: OllamaRequest, name: str, answer: OllamaAnswer) -> Response:
        """Answer a request without a prompt. Unload the model if it is to stay loaded for no time, or else load it."""
        media_type = LINES if request.stream else None
        if is_zero(request.keep_alive):
            await self._server.pool.unload(self._base(name))
            return JSONResponse(answer.empty("unload"), media_type=media_type)
        await self._server.load_model(name, "generate")
        return JSONResponse(answer.empty("load"), media_type=media_type)

    def _end(self, name: str, *, unloads: bool) -> None:
        """End a request. Begin to unload its model if the client wants that and no other request uses the model."""
        if unloads:
            self._server.pool.begin_unload(self._base(name))

    async def embed(self, request: OllamaEmbed) -> Response:
        name, times, vectors = await self._compute_vectors(request)
        body = {"model": name, **request.answer(vectors.rows), **times.fields(), "prompt_eval_count": vectors.tokens}
        return JSONResponse(body)

    async def embed_one(self, request: OllamaEmbedding) -> Response:
        _, _, vectors = await self._compute_vectors(request)
        return JSONResponse(request.answer(vectors.rows))

    async def _compute_vectors(self, request: OllamaEmbed | OllamaEmbedding) -> tuple[str, Times, Vectors]:
        """Return the name of the model, the durations and the vectors of a request."""
        name = self._choose_model(request.model)
        times = Times(self._clock)
        await self._server.load_model(name, "encode")
        times.end_load()
        vectors = Vectors([], 0)
        if request.has_text:
            vectors = await self._server.compute_vectors(name, request.engine_request())
        self._end(name, unloads=is_zero(request.keep_alive))
        return name, times, vectors

    async def tags(self) -> dict[str, Any]:
        models = self._named_sources(self._server.pool.names)
        return {"models": await asyncio.to_thread(_describe_all, models)}

    async def running(self) -> dict[str, Any]:
        engines = {name: engine for name, engine in self._server.pool.engines.items() if engine.state == "ready"}
        described = await asyncio.to_thread(_describe_all, self._named_sources(engines))
        gpus = await asyncio.to_thread(read_gpus, find_nvml(), None)
        return {
            "models": [
                {**model, **_memory(engine, gpus), "expires_at": NEVER}
                for model, engine in zip(described, engines.values(), strict=True)
            ]
        }

    async def show(self, request: OllamaShow) -> dict[str, Any]:
        name = self._choose_model(request.model or request.name or "")
        engine = self._server.pool.engines[self._base(name)]
        source = self._sources[self._base(name)]
        ready = engine.ready
        settings = {} if ready is None else await self._server.tokenizer_info(name)
        template = settings.get("chat_template")
        template = template if isinstance(template, str) else ""
        config = {} if source is None else source.config
        capabilities = _capabilities(source) if ready is None else CAPABILITIES[ready.task]
        capabilities = capabilities + (["tools"] if "tools" in template else [])
        capabilities += ["thinking"] if template and "completion" in capabilities and await self._reasons(name) else []
        capabilities += ["vision"] if "vision_config" in config else []
        family = str(config.get("model_type", ""))
        context = {} if ready is None or ready.positions is None else {f"{family}.context_length": ready.positions}
        described = await asyncio.to_thread(_describe, self._named_sources([name])[0])
        return {
            "parameters": "",
            "template": template,
            "details": described["details"],
            "model_info": {"general.architecture": family, **context},
            "capabilities": capabilities,
            "modified_at": described["modified_at"],
        }

    async def _reasons(self, name: str) -> bool:
        """Return whether the chat template lets a request switch the reasoning on, or always has it, so that it rejects off."""
        return await self._takes(name, None) and (await self._takes(name, True) or not await self._takes(name, False))

    async def _takes(self, name: str, thinking: bool | None) -> bool:
        """Return whether the model takes a chat with this value of ``think``."""
        messages = [{"role": "user", "content": "x"}]
        try:
            await self._server.count_prompt(
                read_body(ChatRequest, {"model": name, "messages": messages, "enable_thinking": thinking})
            )
        except RequestError:
            return False
        return True

    def _choose_model(self, name: str) -> str:
        """Return the name of a model that is served here, where LATEST may follow. Without a name, there must be one model."""
        return self._server.choose_model((name if name in self._server.pool.names else name.removesuffix(LATEST)) or None)

    def _base(self, name: str) -> str:
        """Return the name of the model of an adapter, or the name of the model itself."""
        return self._server.pool.adapters.get(name, name)

    def _named_sources(self, names: Iterable[str]) -> list[NamedSource]:
        """Return models and adapters with the sources of their models, for another thread."""
        return [NamedSource(name, name in self._server.pool.adapters, self._sources[self._base(name)]) for name in names]


class NamedSource(NamedTuple):
    """A model or an adapter, and the source of its model: None if its files were gone when the server started."""

    name: str
    is_adapter: bool
    source: ModelSource | None


def _find_source(reference: str) -> ModelSource | None:
    try:
        return find_model(reference)
    except UpshiftError:
        return None


def _capabilities(source: ModelSource | None) -> list[str]:
    """Return the capability that the files of a model name, or nothing if they name none."""
    if source is None:
        return []
    if source.directory is not None and (source.directory / "modules.json").is_file():  # of sentence-transformers
        return ["embedding"]
    names = source.config.get("architectures") or []
    return ["completion"] if any(str(name).endswith(WRITING_CLASSES) for name in names) else []


def _describe_all(models: Sequence[NamedSource]) -> list[dict[str, Any]]:
    return [_describe(model) for model in models]


def _describe(model: NamedSource) -> dict[str, Any]:
    """Return a model or an adapter in Ollama's form, with the size, the date and the digest of its model's files."""
    source = model.source
    family = "" if source is None else str(source.config.get("model_type", ""))
    try:
        size, modified, identity = _file_facts(source)
    except (OSError, UpshiftError):  # the files are gone, and their engine goes on
        size, modified, identity = 0, STARTED, ""
    digest = hashlib.sha256(f"{identity}/{model.name if model.is_adapter or not identity else ''}".encode()).hexdigest()
    families = [family] if family else []
    details = {"parent_model": "", "format": "safetensors", "family": family, "families": families}
    name = {"name": model.name, "model": model.name}
    return {**name, "modified_at": modified, "size": size, "digest": digest, "details": details}


def _file_facts(source: ModelSource | None) -> tuple[int, str, str]:
    """Return the bytes, the date and the identity of a model's weights. Raise OSError or UpshiftError if they cannot be read."""
    files = [] if source is None else weight_files(source)
    if source is None or not files:
        return 0, STARTED, ""
    modified = datetime.fromtimestamp(max(file.stat().st_mtime for file in files), UTC)
    return weights_size(source), modified.isoformat(), f"{source.model_hash}-{weights_identity(source)}"


def _memory(engine: ReplicaSet, gpus: Gpus) -> dict[str, int]:
    """Return the bytes that an engine takes, and those of them on GPUs if they are known."""
    ready_bytes = 0 if engine.ready is None else engine.ready.resident_bytes
    host_bytes = engine.heartbeat.resident_bytes or ready_bytes  # no heartbeat has come yet
    device_bytes = find_device_bytes(gpus, _pids(engine))
    return {"size": host_bytes} if device_bytes is None else {"size": host_bytes + device_bytes, "size_vram": device_bytes}


def _pids(engine: ReplicaSet) -> set[int]:
    """Return the ids of an engine's processes, and of those that they have started."""
    pids = {pid for pid in engine.pids if pid is not None}
    for pid in list(pids):
        with suppress(psutil.NoSuchProcess):
            pids |= {child.pid for child in psutil.Process(pid).children(recursive=True)}
    return pids


def find_device_bytes(gpus: Gpus, pids: Collection[int]) -> int | None:
    """Return the bytes of GPUs that processes hold: 0 without a GPU, or None if the driver does not tell, as in containers."""
    if not gpus.states:
        return 0
    held = [holder.bytes for gpu in gpus.states for holder in gpu.holders if holder.pid in pids]
    known = [count for count in held if count is not None]
    return sum(known) if held and len(known) == len(held) else None


def _line(body: dict[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
