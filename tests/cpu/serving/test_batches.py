"""/v1/files and /v1/batches with OpenAI's own client: answers, errors, a busy engine, and a server that starts again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from command import Command
from running_server import write_models
from test_serve_faults import Recording, app_of
from test_serving_parts import of_several

from upshift.errors import RequestError
from upshift.serving import batches as batches_module
from upshift.serving import offline_batch
from upshift.serving.engine_process import RequestRefused
from upshift.serving.messages import Generate, Piece, Refused
from upshift.serving.request_checks import Limits
from upshift.serving.server import holding

CHATS = "/v1/chat/completions"


class Echoing(Recording):
    """An engine that answers with the prompt. It waits at prompts of ``stops``, and is busy at the first ``busy`` requests."""

    def __init__(self, *stops: str, busy: int = 0) -> None:
        super().__init__()
        self.stops, self.busy = stops, busy

    async def pieces(self, request: Generate) -> Any:
        chat: Any = request.prompt
        self.requests.append(request)
        if self.busy:
            self.busy -= 1
            raise RequestRefused(Refused(id=1, status=429, why="later", retry_after=0.0))
        if chat[0]["content"] in self.stops:
            await asyncio.Event().wait()
        yield Piece(id=1, text=chat[0]["content"], tokens=1, prompt_tokens=1, ending="stop")

    async def stop(self) -> None:
        self.state = "asleep"

    @property
    def prompts(self) -> list[str]:
        chats: list[Any] = [request.prompt for request in self.requests]
        return [chat[0]["content"] for chat in chats]


def line_of(name: str, **body: Any) -> dict[str, Any]:
    chat = {"model": "m", "messages": [{"role": "user", "content": name}], **body}
    return {"custom_id": name, "method": "POST", "url": CHATS, "body": chat}


def file_of(*lines: Any) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def served(folder: Path, engine: Any, ask: Callable[[openai.AsyncOpenAI], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        app = app_of(engine, Limits(batch_folder=folder, body_bytes=10**6))[0]
        async with app.router.lifespan_context(app):
            http = openai.DefaultAsyncHttpxClient(transport=httpx2.ASGITransport(app))
            async with openai.AsyncOpenAI(base_url="http://m/v1", api_key="k", http_client=http, max_retries=0) as client:
                return await ask(client)

    return asyncio.run(run())


async def begin(client: openai.AsyncOpenAI, content: bytes, endpoint: Any = CHATS) -> Any:
    file = await client.files.create(file=("lines.jsonl", content), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"a": "b"})


async def until(client: openai.AsyncOpenAI, id: str, reached: Callable[[Any], bool]) -> Any:
    for _ in range(500):
        batch = await client.batches.retrieve(id)
        if reached(batch):
            return batch
        await asyncio.sleep(0.01)
    raise AssertionError(batch)


async def until_end(client: openai.AsyncOpenAI, id: str) -> Any:
    return await until(client, id, lambda batch: batch.status in ("completed", "failed", "cancelled"))


async def results(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    lines = [json.loads(line) for line in (await client.files.content(file_id)).text.splitlines()]
    found = {line["custom_id"]: line["response"] for line in lines}
    assert len(found) == len(lines), "an answer comes twice"
    return found


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches_module, "RETRY_SECONDS", 0.01)


def test_each_line_is_answered(tmp_path: Path) -> None:
    names = [f"line {number} é" for number in range(30)]
    bad = [line_of("stream", stream=True), line_of("field", unknown=1), line_of("other", model="o")]

    async def ask(client: openai.AsyncOpenAI) -> Any:
        content = file_of(*map(line_of, names), *bad)
        batch = await begin(client, content)
        assert batch.status == "validating" and batch.metadata == {"a": "b"}
        batch = await until_end(client, batch.id)
        uploaded = (await client.files.content(batch.input_file_id)).content
        assert uploaded == content and [item.id async for item in client.batches.list()] == [batch.id]
        return batch, await results(client, batch.output_file_id), await results(client, batch.error_file_id)

    engine = Echoing(busy=5)
    batch, good, wrong = served(tmp_path, engine, ask)
    counts = batch.request_counts
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 33, 30, 3)
    contents = {name: answer["body"]["choices"][0]["message"]["content"] for name, answer in good.items()}
    assert contents == {name: name for name in names}
    assert {name: answer["status_code"] for name, answer in wrong.items()} == {"stream": 400, "field": 400, "other": 404}
    assert "unknown is not possible here" in wrong["field"]["body"]["error"]["message"]
    assert sorted(engine.prompts) == sorted([*names, *engine.prompts[:5]]), "the busy engine was asked again"


def test_a_server_that_starts_again_goes_on(tmp_path: Path) -> None:
    async def start(client: openai.AsyncOpenAI) -> Any:
        batch = await begin(client, file_of(*(line_of(name) for name in ("a", "b", "stuck", "c"))))
        return await until(client, batch.id, lambda batch: batch.request_counts.completed == 3)

    unfinished = served(tmp_path, Echoing("stuck"), start)
    assert unfinished.status == "in_progress"
    output = tmp_path / f"{unfinished.output_file_id}.jsonl"
    whole = output.read_bytes()
    output.write_bytes(whole[: whole.rindex(b"\n", 0, -1) + 9])  # the last answer was not written to its end
    torn = json.loads(whole.splitlines()[-1])["custom_id"]

    async def wait(client: openai.AsyncOpenAI) -> Any:
        batch = await until_end(client, unfinished.id)
        return batch, await results(client, batch.output_file_id)

    engine = Echoing()
    batch, good = served(tmp_path, engine, wait)
    assert (batch.status, batch.request_counts.completed, batch.error_file_id) == ("completed", 4, None)
    assert set(good) == {"a", "b", "c", "stuck"} and sorted(engine.prompts) == sorted({torn, "stuck"})


def test_a_batch_that_is_cancelled(tmp_path: Path) -> None:
    async def ask(client: openai.AsyncOpenAI) -> Any:
        batch = await begin(client, file_of(line_of("a"), line_of("stuck")))
        await until(client, batch.id, lambda batch: batch.request_counts.completed == 1)
        with pytest.raises(openai.BadRequestError, match="cancel the batch first"):
            await client.files.delete(batch.input_file_id)
        cancelled = await client.batches.cancel(batch.id)
        with pytest.raises(openai.BadRequestError, match="is cancelled already"):
            await client.batches.cancel(batch.id)
        deleted = await client.files.delete(batch.input_file_id)
        with pytest.raises(openai.NotFoundError, match="is not here"):
            await client.files.retrieve(batch.input_file_id)
        return cancelled, deleted.deleted, await results(client, cancelled.output_file_id)

    cancelled, is_deleted, good = served(tmp_path, Echoing("stuck"), ask)
    assert cancelled.status == "cancelled" and cancelled.cancelled_at and is_deleted and set(good) == {"a"}


WRONG_LINES: list[tuple[bytes, int | None, str]] = [
    (b"", None, "has no requests"),
    (b"[]\n", 1, "the line is an array"),
    (b"\n{", 2, "the line is not JSON"),
    (file_of({"custom_id": 1, "body": {}}), 1, "has no custom_id"),
    (file_of(line_of("a"), line_of("a")), 2, "was in an earlier line"),
    (file_of({**line_of("a"), "url": "/v1/completions"}), 1, "and the batch for POST /v1/chat/completions"),
    (file_of({**line_of("a"), "method": "GET"}), 1, "GET"),
]


@pytest.mark.parametrize(("content", "line", "words"), WRONG_LINES)
def test_lines_that_are_no_requests(content: bytes, line: int | None, words: str, tmp_path: Path) -> None:
    async def ask(client: openai.AsyncOpenAI) -> Any:
        return await until_end(client, (await begin(client, content)).id)

    engine = Echoing()
    batch = served(tmp_path, engine, ask)
    assert batch.status == "failed" and not engine.requests
    assert batch.errors.data[0].line == line and words in batch.errors.data[0].message


def test_what_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text("{}")

    async def ask(client: openai.AsyncOpenAI) -> Any:
        with pytest.raises(openai.BadRequestError, match="is not here; send it"):
            await client.batches.create(input_file_id="file-x", endpoint=CHATS, completion_window="24h")
        with pytest.raises(openai.BadRequestError, match="endpoint"):
            await begin(client, file_of(line_of("a")), "/v1/other")
        with pytest.raises(openai.BadRequestError, match="purpose 'vision'"):
            await client.files.create(file=("a", b"x"), purpose="vision")
        for id in ("secret", "..%2fsecret", "file-" + "0" * 32):
            with pytest.raises(openai.NotFoundError):
                await client.files.retrieve(id)
        plain = await client._client.post("http://m/v1/files", content=b"x", headers={"content-type": "text/plain"})
        page = {"content-type": "multipart/form-data; boundary=b", "origin": "http://elsewhere"}
        form = await client._client.post("http://m/v1/files", content=b"--b--", headers=page)
        del page["origin"]
        empty = await client._client.post("http://m/v1/files", content=b"--b--", headers=page)
        return plain, form, empty, await client.batches.list()

    plain, form, empty, listed = served(tmp_path, Echoing(), ask)
    assert (plain.status_code, form.status_code, empty.status_code, listed.data) == (400, 415, 400, [])
    assert "no form with purpose and file" in empty.text


class Ending(Echoing):
    """An engine that fails for good at a prompt."""

    async def pieces(self, request: Generate) -> Any:
        chat: Any = request.prompt
        if chat[0]["content"] in self.stops:
            raise KeyboardInterrupt
        async for piece in super().pieces(request):
            yield piece


def offline_line(name: str, **body: Any) -> dict[str, Any]:
    return line_of(name, **{"model": "tiny", **body})


def test_a_file_without_a_server(tmp_path: Path, upshift: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same lines; a run that was interrupted goes on."""
    write_models(tmp_path)
    names = [str(number) for number in range(7)]
    prompts, output = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    embeddings = {"custom_id": "e", "method": "POST", "url": "/v1/embeddings", "body": {"model": "tiny", "input": "x"}}
    prompts.write_bytes(file_of(*map(offline_line, names), offline_line("bad", max_tokens=-1), embeddings))
    monkeypatch.setattr(offline_batch, "BLOCK_LINES", 3)
    asked = ("generate", tmp_path / "tiny", "--prompts", prompts, "--output", output, "--format", "openai-batch", "--json")
    engines = [Ending("4"), Echoing(busy=2)]
    monkeypatch.setattr(offline_batch, "ReplicaSet", lambda request: of_several(engines[0]))
    assert upshift(*asked).code == 130 and not output.exists()
    engines.pop(0)
    answer = upshift(*asked)
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    assert (found["requests"], found["generated"], found["failed"]) == (9, 6, 2)
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == [*names, "bad", "e"]
    bodies = [line["response"]["body"] for line in lines]
    assert [body["choices"][0]["message"]["content"] for body in bodies[:7]] == names
    assert "max_tokens" in bodies[7]["error"]["message"] and "answers at" in bodies[8]["error"]["message"]
    assert set(engines[0].prompts) == {"3", "4", "5", "6"}


def test_files_without_a_server_that_are_wrong(tmp_path: Path, upshift: Command) -> None:
    write_models(tmp_path)
    prompts, output = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    asked = ("generate", tmp_path / "tiny", "--prompts", prompts, "--output", output, "--format", "openai-batch")
    other = {**offline_line("b"), "url": "/v1/other"}
    for content, more, words in (
        (file_of(offline_line("a"), other), (), "requests.jsonl line 2: the line asks for POST '/v1/other'"),
        (file_of(line_of("a")), (), "asks for the model 'm'; write 'tiny' in each line"),
        (file_of(offline_line("a")), ("--seed", 0), "--seed is not possible with --format openai-batch"),
        (file_of(offline_line("a")), ("--chat",), "--chat is not possible"),
        (file_of(offline_line("a")), ("--backend", "xla"), "--backend is not possible"),
    ):
        prompts.write_bytes(content)
        answer = upshift(*asked, *more)
        assert answer.code == 2 and words in answer.err, answer.err


def test_one_server_at_a_time_holds_a_folder(tmp_path: Path) -> None:
    with holding(tmp_path), pytest.raises(RequestError, match="another"), holding(tmp_path):
        pass
    with holding(tmp_path):
        pass


def test_a_server_without_a_folder() -> None:
    async def ask() -> httpx2.Response:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app_of(Echoing())[0]), base_url="http://m") as client:
            return await client.get("/v1/batches")

    answer = asyncio.run(ask())
    assert answer.status_code == 403 and "--batch-folder" in answer.text
