"""/v1/responses with OpenAI's own client: texts, reasoning, tools, streams, and conversations that the server keeps."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_serve_faults import Recording, app_of, posted

from upshift.errors import RequestError
from upshift.serving.engine_process import TokenizedPrompt
from upshift.serving.messages import Generate, Piece, TokenScore, ToolCall
from upshift.serving.protocols import responses_addresses
from upshift.serving.protocols.responses_store import Inputs, ResponseStore

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
            yield Piece(**{"id": 1, "tokens": 2, "prompt_tokens": 3, "reasoning_tokens": 1, "text": "", **fields})


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


def body_of(id: Any, status: str = "completed", output: Any = ()) -> dict[str, Any]:
    return {"id": str(id), "status": status, "output": list(output)}


def test_the_store_is_bounded() -> None:
    store = ResponseStore(max_responses=3, max_characters=1000)
    for number in range(5):
        store.add(body_of(number), Inputs())
    assert [number for number in range(5) if store.find(str(number))] == [2, 3, 4]
    store.add(body_of("large"), Inputs([{"id": "a", "content": "x" * 850}]))
    assert store.find("large") and not store.find("2")
    store.add(body_of("larger"), Inputs([{"id": "a", "content": "x" * 2000}]))
    assert not store.find("larger") and not store.find("large") and store._characters == 0
    assert not store.remove("larger")


def test_an_answer_that_is_computed_is_not_dropped() -> None:
    """However many others come meanwhile: whoever cancels it must find it."""
    store = ResponseStore(max_responses=3, max_characters=1000)
    for number, status in enumerate(("queued", "in_progress")):
        store.add(body_of(number, status), Inputs())
    for number in range(2, 9):
        assert not store.is_full
        store.add(body_of(number), Inputs([{"id": "a", "content": "x" * 1000 * (number % 2)}]))
    assert [number for number in range(9) if store.find(str(number))] == [0, 1, 8]
    store.add(body_of(9, "queued"), Inputs())
    assert store.is_full and store.find("9") and not store.find("8")
    for number in (0, 1, 9):
        store.add(body_of(number), Inputs())
    assert not store.is_full


MESSAGE = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}], "status": "completed"}


@given(st.lists(st.tuples(st.sampled_from(["add", "remove"]), st.integers(0, 3), st.sets(st.integers(0, 5))), max_size=20))
def test_items_are_found_as_long_as_a_response_has_them(steps: Any) -> None:
    """By the ids that the server made alone. The reference is a search through all responses."""
    store = ResponseStore(max_responses=3)
    for step, number, ids in steps:
        if step == "remove":
            store.remove(str(number))
            continue
        items = [{**MESSAGE, "id": f"{kind}{id}"} for id in ids for kind in ("made", "client")]
        output = [{**MESSAGE, "role": "assistant", "id": f"output{number}"}]
        store.add(body_of(number, output=output), Inputs(items, frozenset(f"made{id}" for id in ids)))
    kept = {item["id"] for number in range(4) if (found := store.find(str(number))) for item in found.conversation}
    names = {f"{kind}{id}" for kind in ("made", "client", "output") for id in range(6)}
    assert {name for name in names if store.find_item(name)} == {name for name in kept if not name.startswith("client")}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"tools": [{"type": "web_search"}]}, "tools.0"),
    ({"background": True, "stream": True}, "an answer in the background is not streamed"),
    ({"background": True, "store": False}, "set store to true"),
    ({"background": True, "tool_choice": "required"}, "there are no tools"),
    ({"top_logprobs": 2}, "add 'message.output_text.logprobs' to include"),
    ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
    ({"include": ["message"]}, "include.0"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}}, "names f, which"),
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


def score(text: str, logprob: float = -1.0) -> TokenScore:
    likely = tuple(TokenScore(spelled=tuple(other.encode()), logprob=value) for other, value in (("x", -0.5), (text, logprob)))
    return TokenScore(spelled=tuple(text.encode()), logprob=logprob, top=likely)


SCORED = (  # reasoning, a text whose token is held back, a text and a call whose tokens are no text, and a stop string
    {"reasoning": "first", "scores": (score("first"),)},
    {"scores": (score("so "),), "reasoning_tokens": 0},
    {"text": "so be", "scores": (score("be"),), "reasoning_tokens": 0},
    {"scores": (score("<call>"),), "reasoning_tokens": 0},
    {"calls": (ToolCall(index=0, name="now", arguments="{}"),), "scores": (score("</call>"),), "reasoning_tokens": 0},
    {"text": " it", "scores": (score(" it"),), "reasoning_tokens": 0},
    {"text": "", "ending": "stop", "scores": (score("END"),), "reasoning_tokens": 0},
)


def test_log_probabilities_are_those_of_the_text() -> None:
    """With a stream, they come with the text whose they are, and all of them at its end."""
    engine = Scripted(SCORED)
    wanted = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = asked(engine, **wanted)
    assert engine.requests[0].top == 2
    texts = [[one.token for one in item.content[0].logprobs] for item in whole.output if item.type == "message"]
    assert texts == [["so ", "be"], [" it", "END"]]
    first = whole.output[1].content[0].logprobs[0]
    assert (first.logprob, first.bytes, [one.token for one in first.top_logprobs]) == (-1.0, list(b"so "), ["x", "so "])
    events = with_client(Scripted(SCORED), lambda client: all_events(client, **wanted))
    deltas = [one.token for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
    done = [[one.token for one in event.logprobs] for event in events if event.type == "response.output_text.done"]
    assert deltas == ["so ", "be", " it"] and done == texts
    assert asked(Scripted()).output[1].content[0].logprobs == []


async def all_events(client: openai.AsyncOpenAI, **fields: Any) -> list[Any]:
    stream = await client.responses.create(model="m", input="x", stream=True, **fields)
    return [event async for event in stream]


def test_the_items_of_an_input_are_listed() -> None:
    """Of the whole conversation, in pages, in both orders."""
    turns: Any = [{"role": "user", "content": str(number)} for number in range(4)]

    async def ask(client: openai.AsyncOpenAI) -> Any:
        first = await client.responses.create(model="m", input=turns)
        second = await client.responses.create(model="m", input="end", previous_response_id=first.id)
        pages = client.responses.input_items.list
        listed = [[item async for item in pages(second.id, limit=3, order=order)] for order in ("asc", "desc")]
        with pytest.raises(openai.NotFoundError, match="no item of the response"):
            await pages(second.id, after="none")
        with pytest.raises(openai.BadRequestError, match="limit"):
            await pages(second.id, limit=101)
        return first, listed

    first, (rising, falling) = with_client(Scripted(), ask)
    assert rising == falling[::-1] and len({item.id for item in rising}) == 7
    said = [(item.type, item.content[0].type, item.content[0].text) for item in rising]
    assert said == [
        *(("message", "input_text", str(number)) for number in range(4)), ("reasoning", "reasoning_text", "first then"),
        ("message", "output_text", "so be it"), ("message", "input_text", "end"),
    ]  # fmt: skip
    assert [item.id for item in rising[4:6]] == [item.id for item in first.output]


def test_every_item_of_an_input_has_an_id_of_its_own() -> None:
    """Also if the client repeats one, or sends back what the conversation has: pages would go round in circles."""
    user: dict[str, Any] = {"type": "message", "role": "user", "content": "x"}

    async def ask(client: openai.AsyncOpenAI) -> None:
        twice: Any = [user | {"id": id} for id in ("a", "a", "b", "")]
        first = await client.responses.create(model="m", input=twice)
        again: Any = [*twice[:1], *(item.model_dump(exclude_none=True) for item in first.output)]
        second = await client.responses.create(model="m", input=again, previous_response_id=first.id)
        for order in ("asc", "desc"):
            pages = client.responses.input_items.list(second.id, limit=1, order=order)
            ids = [item.id async for item in first_of(pages, 50)]
            assert len(ids) == len(set(ids)) == 4 + 2 + 3 and {"a", "b", *(item.id for item in first.output)} < set(ids)

    with_client(Scripted(), ask)


async def first_of(items: Any, count: int) -> Any:
    async for item in items:
        yield item
        count -= 1
        if not count:
            return


def test_a_reference_finds_no_id_that_another_client_made() -> None:
    """It finds it in the conversation that goes on, and what the server itself named everywhere."""
    item: Any = {"type": "message", "role": "user", "content": "secret", "id": "msg_1"}
    reference: Any = [{"type": "item_reference", "id": "msg_1"}]

    async def ask(client: openai.AsyncOpenAI) -> None:
        first = await client.responses.create(model="m", input=[item, {"role": "user", "content": "y"}])
        with pytest.raises(openai.NotFoundError, match="the item 'msg_1' is not kept here"):
            await client.responses.create(model="m", input=reference)
        later = await client.responses.create(model="m", input=reference, previous_response_id=first.id)
        listed = [one.id async for one in client.responses.input_items.list(first.id, order="asc")]
        made: Any = [{"type": "item_reference", "id": id} for id in (listed[1], first.output[1].id)]
        second = await client.responses.create(model="m", input=made)
        for response in (first, later):  # the items of the first belong to both
            await client.responses.create(model="m", input=made[:1])
            await client.responses.delete(response.id)
        for id in made:
            with pytest.raises(openai.NotFoundError):
                await client.responses.create(model="m", input=[id])
        await client.responses.create(model="m", input="z", previous_response_id=second.id)

    engine = Scripted()
    with_client(engine, ask)
    assert [turn["content"] for turn in engine.requests[-1].prompt] == ["y", "so be it", "so be it", "z"]  # type: ignore[index]


def test_a_reference_stands_for_an_item() -> None:
    """As frameworks send a history whose answers the server keeps."""
    engine = Scripted(CALLS)

    async def ask(client: openai.AsyncOpenAI) -> None:
        tool: Any = TOOL
        first: Any = await client.responses.create(model="m", input="x", tools=[tool])
        result: Any = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "noon"}
        references: Any = [{"type": "item_reference", "id": item.id} for item in first.output]
        asked_again: Any = {"model": "m", "tools": [tool]}
        await client.responses.create(input=[{"role": "user", "content": "x"}, *references, result], **asked_again)
        await client.responses.create(input=[*references, result], previous_response_id=first.id, **asked_again)
        with pytest.raises(openai.NotFoundError, match="the item 'none' is not kept here"):
            await client.responses.create(input=[{"type": "item_reference", "id": "none"}], **asked_again)

    with_client(engine, ask)
    _, by_references, by_response = engine.requests
    turns: Any = by_references.prompt
    assert by_references.prompt == by_response.prompt and [turn["role"] for turn in turns] == ["user", "assistant", "tool"]
    assert len(turns[1]["tool_calls"]) == 2


class Waiting(Scripted):
    """An engine whose answers go on when they are told to."""

    def __init__(self, parts: Any = TEXT) -> None:
        super().__init__(parts)
        self.go = asyncio.Event()
        self.left = 0

    async def pieces(self, request: Generate) -> Any:
        try:
            async for piece in super().pieces(request):
                yield piece
                await self.go.wait()
        finally:
            self.left += 1


def test_an_answer_in_the_background() -> None:
    """It is asked for until it is complete, cancelled while it is computed, and not continued before its end."""
    engine = Waiting()

    async def ask(client: openai.AsyncOpenAI) -> Any:
        start = {"model": "m", "input": "x", "background": True}
        whole, cancelled, dropped = [await client.responses.create(**start) for _ in range(3)]  # type: ignore[call-overload]
        assert (whole.status, whole.background, whole.output) == ("queued", True, [])
        assert (await client.responses.retrieve(whole.id)).status == "in_progress"
        with pytest.raises(openai.BadRequestError, match="is still computed"):
            await client.responses.create(model="m", input="y", previous_response_id=whole.id)
        for _ in range(2):
            assert (await client.responses.cancel(cancelled.id)).status == "cancelled"
        await client.responses.delete(dropped.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(dropped.id)
        assert engine.left == 2
        engine.go.set()
        while (ended := await client.responses.retrieve(whole.id)).status == "in_progress":
            await asyncio.sleep(0.01)
        assert (await client.responses.cancel(whole.id)) == ended
        plain = await client.responses.create(model="m", input="x")
        with pytest.raises(openai.BadRequestError, match="not computed in the background"):
            await client.responses.cancel(plain.id)
        with pytest.raises(openai.BadRequestError, match="leave stream out"):
            await client.responses.retrieve(plain.id, stream=True)
        return ended, plain

    ended, plain = with_client(engine, ask)
    assert (ended.status, ended.output_text, ended.usage) == ("completed", plain.output_text, plain.usage)


def test_answers_in_the_background_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """While none of them comes forward, as while a model is loaded. Others are answered, and so are further ones later."""
    monkeypatch.setattr(responses_addresses, "MAX_BACKGROUND", 3)
    engine = Waiting()

    async def ask(client: openai.AsyncOpenAI) -> None:
        start = {"model": "m", "input": "x", "background": True}
        begun = [await client.responses.create(**start) for _ in range(3)]  # type: ignore[call-overload]
        with pytest.raises(openai.RateLimitError, match="3 answers are computed in the background already") as refused:
            await client.responses.create(**start)  # type: ignore[call-overload]
        assert int(refused.value.response.headers["Retry-After"]) > 0 and len(engine.requests) == 3
        await client.responses.delete(begun[0].id)
        begun.append(await client.responses.create(**start))  # type: ignore[call-overload]
        engine.go.set()
        for one in begun[1:]:
            while (await client.responses.retrieve(one.id)).status != "completed":
                await asyncio.sleep(0.01)
        await client.responses.create(**start)  # type: ignore[call-overload]

    with_client(engine, ask)


def test_an_answer_in_the_background_that_fails() -> None:
    async def ask(client: openai.AsyncOpenAI) -> Any:
        begun = await client.responses.create(model="m", input="x", background=True)
        while (ended := await client.responses.retrieve(begun.id)).status in ("queued", "in_progress"):
            await asyncio.sleep(0.01)
        return ended

    for error, code in ((ValueError("/secret"), "server_error"), (RequestError("no"), "invalid_prompt")):
        ended = with_client(Scripted(({"text": "so"}, error)), ask)
        assert (ended.status, ended.error.code) == ("failed", code) and "secret" not in ended.error.message


def test_the_tokens_of_a_prompt_are_counted() -> None:
    engine = Counting()

    async def ask(client: openai.AsyncOpenAI) -> Any:
        first = await client.responses.create(model="m", input="x")
        return await client.responses.input_tokens.count(model="m", input="y", previous_response_id=first.id)

    counted = with_client(engine, ask)
    assert counted.object == "response.input_tokens" and counted.input_tokens == 3, "the messages of the conversation"


class Counting(Scripted):
    async def tokens(self, request: Any) -> TokenizedPrompt:
        return TokenizedPrompt([0] * len(request.prompt), [])
