"""/v1/messages as Anthropic's clients use it: texts, reasoning, tools, streams, token counts and errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import pytest
from test_responses import CALLS, TEXT, Scripted
from test_serve_clients import called
from test_serve_faults import app_of, posted

from upshift.serving.engine_process import RequestRefused, TokenizedPrompt
from upshift.serving.messages import Generate, Refused, Tokenize
from upshift.serving.request_checks import Limits

PATH = "/v1/messages"
ASKED: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
TOOL = {"name": "now", "description": "the time", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
STOPPED = ({"text": "so"}, {"text": " be", "ending": "stop", "stop_string": "it"})
CUT = ({"text": "so", "ending": "length"},)


class Counting(Scripted):
    """An engine that counts the characters of a prompt, and keeps what it counted."""

    counted: list[Tokenize] = []

    async def tokens(self, request: Tokenize) -> TokenizedPrompt:
        self.counted = [*self.counted, request]
        return TokenizedPrompt(list(range(len(str(request.prompt)))), [])


def answered(engine: Any, path: str = PATH, **body: Any) -> httpx2.Response:
    return posted(app_of(engine)[0], {**ASKED, **body}, path=path)[0]


def events_of(text: str) -> list[dict[str, Any]]:
    events = []
    for part in text.strip().split("\n\n"):
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def add_up(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of a stream, by the rules of Anthropic's description."""
    message: dict[str, Any] = {}
    texts: dict[int, str] = {}
    for event in events:
        kind = event["type"]
        if kind == "message_start":
            message = event["message"]
        elif kind == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
        elif kind == "content_block_delta":
            delta = event["delta"]
            texts[event["index"]] = texts.get(event["index"], "") + delta[FIELD_OF[delta["type"]]]
        elif kind == "content_block_stop":
            block = message["content"][event["index"]]
            text = texts.pop(event["index"])
            block |= {"input": json.loads(text)} if block["type"] == "tool_use" else {block["type"]: text}
        elif kind == "message_delta":
            message |= event["delta"]
            message["usage"] |= event["usage"]
    assert not texts and kind == "message_stop"
    return message


FIELD_OF = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return {name: value for name, value in message.items() if name != "id"} | {"content": content}


def test_a_text_with_reasoning() -> None:
    engine = Scripted()
    message = answered(engine, system="be brief", stop_sequences=["a", "b", "c", "d", "e"], top_k=3).json()
    assert message["content"] == [
        {"type": "thinking", "thinking": "first then", "signature": ""}, {"type": "text", "text": "so be it"}
    ]  # fmt: skip
    assert (message["stop_reason"], message["stop_sequence"], message["role"]) == ("end_turn", None, "assistant")
    usage = {"input_tokens": 3, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 6}
    assert message["usage"] == usage
    options = engine.requests[0].options
    assert options["stop_strings"] == ["a", "b", "c", "d", "e"] and options["top_k"] == 3 and options["max_new_tokens"] == 9
    turns: Any = engine.requests[0].prompt
    assert [(turn["role"], turn["content"]) for turn in turns] == [("system", "be brief"), ("user", "x")]


@pytest.mark.parametrize(
    ("parts", "reason", "sequence"),
    [(TEXT, "end_turn", None), (CALLS, "tool_use", None), (STOPPED, "stop_sequence", "it"), (CUT, "max_tokens", None)],
)
def test_a_stream_adds_up_to_the_answer(parts: Any, reason: str, sequence: str | None) -> None:
    whole = answered(Scripted(parts)).json()
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
    stream = answered(Scripted(parts), stream=True)
    assert stream.headers["content-type"].startswith("text/event-stream")
    events = events_of(stream.text)
    assert events[0]["message"]["usage"]["input_tokens"] == 3 and events[0]["message"]["stop_reason"] is None
    assert without_ids(add_up(events)) == without_ids(whole)


def test_cached_tokens_are_counted_apart() -> None:
    usage = answered(Scripted(({"text": "so", "cached_tokens": 2, "ending": "stop"},))).json()["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (1, 2)


def test_calls_and_their_results() -> None:
    engine = Scripted(CALLS)
    choice = {"type": "tool", "name": "now", "disable_parallel_tool_use": True}
    message = answered(engine, tools=[TOOL], tool_choice=choice).json()
    assert [block["type"] for block in message["content"]] == ["text", "tool_use", "tool_use"]
    assert message["content"][1]["input"] == {"a": 1} and message["content"][1]["id"].startswith("toolu_")
    request = engine.requests[0]
    function = {"name": "now", "description": "the time", "parameters": TOOL["input_schema"]}
    assert json.loads(request.tools or "") == [{"type": "function", "function": function}]
    assert (request.forced_tools, request.max_calls) == (("now",), 1)
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "noon"}]}
        for block in message["content"][1:]
    ]
    history = [*ASKED["messages"], {"role": "assistant", "content": message["content"]}]
    history.append({"role": "user", "content": [*results, {"type": "text", "text": "and now?"}]})
    assert answered(engine, tools=[TOOL], messages=history).status_code == 200
    turns: Any = engine.requests[1].prompt
    assert [turn["role"] for turn in turns] == ["user", "assistant", "tool", "tool", "user"]
    assert [turn["tool_call_id"] for turn in turns[2:4]] == [call["id"] for call in turns[1]["tool_calls"]]
    assert (turns[1]["content"], turns[2]["content"], turns[4]["content"]) == ("wait", "noon", "and now?")
    assert json.loads(turns[1]["tool_calls"][0]["function"]["arguments"]) == {"a": 1}


def test_messages_of_the_same_role_become_one() -> None:
    engine = Scripted()
    thoughts = [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "redacted_thinking", "data": "d"}]
    kept = {"cache_control": {"type": "ephemeral"}, "citations": None}
    parts = [{"type": "text", "text": "b", **kept}, {"type": "text", "text": "c"}]
    turns = [
        {"role": "user", "content": "a"}, {"role": "user", "content": parts},
        {"role": "assistant", "content": [*thoughts, {"type": "text", "text": "d"}]}, {"role": "assistant", "content": "e"},
        {"role": "user", "content": "f"},
    ]  # fmt: skip
    assert answered(engine, messages=turns, thinking={"type": "adaptive"}).status_code == 200
    prompt: Any = engine.requests[0].prompt
    assert [(turn["role"], turn["content"]) for turn in prompt] == [("user", "a\n\nbc"), ("assistant", "d\n\ne"), ("user", "f")]
    assert prompt[1]["reasoning_content"] == "hm"


def test_options_of_reasoning_and_of_the_form() -> None:
    engine = Scripted()
    form = {"type": "json_schema", "schema": {"type": "object"}}
    thinking = {"type": "enabled", "budget_tokens": 5, "display": "omitted"}
    answer = answered(engine, thinking=thinking, output_config={"effort": "high", "format": form})
    assert [block["type"] for block in answer.json()["content"]] == ["text"]
    request = engine.requests[0]
    assert (request.reasoning_budget, request.template.thinking, request.template.effort) == (5, True, "high")
    assert json.loads(request.json_schema or "") == {"type": "object"}
    answered(engine, thinking={"type": "disabled"})
    assert engine.requests[1].template.thinking is False


def test_tokens_are_counted_without_an_answer() -> None:
    engine = Counting()
    body = {"model": "m", "messages": ASKED["messages"], "tools": [TOOL], "thinking": {"type": "disabled"}, "system": "be brief"}
    answer = posted(app_of(engine)[0], body, path=f"{PATH}/count_tokens")[0].json()
    generated = Counting()
    answered(generated, **body)
    (request,) = generated.requests
    (counted,) = engine.counted
    assert (counted.prompt, counted.tools, counted.template) == (request.prompt, request.tools, request.template)
    assert answer == {"input_tokens": len(str(request.prompt))} and not engine.requests


CALL = {"type": "tool_use", "id": "t", "name": "now", "input": {}}


def goes_on(content: Any) -> list[dict[str, Any]]:
    return [*ASKED["messages"], {"role": "assistant", "content": content}]


@pytest.mark.parametrize("content", ["so", [{"type": "text", "text": "s"}, {"type": "text", "text": "o"}]])
def test_an_answer_goes_on_with_a_last_message_of_the_assistant(content: Any) -> None:
    """As chat completions do with continue_final_message. The tokens that are counted are those of the same prompt."""
    engine = Counting()
    assert answered(engine, messages=goes_on(content)).status_code == 200
    chat = {"model": "m", "messages": goes_on("so"), "continue_final_message": True, "add_generation_prompt": False}
    assert posted(app_of(engine)[0], chat, path="/v1/chat/completions")[0].status_code == 200
    first, second = engine.requests
    assert (first.prompt, first.template) == (second.prompt, second.template) and first.template.ending == "open"
    posted(app_of(engine)[0], {"model": "m", "messages": goes_on(content)}, path=f"{PATH}/count_tokens")
    assert (engine.counted[0].prompt, engine.counted[0].template) == (first.prompt, first.template)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": goes_on("so ")}, "white space"),
    ({"messages": goes_on("")}, "must not be empty"),
    ({"messages": goes_on([{"type": "text", "text": "so"}, CALL])}, "send the result of the tool"),
    ({"messages": goes_on("so"), "thinking": {"type": "enabled", "budget_tokens": 5}}, "leave thinking out"),
    ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "messages.0.content.0 is a document"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]}, "source.type"),
    ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "type thinking"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "t"}]}, *ASKED["messages"]]},
     "next message of the user"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
    ({"tool_choice": {"type": "any"}}, "there are no tools"),
    ({"tool_choice": {"type": "tool", "name": "other"}, "tools": [TOOL]}, "names other"),
    ({"thinking": {"type": "enabled"}}, "budget_tokens"),
    ({"container": "c"}, "container is not possible here"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "words"), WRONG)
def test_wrong_bodies(fields: dict[str, Any], words: str) -> None:
    answer = answered(Scripted(), **fields)
    body = answer.json()
    assert answer.status_code == 400 and words in body["error"]["message"], answer.text
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")


def test_errors_of_every_stage_have_anthropics_form() -> None:
    """Before the body is read, of the body, of the model's name, of the engine, and in a stream."""
    limits = Limits(keys=("k",), body_bytes=400)
    key = {"x-api-key": "k", "anthropic-version": "2023-06-01"}
    assert called("POST", PATH, json=ASKED, headers={"Authorization": "Bearer k"}, limits=limits).status_code == 200
    good = called("POST", PATH, json=ASKED, headers=key | {"x-request-id": "r-1"}, limits=limits)
    assert (good.status_code, good.headers["request-id"]) == (200, "r-1")
    found = {
        "authentication_error": called("POST", PATH, json=ASKED, headers={"x-api-key": "other"}, limits=limits),
        "request_too_large": called("POST", PATH, json=ASKED | {"system": "x" * 500}, headers=key, limits=limits),
        "invalid_request_error": called("POST", PATH, content=b"[", headers=key, limits=limits),
        "not_found_error": called("POST", f"{PATH}/count_tokens", json={**ASKED, "model": "o", "max_tokens": None}, headers=key),
        "rate_limit_error": answered(Scripted((RequestRefused(Refused(id=1, status=429, why="later", retry_after=2.0)),))),
    }
    statuses = [401, 413, 400, 404, 429]
    assert [answer.status_code for answer in found.values()] == statuses
    for kind, answer in found.items():
        assert (answer.json()["type"], answer.json()["error"]["type"]) == ("error", kind)
    assert found["rate_limit_error"].headers["retry-after"] == "2"
    too_long = answered(Scripted((RequestRefused(Refused(id=1, status=400, why="9 tokens", code="context_length_exceeded")),)))
    assert too_long.json()["error"]["message"] == "prompt is too long: 9 tokens"
    last = events_of(answered(Scripted(({"text": "so"}, ValueError("/secret"))), stream=True).text)[-1]
    assert last["type"] == "error" and last["error"]["type"] == "api_error" and "secret" not in str(last)


def with_client(engine: Any, ask: Callable[[Any], Awaitable[Any]]) -> Any:
    anthropic = pytest.importorskip("anthropic", reason="Anthropic's client is not installed: pip install anthropic")

    async def run() -> Any:
        http = anthropic.DefaultAsyncHttpxClient(transport=httpx2.ASGITransport(app_of(engine)[0]))
        async with anthropic.AsyncAnthropic(base_url="http://m", api_key="k", http_client=http, max_retries=0) as client:
            return await ask(client)

    return asyncio.run(run())


def test_a_thread_is_refused_in_the_words_that_the_client_knows() -> None:
    """So that Anthropic's client goes on without one."""
    app = app_of(Scripted())[0]
    refused = posted(app, ASKED | {"thread": {"type": "create"}}, path="/v1/messages")[0]
    assert refused.status_code == 400 and "leave thread out" in refused.json()["error"]["message"]
    assert refused.json()["error"]["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert posted(app, ASKED | {"thread": None}, path="/v1/messages")[0].status_code == 200


@pytest.mark.parametrize("parts", [TEXT, CALLS, STOPPED, CUT])
def test_anthropics_client_reads_a_stream(parts: Any) -> None:
    async def ask(client: Any) -> Any:
        async with client.messages.stream(**ASKED, tools=[TOOL]) as stream:
            texts = [text async for text in stream.text_stream]
            return texts, await stream.get_final_message(), await client.messages.create(**ASKED, tools=[TOOL])

    texts, streamed, whole = with_client(Scripted(parts), ask)
    assert without_ids(streamed.model_dump()) == without_ids(whole.model_dump())
    assert "".join(texts) == "".join(block.text for block in whole.content if block.type == "text")


def test_anthropics_client_sends_an_answer_back() -> None:
    engine = Counting(CALLS)

    async def ask(client: Any) -> Any:
        message = await client.messages.create(**ASKED, tools=[TOOL], tool_choice={"type": "auto"})
        results = [{"type": "tool_result", "tool_use_id": block.id, "content": "noon"} for block in message.content[1:]]
        history = [*ASKED["messages"], {"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
        again = await client.messages.create(**{**ASKED, "messages": history}, tools=[TOOL])
        return again, await client.messages.count_tokens(model="m", messages=history, tools=[TOOL])

    again, counted = with_client(engine, ask)
    second: Generate = engine.requests[1]
    assert again.stop_reason == "tool_use" and counted.input_tokens == len(str(second.prompt))
