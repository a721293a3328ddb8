"""Ollama's addresses: the bodies that its clients send, its lines of JSON, and one line for what is not possible."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import httpx2
import numpy as np
import pytest
from test_serve_faults import Recording, app_of, posted
from test_serving_parts import of_several

from upshift.errors import RequestError
from upshift.serving.app import Server, make_app
from upshift.serving.engine_process import Vectors
from upshift.serving.messages import Generate, Piece, ToolCall
from upshift.serving.metrics import Metrics
from upshift.serving.model_pool import ModelPool
from upshift.serving.openai_requests import ChatRequest
from upshift.serving.protocols.ollama_requests import OllamaChat, OllamaPrompt

USER = {"role": "user", "content": "hello"}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


class Talking(Recording):
    """An engine whose answer has reasoning, a text in two pieces, and a call."""

    error_after = False

    async def pieces(self, request: Generate) -> Any:
        self.requests.append(request)
        yield Piece(id=1, text="", reasoning="hmm", tokens=1, prompt_tokens=7)
        yield Piece(id=1, text="yes", tokens=2, prompt_tokens=7)
        if self.error_after:
            raise RequestError("the form cannot go on")
        call = ToolCall(index=0, name="weather", arguments='{"city": "Rome"}')
        yield Piece(id=1, text="!", tokens=1, prompt_tokens=7, calls=(call,), ending="stop")

    async def vectors(self, request: Any) -> Vectors:
        row = base64.b64encode(np.array([3, 4], dtype="<f4").tobytes()).decode()
        return Vectors([row for _ in request.texts], 5)

    async def text(self, request: Any) -> str:
        return json.dumps({"chat_template": "{{ tools }}"})


def lines_of(answer: httpx2.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/x-ndjson", answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def got(app: Any, path: str) -> Any:
    async def get() -> httpx2.Response:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://m") as client:
            return await client.get(path)

    return asyncio.run(get()).json()


def sent(app: Any, contents: list[str], path: str) -> list[httpx2.Response]:
    async def send() -> list[httpx2.Response]:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://m") as client:
            return [await client.post(path, content=content) for content in contents]

    return asyncio.run(send())


@pytest.mark.parametrize("is_chat", [True, False])
def test_an_answer_comes_as_lines_of_json_or_at_once(is_chat: bool) -> None:
    app, _ = app_of(Talking())
    path, body = ("/api/chat", {"messages": [USER]}) if is_chat else ("/api/generate", {"prompt": "hello"})
    streamed, whole = posted(app, {"model": "m:latest", **body}, {**body, "stream": False}, path=path)
    *lines, last = lines_of(streamed)
    assert all(line["model"] == "m" and line["done"] is False for line in lines)
    final = whole.json()
    for one in (last, final):
        assert (one["done"], one["done_reason"], one["prompt_eval_count"], one["eval_count"]) == (True, "stop", 7, 4)
        assert one["total_duration"] >= one["prompt_eval_duration"] >= 0
    call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    if is_chat:
        parts = [line["message"] for line in lines]
        assert parts[0] == {"role": "assistant", "content": "", "thinking": "hmm"} and parts[-1]["tool_calls"] == [call]
        assert "".join(part["content"] for part in parts) == final["message"]["content"] == "yes!"
        assert final["message"]["tool_calls"] == [call] and final["message"]["thinking"] == "hmm"
    else:
        assert "".join(line["response"] for line in lines) == final["response"] == "yes!"
        assert lines[0]["thinking"] == final["thinking"] == "hmm"


def test_an_error_has_ollamas_form() -> None:
    engine = Talking()
    engine.error_after = True
    app, _ = app_of(engine)
    (streamed,) = posted(app, {"messages": [USER]}, path="/api/chat")
    assert lines_of(streamed)[-1] == {"error": "the form cannot go on"}
    whole, unknown = posted(app, {"messages": [USER], "stream": False}, {"model": "n", "messages": [USER]}, path="/api/chat")
    assert (whole.status_code, whole.json()) == (400, {"error": "the form cannot go on"})
    assert unknown.status_code == 404 and "'n' is not served here" in unknown.json()["error"]


def test_a_request_without_a_prompt_loads_the_model() -> None:
    engine = Talking()
    app, _ = app_of(engine)
    (chat,) = posted(app, {"model": "m", "messages": []}, path="/api/chat")
    (prompt,) = posted(app, {"model": "m", "keep_alive": -1, "stream": False}, path="/api/generate")
    assert lines_of(chat)[0]["done_reason"] == prompt.json()["done_reason"] == "load" and not engine.requests


def test_the_options_are_those_of_openais_request() -> None:
    options = {"temperature": 0.5, "top_k": 3, "num_predict": 9, "repeat_penalty": 1.1, "stop": ["x"], "num_ctx": 4096, "seed": 1}
    request = OllamaChat.model_validate({"messages": [USER], "options": options, "think": False, "format": "json"})
    chat: Any = request.to_request(chats=True)
    expected = {"temperature": 0.5, "top_k": 3, "max_tokens": 9, "repetition_penalty": 1.1, "stop": ["x"], "seed": 1}
    expected |= {"messages": [USER], "enable_thinking": False, "guided_json": {"type": "object"}, "stream": True}
    assert chat == ChatRequest.model_validate(expected)
    assert OllamaChat.model_validate({"messages": [USER], "think": "high"}).to_request(chats=True).reasoning_effort == "high"  # type: ignore[union-attr]
    limits = {count: OllamaChat.model_validate({"messages": [USER], "options": {"num_predict": count}}) for count in (-2, -1, 0)}
    assert [one.to_request(chats=True).max_tokens for one in limits.values()] == [None, None, 1]


def test_the_calls_of_a_conversation_get_ids() -> None:
    """Results follow in the order of the calls, or name their tools."""
    calls = [{"function": {"name": name, "arguments": {"city": name}}} for name in ("a", "b", "c")]
    results = [
        {"role": "tool", "content": "at b", "tool_name": "b"},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    body = {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": calls}, *results], "tools": [WEATHER]}
    chat: Any = OllamaChat.model_validate(body).to_request(chats=True)
    _, assistant, *told = chat.messages
    ids = [call.id for call in assistant.tool_calls]
    assert len(set(ids)) == 3 and [one.tool_call_id for one in told] == [ids[1], ids[0], ids[2]]
    with pytest.raises(RequestError, match="follows no call of its tool"):
        OllamaChat.model_validate({"messages": [USER, results[0]]}).to_request(chats=True)


@pytest.mark.parametrize(("fields", "chats"), [({"raw": True}, True), ({}, False)])
def test_a_raw_prompt_is_a_text(fields: dict[str, Any], chats: bool) -> None:
    """So is that of a model without a chat template."""
    request: Any = OllamaPrompt.model_validate({"prompt": "once", **fields}).to_request(chats=chats)
    assert request.prompts() == ["once"]
    fill: Any = OllamaPrompt.model_validate({"prompt": "once", "suffix": "end", **fields}).to_request(chats=chats)
    assert fill.engine_request("once", seed=0).suffix == "end"
    chat: Any = OllamaPrompt.model_validate({"prompt": "once", "system": "be brief"}).to_request(chats=True)
    assert [(one.role, one.content) for one in chat.messages] == [("system", "be brief"), ("user", "once")]
    with pytest.raises(RequestError, match="system, images and think are for a chat template"):
        OllamaPrompt.model_validate({"prompt": "once", "system": "be brief", **fields}).to_request(chats=chats)


def test_the_models_are_listed_and_described(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = Talking()
    metrics = Metrics()
    app = make_app(Server(ModelPool({"m": of_several(engine)}, metrics), metrics))
    (listed,) = got(app, "/api/tags")["models"]
    assert (listed["name"], listed["model"]) == ("m", "m")
    assert [one["name"] for one in got(app, "/api/ps")["models"]] == ["m"] and got(app, "/api/version")["version"]
    (shown,) = posted(app, {"model": "m"}, path="/api/show")
    assert shown.json()["template"] == "{{ tools }}" and shown.json()["capabilities"] == ["completion", "tools"]
    engine.ready = engine.ready.changed(task="encode")
    one, several = posted(app, {"model": "m", "input": "a"}, {"input": ["a", "b"]}, path="/api/embed")
    assert one.json()["embeddings"] == [pytest.approx([0.6, 0.8])] and len(several.json()["embeddings"]) == 2


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/api/embed", "/api/show"])
def test_hostile_bodies_are_one_line(path: str) -> None:
    engine: Any = Talking()
    engine.ready = engine.ready.changed(task="encode" if path == "/api/embed" else "generate")
    app, _ = app_of(engine)
    goods = {"/api/chat": {"messages": [USER]}, "/api/generate": {"prompt": "x"}, "/api/embed": {"input": "x"}}
    good: dict[str, Any] = goods.get(path, {})
    values: list[Any] = [0, -1, 10**400, 1e308, True, "", "x", "\ud800", [], [[]], [None], {}, {"": {}}, ["a"] * 3000]
    names = [
        "model",
        "messages",
        "prompt",
        "input",
        "options",
        "format",
        "think",
        "keep_alive",
        "tools",
        "images",
        "raw",
        "stream",
        "suffix",
        "no_such_field",
    ]
    options = ["temperature", "num_predict", "stop", "seed", "mirostat", "no_such_option"]
    bodies: list[dict[str, Any]] = [{**good, name: value} for name in names for value in values]
    bodies += [{**good, "options": {name: value}} for name in options for value in values]
    bodies += [{**good, "messages": [{"role": role, "content": value}]} for role in ("tool", "x") for value in values]
    bodies += [{**good, "messages": [{**USER, "images": [value], "tool_calls": [value]}]} for value in values]
    answers = sent(app, [json.dumps(body) for body in bodies], path)
    assert {200, 400} <= {answer.status_code for answer in answers}
    for answer in answers:
        assert answer.status_code in (200, 400, 404), answer.text
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert isinstance(error, str) and "\n" not in error and len(error) < 600, error
