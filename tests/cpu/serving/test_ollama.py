"""Ollama's addresses: the bodies that its clients send, its lines of JSON, and one line for what is not possible."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from test_serve_faults import Recording, app_of, posted
from test_serving_parts import of_several

from upshift.errors import RequestError
from upshift.hardware.nvml import Gpus, GpuState, Holder
from upshift.serving.app import Server, make_app
from upshift.serving.engine_process import TokenizedPrompt, Vectors
from upshift.serving.messages import EngineRequest, Generate, Heartbeat, Piece, ToolCall
from upshift.serving.metrics import Metrics
from upshift.serving.model_pool import ModelPool
from upshift.serving.openai_requests import ChatRequest
from upshift.serving.protocols import ollama_addresses
from upshift.serving.protocols.ollama_addresses import OllamaAddresses, find_device_bytes
from upshift.serving.protocols.ollama_requests import OllamaChat, OllamaEmbed, OllamaPrompt
from upshift.serving.refusals import Refusal
from upshift.serving.replicas import ReplicaSet

USER = {"role": "user", "content": "hello"}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


class Talking(Recording):
    """An engine whose answer has reasoning, a text in two pieces, and a call. It can be unloaded and loaded."""

    error_after = False
    starts = 0

    def __init__(self, **report: Any) -> None:
        super().__init__()
        self.ready: Any = self.ready.changed(**report)
        self.report = self.ready
        self.taken: tuple[bool | None, ...] = (None,)  # values of think that the chat template takes

    def sleep(self) -> Any:
        self.state, self.ready = "asleep", None
        return self

    async def start(self) -> Any:
        self.state, self.ready = "ready", self.report
        self.starts += 1
        return self.ready

    async def stop(self) -> None:
        self.sleep()

    async def tokens(self, request: Any) -> TokenizedPrompt:
        if request.template.thinking not in self.taken:
            raise RequestError("enable_thinking has no place in the chat template of the model")
        return TokenizedPrompt([1], [])

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


@pytest.mark.parametrize("options", [{}, {"num_predict": -1}, {"num_predict": -2}])
@pytest.mark.parametrize("fields", [{}, {"raw": True}])
def test_without_a_number_of_tokens_the_server_limits_an_answer(options: dict[str, int], fields: dict[str, bool]) -> None:
    """The request has no limit of its own, so that --set max_new_tokens of the server counts."""
    engine = Talking()
    answers = posted(app_of(engine)[0], {"prompt": "x", "options": options, **fields}, path="/api/generate")
    assert answers[0].status_code == 200 and len(engine.requests) == 1
    assert engine.requests[0].options["max_new_tokens"] is engine.requests[0].default_tokens is None
    (refused,) = posted(app_of(engine)[0], {"prompt": "x", "options": {"num_predict": 0}, **fields}, path="/api/generate")
    assert refused.status_code == 400 and refused.json()["error"].startswith("options.num_predict: 0 is no number of tokens")


def test_the_calls_of_a_conversation_get_ids() -> None:
    """Results follow in the order of the calls of their turn, or name their tools."""
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
    turn = {"role": "assistant", "tool_calls": calls[:2]}
    for between in (USER, {"role": "assistant", "content": "so"}):
        with pytest.raises(RequestError, match="follows no call of its tool"):
            OllamaChat.model_validate({"messages": [USER, turn, results[1], between, results[0]]}).to_request(chats=True)
    two: Any = OllamaChat.model_validate({"messages": [USER, turn, results[1], USER, turn, results[2]]}).to_request(chats=True)
    assert two.messages[-1].tool_call_id == two.messages[-2].tool_calls[0].id != two.messages[1].tool_calls[0].id


@pytest.mark.parametrize(("fields", "chats"), [({"raw": True}, True), ({}, False)])
def test_a_raw_prompt_is_a_text(fields: dict[str, Any], chats: bool) -> None:
    """The prompt for a model without a chat template is a text, too."""
    request: Any = OllamaPrompt.model_validate({"prompt": "once", **fields}).to_request(chats=chats)
    assert request.prompts() == ["once"]
    fill: Any = OllamaPrompt.model_validate({"prompt": "once", "suffix": "end", **fields}).to_request(chats=chats)
    assert fill.engine_request("once", seed=0).suffix == "end"
    chat: Any = OllamaPrompt.model_validate({"prompt": "once", "system": "be brief"}).to_request(chats=True)
    assert [(one.role, one.content) for one in chat.messages] == [("system", "be brief"), ("user", "once")]
    with pytest.raises(RequestError, match="system, images and think are for a chat template"):
        OllamaPrompt.model_validate({"prompt": "once", "system": "be brief", **fields}).to_request(chats=chats)


def pool_of(model: Path, engine: Any) -> ModelPool:
    replicas = ReplicaSet(EngineRequest(model=str(model)))
    replicas.engines = [engine]
    return ModelPool({"m": replicas}, Metrics())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"model_type": "made", "architectures": ["MadeForCausalLM"], "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(bytes(100))
    os.utime(folder / "model.safetensors", (0, 1.7e9))
    return folder


def test_the_models_are_listed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source of a model is found once, when the server starts. A digest has 64 digits, of which clients cut off some."""
    monkeypatch.setattr(ollama_addresses, "find_nvml", lambda: None)
    engine = Talking(resident_bytes=9)
    pool = pool_of(model, engine)
    pool.adapters["a"] = "m"
    app = make_app(Server(pool, pool.metrics))
    monkeypatch.delattr(ollama_addresses, "find_model")
    listed = got(app, "/api/tags")["models"]
    assert [one["name"] for one in listed] == [one["model"] for one in listed] == ["m", "a"]
    assert listed == got(app, "/api/tags")["models"] and listed[0]["digest"] != listed[1]["digest"]
    for one in listed:
        assert len(one["digest"]) == 64 and not set(one["digest"]) - set("0123456789abcdef")
        assert (one["size"], one["details"]["family"]) == (100, "made")
        assert datetime.fromisoformat(one["modified_at"]).timestamp() == 1.7e9
    (running,) = got(app, "/api/ps")["models"]
    assert (running["digest"], running["size"], running["size_vram"]) == (listed[0]["digest"], 5, 0)
    assert datetime.fromisoformat(running["expires_at"]) > datetime.now(UTC)
    engine.heartbeat = Heartbeat(live=0, waiting=0, resident_bytes=0)  # none has come yet
    assert [one["size"] for one in got(app, "/api/ps")["models"]] == [9]
    (model / "model.safetensors").unlink()
    gone = got(app, "/api/tags")["models"]
    assert [(one["size"], len(one["digest"])) for one in gone] == [(0, 64), (0, 64)]
    assert got(app, "/api/version") == got(app, "/version")


def test_an_adapter_may_leave_while_the_models_are_listed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(model, Talking())
    pool.adapters["a"] = "m"
    describe = ollama_addresses._describe_all

    def leave(models: Any) -> Any:
        pool.adapters.clear()
        return describe(models)

    monkeypatch.setattr(ollama_addresses, "_describe_all", leave)
    assert [one["name"] for one in got(make_app(Server(pool, pool.metrics)), "/api/tags")["models"]] == ["m", "a"]


def test_the_bytes_on_gpus_are_those_of_the_engines_processes() -> None:
    def held(*holders: tuple[int, int | None]) -> Gpus:
        state = GpuState(index=0, name="made", holders=tuple(Holder(pid=pid, bytes=count) for pid, count in holders))
        return Gpus(states=(state, state), origin="NVML")

    assert find_device_bytes(Gpus(origin="none"), {1}) == 0
    assert find_device_bytes(held((1, 10), (2, 5), (3, 7)), {1, 3}) == 34
    assert find_device_bytes(held((1, None), (3, 7)), {1, 3}) is find_device_bytes(held((4, 7)), {1}) is None


@pytest.mark.parametrize(
    ("taken", "capabilities"),
    [
        ((None, True, False), ["thinking"]),  # the chat template has a switch
        ((None,), ["thinking"]),  # it rejects false: the model always reasons
        ((None, False), []),
        ((), []),
    ],
)
def test_a_model_is_described(model: Path, taken: tuple[bool | None, ...], capabilities: list[str]) -> None:
    engine = Talking(positions=64)
    engine.taken = taken
    app = make_app(Server(pool_of(model, engine), Metrics()))
    (shown,) = posted(app, {"name": "m:latest"}, path="/api/show")
    assert shown.json()["template"] == "{{ tools }}" and shown.json()["capabilities"] == [
        "completion",
        "tools",
        *capabilities,
        "vision",
    ]
    assert shown.json()["model_info"] == {"general.architecture": "made", "made.context_length": 64}
    engine.sleep()
    (asleep,) = posted(app, {}, path="/api/show")
    assert (asleep.json()["template"], asleep.json()["capabilities"]) == ("", ["completion", "vision"])


def test_the_files_of_a_sleeping_encoder_name_its_task(model: Path) -> None:
    (model / "config.json").write_text(json.dumps({"model_type": "made", "architectures": ["MadeModel"]}))
    app = make_app(Server(pool_of(model, Talking(task="encode").sleep()), Metrics()))
    assert posted(app, {}, path="/api/show")[0].json()["capabilities"] == []
    (model / "modules.json").write_text("[]")
    assert posted(app, {}, path="/api/show")[0].json()["capabilities"] == ["embedding"]


def test_texts_become_vectors() -> None:
    engine = Talking(task="encode")
    app, _ = app_of(engine)
    one, several = posted(app, {"model": "m:latest", "input": "a"}, {"model": "", "input": ["a", "b"]}, path="/api/embed")
    assert one.json()["embeddings"] == [pytest.approx([0.6, 0.8])] and len(several.json()["embeddings"]) == 2
    older, empty = posted(app, {"model": "m", "prompt": "a"}, {"prompt": ""}, path="/api/embeddings")
    assert (older.json(), empty.json()) == ({"embedding": [3, 4]}, {"embedding": []})
    (elsewhere,) = posted(app, {"model": "m:latest", "input": "a"}, path="/v1/embeddings")
    assert elsewhere.status_code == 404  # the ending is Ollama's


@pytest.mark.parametrize(("path", "body"), [("/api/chat", {"messages": []}), ("/api/generate", {"model": "m"})])
def test_a_model_is_unloaded(path: str, body: dict[str, Any]) -> None:
    """It need not be loaded for that."""
    engine = Talking()
    app, _ = app_of(engine)
    for keep_alive in (0, -0.0, "0", "0s", "-0h0m", ".0ms"):
        (answer,) = posted(app, {**body, "keep_alive": keep_alive}, path=path)
        (line,) = lines_of(answer)
        assert (line["done"], line["done_reason"], engine.state, engine.starts) == (True, "unload", "asleep", 0)
        engine.state, engine.ready = ("ready", engine.report) if keep_alive != "0" else ("asleep", None)


def test_another_duration_leaves_a_model_loaded() -> None:
    engine = Talking()
    app, _ = app_of(engine)
    for number, keep_alive in enumerate((None, 5, -1, "5m", "1h30m", "-1", "1.5h", "300", "10ms"), start=1):
        engine.sleep()
        (answer,) = posted(app, {"keep_alive": keep_alive}, path="/api/generate")
        assert (lines_of(answer)[0]["done_reason"], engine.state, engine.starts) == ("load", "ready", number)


def test_what_is_no_duration_is_refused() -> None:
    engine = Talking().sleep()
    app, _ = app_of(engine)
    for keep_alive in ("soon", "5 m", "", "0x", "m", "\u0660", [0]):
        (answer,) = posted(app, {"keep_alive": keep_alive}, path="/api/generate")
        assert answer.status_code == 400 and answer.json()["error"].startswith("keep_alive") and engine.starts == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", {"messages": [USER]}),
        ("/api/chat", {"messages": [USER], "stream": False}),
        ("/api/generate", {"prompt": "x"}),
    ],
)
def test_a_model_is_unloaded_after_its_answer(path: str, body: dict[str, Any]) -> None:
    """It stays loaded while another request uses it, and a request to unload it is then refused."""
    engine = Talking()
    pool = ModelPool({"m": of_several(engine)}, Metrics())
    app = make_app(Server(pool, pool.metrics))

    async def use() -> None:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://m") as client:
            async with pool.using("m"):
                answer = await client.post(path, json={**body, "keep_alive": 0})
                refused = await client.post(path, json={"keep_alive": 0})
                assert answer.status_code == 200 and "yes" in answer.text and engine.state == "ready"
                assert refused.status_code == 400 and refused.json()["error"].startswith("m is used by other requests")
            answer = await client.post(path, json={**body, "keep_alive": 0})
            assert answer.status_code == 200 and "yes" in answer.text
            async with asyncio.timeout(5):
                while engine.state != "asleep":
                    await asyncio.sleep(0.001)
            assert (await client.post(path, json=body)).status_code == 200 and engine.starts == 1

    asyncio.run(use())


def test_a_request_that_comes_first_keeps_the_model_loaded() -> None:
    """Another model is loaded when the client asks to unload this one, which waits for that."""
    engine, other = Talking(), Talking().sleep()
    pool = ModelPool({"m": of_several(engine), "n": of_several(other)}, Metrics())

    async def use() -> None:
        await pool._load_lock.acquire()
        unload = pool.begin_unload("m")
        assert unload is not None and pool.begin_unload("m") is None
        async with pool.using("m"):
            pool._load_lock.release()
            await unload
            assert engine.state == "ready"
        await pool.unload("m")
        assert engine.state == "asleep"

    asyncio.run(use())


@pytest.mark.parametrize("chats", [True, False])
def test_a_sleeping_model_reads_a_prompt_as_a_loaded_one(chats: bool) -> None:
    engine = Talking(chats=chats).sleep()
    app, _ = app_of(engine)
    posted(app, {"prompt": "hello"}, {"prompt": "hello"}, path="/api/generate")
    first, second = engine.requests
    assert engine.starts == 1 and first.prompt == second.prompt == (({"role": "user", "content": "hello"},) if chats else "hello")


def test_what_is_wrong_is_said_before_the_model_is_loaded() -> None:
    engine = Talking().sleep()
    app, _ = app_of(engine)
    (answer,) = posted(app, {"messages": [USER], "tools": [WEATHER], "format": "json"}, path="/api/chat")
    assert (answer.status_code, engine.starts) == (400, 0)
    assert answer.json() == {"error": "an answer in a format calls no tools; leave out format or tools"}


OTHER_ROLES: list[tuple[dict[str, Any], str]] = [  # messages with a field of another role, and its name
    ({"role": "tool", "images": ["x"]}, "images"),
    ({"role": "tool", "thinking": "x"}, "thinking"),
    ({"role": "tool", "tool_calls": [{"function": {"name": "a"}}]}, "tool_calls"),
    ({"role": "user", "tool_name": "a"}, "tool_name"),
    ({"role": "user", "thinking": "x"}, "thinking"),
    ({"role": "system", "images": ["x"]}, "images"),
    ({"role": "system", "tool_call_id": "a"}, "tool_call_id"),
    ({"role": "assistant", "images": ["x"]}, "images"),
    ({"role": "assistant", "tool_call_id": "a"}, "tool_call_id"),
]


def test_a_field_of_another_role_is_refused_by_name() -> None:
    app, _ = app_of(Talking())
    for message, field in OTHER_ROLES:
        (answer,) = posted(app, {"messages": [{"content": "x", **message}]}, path="/api/chat")
        assert answer.status_code == 400 and f".{field} is not possible here" in answer.json()["error"]
    empty: dict[str, Any] = {"content": "x", "role": "user", "images": [], "tool_calls": [], "thinking": "", "tool_name": None}
    assert posted(app, {"messages": [empty]}, path="/api/chat")[0].status_code == 200


def test_seeds_forms_and_suffixes_are_used() -> None:
    engine = Talking()
    app, _ = app_of(engine)
    bodies: list[dict[str, Any]] = [{"options": {"seed": seed}} for seed in (-1, -1, 7, 7)]
    bodies += [{"format": form} for form in ({}, "json", "", {"type": "array"})]
    posted(app, *({"prompt": "x", **body} for body in bodies), {"suffix": "end"}, path="/api/generate")
    seeds = [request.options["seed"] for request in engine.requests[:4]]
    assert len(set(seeds)) == 3 and seeds[2:] == [7, 7]
    forms = [request.json_schema for request in engine.requests[4:8]]
    assert forms == ['{"type": "object"}', '{"type": "object"}', None, '{"type": "array"}']
    assert (engine.requests[8].prompt, engine.requests[8].suffix) == ("", "end")


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        ("enable_thinking has no place here; leave it out, or set one of add_id", "think has no place here; leave it out"),
        ("repetition_penalty is too small, and max_tokens, too", "repeat_penalty is too small, and num_predict, too"),
        ("give a text to /v1/completions, or start it with --x", "give a text to /api/generate, or start it with --x"),
        ("the model answers at /v1/chat/completions or /v1/completions", "the model answers at /api/chat or /api/generate"),
        ("my_max_tokens and a/v1/completions", "my_max_tokens and a/v1/completions"),
    ],
)
def test_errors_name_ollamas_fields(error: str, shown: str) -> None:
    assert Refusal(400, error).ollama_body() == {"error": shown}


def test_the_bound_of_a_penalty_is_refused_by_ollamas_name() -> None:
    (answer,) = posted(app_of(Talking())[0], {"prompt": "x", "options": {"repeat_penalty": 0}}, path="/api/generate")
    assert answer.status_code == 400 and answer.json()["error"].startswith("options.repeat_penalty: Input should be greater")


def test_durations() -> None:
    """Loading takes 5 ns, the first piece 7 ns, the rest 11 ns, and vectors take 3 ns."""
    now = [100]

    class Timed(Talking):
        async def start(self) -> Any:
            now[0] += 5
            return await super().start()

        async def pieces(self, request: Generate) -> Any:
            for nanoseconds, text in ((7, "a"), (11, "b")):
                for _ in range(50):  # the piece before is read meanwhile
                    await asyncio.sleep(0)
                now[0] += nanoseconds
                yield Piece(id=1, text=text, tokens=1, prompt_tokens=7, ending="stop" if text == "b" else None)

        async def vectors(self, request: Any) -> Vectors:
            now[0] += 3
            return await super().vectors(request)

    async def ask(task: str, handler: str, request: Any) -> dict[str, Any]:
        pool = ModelPool({"m": of_several(Timed(task=task).sleep())}, Metrics())
        addresses = OllamaAddresses(Server(pool, pool.metrics), clock=lambda: now[0])
        found: dict[str, Any] = json.loads((await getattr(addresses, handler)(request)).body)
        return {name: value for name, value in found.items() if name.endswith("_duration")}

    chat = asyncio.run(ask("generate", "chat", OllamaChat.model_validate({"messages": [USER], "stream": False})))
    assert chat == {"total_duration": 23, "load_duration": 5, "prompt_eval_duration": 7, "eval_duration": 11}
    vectors = asyncio.run(ask("encode", "embed", OllamaEmbed(input="a")))
    assert vectors == {"total_duration": 8, "load_duration": 5}


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show"])
def test_hostile_bodies_are_one_line(path: str) -> None:
    app, _ = app_of(Talking(task="encode" if "embed" in path else "generate"))
    goods: dict[str, Any] = {"/api/chat": {"messages": [USER]}, "/api/generate": {"prompt": "x"}, "/api/embed": {"input": "x"}}
    good = goods.get(path, {})
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
