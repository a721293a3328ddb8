"""/v1/responses with OpenAI's own client: texts, reasoning, tools, streams, and conversations that the server keeps."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import openai
import pytest
from test_serve_faults import Recording, app_of, posted

from upshift.serving.messages import Generate, Piece, ToolCall
from upshift.serving.protocols.responses_requests import ResponseStore

TOOL = {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}, "strict": True}
TEXT = ({"reasoning": "first"}, {"reasoning": " then", "text": "so"}, {"text": " be it", "ending": "stop"})
CALLS = (
    {"text": "wait"},
    {"calls": (ToolCall(index=0, name="now", arguments='{"a": 1}'), ToolCall(index=1, name="now", arguments="{}"))},
    {"text": "\n", "ending": "stop"},
)


class Scripted(Recording):
    """An engine that says these parts."""

    def __init__(self, parts: Any = TEXT) -> None:
        super().__init__()
        self.parts = parts

    async def pieces(self, request: Generate) -> Any:
        self.requests.append(request)
        for fields in self.parts:
            if isinstance(fields, Exception):
                raise fields
            yield Piece(id=1, tokens=2, prompt_tokens=3, reasoning_tokens=1, **{"text": "", **fields})


def with_client(engine: Any, ask: Callable[[openai.AsyncOpenAI], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        transport = httpx2.ASGITransport(app_of(engine)[0])
        http = openai.DefaultAsyncHttpxClient(transport=transport)  # type: ignore[arg-type]
        async with openai.AsyncOpenAI(base_url="http://m/v1", api_key="k", http_client=http, max_retries=0) as client:
            return await ask(client)

    return asyncio.run(run())


def asked(engine: Any, **body: Any) -> Any:
    return with_client(engine, lambda client: client.responses.create(**{"model": "m", "input": "x", **body}))


def test_a_text_with_reasoning() -> None:
    answer = asked(Scripted(), instructions="be brief", max_output_tokens=9, metadata={"run": "7"})
    assert (answer.output_text, answer.status, answer.error) == ("so be it", "completed", None)
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.output[0].content[0].text == "first then" and answer.instructions == "be brief"
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens, usage.output_tokens_details.reasoning_tokens) == (3, 6, 3)
    cut = asked(Scripted(({"text": "so", "ending": "length"},)))
    assert (cut.status, cut.incomplete_details.reason, cut.output[0].status) == ("incomplete", "max_output_tokens", "incomplete")


def test_calls_and_their_results() -> None:
    engine = Scripted(CALLS)
    answer = asked(engine, tools=[TOOL], tool_choice={"type": "function", "name": "now"})
    assert [item.type for item in answer.output] == ["message", "function_call", "function_call"]
    call = answer.output[1]
    assert (call.name, call.arguments, answer.output_text) == ("now", '{"a": 1}', "wait")
    assert engine.requests[0].forced_tools == ("now",)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
    history = [{"role": "user", "content": "x"}, *(item.model_dump() for item in answer.output), result]
    asked(engine, tools=[TOOL], input=history)
    turns: Any = engine.requests[1].prompt
    assert [turn["role"] for turn in turns] == ["user", "assistant", "tool"]
    assert turns[1]["content"] == "wait" and len(turns[1]["tool_calls"]) == 2
    assert turns[1]["tool_calls"][0]["id"] == turns[2]["tool_call_id"] == call.call_id


@pytest.mark.parametrize("parts", [TEXT, CALLS])
def test_a_stream_adds_up_to_the_answer(parts: Any) -> None:
    async def ask(client: openai.AsyncOpenAI) -> Any:
        async with client.responses.stream(model="m", input="x") as stream:
            events = [event async for event in stream]
            return events, await stream.get_final_response()

    events, final = with_client(Scripted(parts), ask)
    whole = asked(Scripted(parts))
    assert final.output_text == whole.output_text and final.usage == whole.usage
    assert [item.type for item in final.output] == [item.type for item in whole.output]
    raw = [event for event in events if hasattr(event, "sequence_number")]
    assert [event.sequence_number for event in raw] == sorted({event.sequence_number for event in raw})
    assert [raw[0].type, raw[1].type, raw[-1].type] == ["response.created", "response.in_progress", "response.completed"]
    deltas = "".join(event.delta for event in raw if event.type == "response.output_text.delta")
    assert deltas.strip() == whole.output_text
    added = [event.output_index for event in raw if event.type == "response.output_item.added"]
    done = [event.output_index for event in raw if event.type == "response.output_item.done"]
    assert added == done == list(range(len(whole.output)))


def test_an_error_in_a_stream() -> None:
    lines = posted(app_of(Scripted(({"text": "so"}, ValueError("/secret"))))[0], {"model": "m", "input": "x", "stream": True},
                   path="/v1/responses")[0].text  # fmt: skip
    last = json.loads(lines.strip().rpartition("data: ")[2])
    assert last["type"] == "error" and last["code"] == "server_error" and "secret" not in lines


def test_conversations_are_kept() -> None:
    engine = Scripted()

    async def ask(client: openai.AsyncOpenAI) -> Any:
        first = await client.responses.create(model="m", input="x", instructions="be brief")
        second = await client.responses.create(model="m", input="y", previous_response_id=first.id)
        kept = await client.responses.retrieve(second.id)
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError, match="is not kept here"):
            await client.responses.create(model="m", input="z", previous_response_id=first.id)
        unkept = await client.responses.create(model="m", input="x", store=False)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(unkept.id)
        return second, kept

    second, kept = with_client(engine, ask)
    assert kept == second
    turns: Any = engine.requests[1].prompt
    assert [(turn["role"], turn["content"]) for turn in turns] == [("user", "x"), ("assistant", "so be it"), ("user", "y")]
    assert turns[1]["reasoning_content"] == "first then", "the instructions are of one request alone"


def test_the_store_is_bounded() -> None:
    store = ResponseStore(max_responses=3, max_characters=1000)
    for number in range(5):
        store.add({"id": str(number)}, [])
    assert [number for number in range(5) if store.find(str(number))] == [2, 3, 4]
    store.add({"id": "large"}, [{"content": "x" * 900}])
    assert store.find("large") and not store.find("2")
    store.add({"id": "larger"}, [{"content": "x" * 2000}])
    assert not store.find("larger") and not store.find("large") and store._characters == 0
    assert not store.remove("larger")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"tools": [{"type": "web_search"}]}, "tools.0"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"conversation": "c"}, "conversation is not possible here"),
    ({"tool_choice": "required"}, "there are no tools"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "data: URLs"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "now", "arguments": "["}]}, "no JSON object"),
    ({"reasoning": {"effort": "some"}}, "reasoning.effort"),
]


@pytest.mark.parametrize(("fields", "words"), WRONG)
def test_wrong_bodies(fields: dict[str, Any], words: str) -> None:
    answer = posted(app_of(Scripted())[0], {"model": "m", "input": "x", **fields}, path="/v1/responses")[0]
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text


def test_nulls_are_left_out() -> None:
    fields = ("instructions", "previous_response_id", "tools", "text", "reasoning", "store", "metadata", "conversation", "prompt")
    answer = posted(app_of(Scripted())[0], {"model": "m", "input": "x", **dict.fromkeys(fields)}, path="/v1/responses")[0]
    assert answer.status_code == 200, answer.text


def test_the_name_of_the_model_comes_before_what_else_is_wrong() -> None:
    """A client that asks the wrong server must not be told to mend its request first."""
    bodies = ({"previous_response_id": "none"}, {"input": [{"type": "function_call_output", "call_id": "a", "output": "b"}]})
    answers = posted(app_of(Scripted())[0], *({"model": "other", "input": "x"} | body for body in bodies), path="/v1/responses")
    assert [answer.status_code for answer in answers] == [404, 404]
    assert all("'other' is not served here" in answer.json()["error"]["message"] for answer in answers)
