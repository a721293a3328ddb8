"""Answer at Ollama's addresses: /api/chat, /api/generate, /api/embed, /api/tags, /api/show, /api/ps and /api/version."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import UTC, datetime
from typing import Any, Protocol

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from upshift.errors import UpshiftError
from upshift.inference.weights import weights_size
from upshift.models.source import find_model
from upshift.serving.messages import Piece
from upshift.serving.model_pool import ModelPool
from upshift.serving.openai_responses import TextRequest, Usage
from upshift.serving.protocols.ollama_requests import OllamaChat, OllamaEmbed, OllamaPrompt, OllamaShow
from upshift.serving.refusals import Refusal
from upshift.versions import installed_version

LINES = "application/x-ndjson"
STARTED = datetime.now(UTC).isoformat()


class TextServer(Protocol):
    """The parts of a server that these addresses need."""

    pool: ModelPool

    def choose_model(self, name: str | None) -> str: ...

    async def load_model(self, name: str) -> None: ...

    async def answer_chat(self, answer: Any, chat: TextRequest, path: str, *, media_type: str) -> Response: ...

    async def embed_texts(self, request: Any) -> Response: ...

    async def tokenizer_info(self, model: str | None) -> dict[str, Any]: ...


class OllamaAnswer:
    """An answer whose pieces become lines of JSON. Pass every piece to ``add`` exactly once. ``is_chat``: it is a message."""

    def __init__(self, model: str, *, is_chat: bool) -> None:
        self._model = model
        self._is_chat = is_chat
        self._start = time.perf_counter_ns()
        self._first = 0  # nanoseconds until the first piece
        self._text = self._thinking = ""
        self._calls: list[dict[str, Any]] = []
        self._reason = "stop"

    def start(self, first: Piece) -> bytes:
        return b""

    def add(self, piece: Piece) -> bytes:
        """Add a piece of the answer. Return its line for a stream."""
        self._first = self._first or time.perf_counter_ns() - self._start
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

    def loaded(self) -> dict[str, Any]:
        """Return the answer to a request without a prompt, whose model is loaded now."""
        return {**self._content("", "", []), "done": True, "done_reason": "load"}

    def _content(self, text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        common = {"model": self._model, "created_at": datetime.now(UTC).isoformat()}
        reasoning = {"thinking": thinking} if thinking else {}
        if not self._is_chat:
            return {**common, "response": text, **reasoning}
        shown_calls = {"tool_calls": calls} if calls else {}
        return {**common, "message": {"role": "assistant", "content": text, **reasoning, **shown_calls}}

    def _ending(self, usage: Usage) -> dict[str, Any]:
        total = time.perf_counter_ns() - self._start
        return {
            "done": True,
            "done_reason": self._reason,
            "total_duration": total,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": self._first,
            "eval_count": usage.completion_tokens,
            "eval_duration": total - self._first,
        }


class OllamaAddresses:
    """The handlers of Ollama's addresses."""

    def __init__(self, server: TextServer) -> None:
        self._server = server

    def add_to(self, app: FastAPI, errors: dict[str, Any]) -> None:
        """Add the addresses to an application. ``errors`` describes their errors."""
        app.post("/api/chat", **errors)(self.chat)
        app.post("/api/generate", **errors)(self.generate)
        app.post("/api/embed", **errors)(self.embed)
        app.post("/api/show", **errors)(self.show)
        app.get("/api/tags")(self.tags)
        app.get("/api/ps")(self.running)
        app.get("/api/version")(self.version)

    async def chat(self, request: OllamaChat) -> Response:
        return await self._answer(request, "/api/chat", is_chat=True)

    async def generate(self, request: OllamaPrompt) -> Response:
        return await self._answer(request, "/api/generate", is_chat=False)

    async def _answer(self, request: OllamaChat | OllamaPrompt, path: str, *, is_chat: bool) -> Response:
        name = self._server.choose_model(request.model or None)
        answer = OllamaAnswer(name, is_chat=is_chat)
        if request.is_empty:
            await self._server.load_model(name)
            return JSONResponse(answer.loaded(), media_type=LINES if request.stream else None)
        base = self._server.pool.adapters.get(name, name)
        ready = self._server.pool.engines[base].ready
        text_request = request.model_copy(update={"model": name}).to_request(chats=ready is None or ready.chats)
        return await self._server.answer_chat(answer, text_request, path, media_type=LINES)

    async def embed(self, request: OllamaEmbed) -> Response:
        return await self._server.embed_texts(request)

    async def tags(self) -> dict[str, Any]:
        return {"models": await asyncio.to_thread(self._list_models)}

    async def running(self) -> dict[str, Any]:
        engines = self._server.pool.engines
        running = [name for name, engine in engines.items() if engine.state == "ready"]
        sizes = {name: engines[name].heartbeat.resident_bytes for name in running}
        return {"models": [{**_names(name), "size": sizes[name], "size_vram": 0} for name in running]}

    def version(self) -> dict[str, Any]:
        return {"version": installed_version("upshift")}

    async def show(self, request: OllamaShow) -> dict[str, Any]:
        name = self._server.choose_model(request.model or request.name or None)
        base = self._server.pool.adapters.get(name, name)
        engine = self._server.pool.engines[base]
        settings = await self._server.tokenizer_info(name) if engine.state == "ready" else {}
        template = settings.get("chat_template")
        template = template if isinstance(template, str) else json.dumps(template or "")
        ready = engine.ready
        config = await asyncio.to_thread(_read_config, engine.request.model)
        family = str(config.get("model_type", ""))
        capabilities = ["embedding"] if ready is not None and ready.task != "generate" else ["completion"]
        words = {"tools": "tools", "enable_thinking": "thinking"}
        capabilities += [capability for word, capability in words.items() if word in template]
        capabilities += ["vision"] if "vision_config" in config else []
        context = {} if ready is None or ready.positions is None else {f"{family}.context_length": ready.positions}
        return {
            "parameters": "",
            "template": template,
            "details": _details(family),
            "model_info": {"general.architecture": family, **context},
            "capabilities": capabilities,
            "modified_at": STARTED,
        }

    def _list_models(self) -> list[dict[str, Any]]:
        return [self._describe(name) for name in self._server.pool.names]

    def _describe(self, name: str) -> dict[str, Any]:
        """Return a model or an adapter in Ollama's form, with the size of its model's files."""
        reference = self._server.pool.engines[self._server.pool.adapters.get(name, name)].request.model
        try:
            size = weights_size(find_model(reference))
        except UpshiftError:  # its files are gone, and its engine goes on
            size = 0
        return {**_names(name), "size": size, "details": _details(str(_read_config(reference).get("model_type", "")))}


def _names(name: str) -> dict[str, Any]:
    return {"name": name, "model": name, "modified_at": STARTED, "digest": ""}


def _details(family: str) -> dict[str, Any]:
    families = [family] if family else []
    return {"parent_model": "", "format": "safetensors", "family": family, "families": families}


def _read_config(reference: str) -> dict[str, Any]:
    """Return the config of a model, or nothing if its files are gone."""
    try:
        return dict(find_model(reference).config)
    except UpshiftError:
        return {}


def _line(body: dict[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
