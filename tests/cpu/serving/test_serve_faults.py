"""Clients that leave, stop reading or send little, engines that fail or are unloaded: what each of them leaves behind."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import signal
from typing import Any

import httpx2
import numpy as np
import pytest
from test_serve_bodies import GOOD
from test_serve_engines import PROCESS, embedded, with_process
from test_serving_parts import Asleep, Counted, of_several

from upshift.errors import JobFailed, NothingFits, RequestError
from upshift.serving.app import Server, choice_seed, make_app
from upshift.serving.engine.main import hide_server, write_line
from upshift.serving.engine.warmup import WARMUP_TOKENS, rows_that_fit
from upshift.serving.engine_process import EngineDied, EngineProcess
from upshift.serving.load_test.report import load_page_html
from upshift.serving.load_test.run import LoadTest, summarize_phase
from upshift.serving.load_test.traffic import Traffic
from upshift.serving.messages import (
    FROM_ENGINE,
    MAX_LINE_BYTES,
    Embed,
    Failed,
    Generate,
    Heartbeat,
    Piece,
    Ready,
    Refused,
    TokenScore,
    Vector,
)
from upshift.serving.metrics import Metrics
from upshift.serving.model_pool import ModelPool
from upshift.serving.request_checks import Limits
from upshift.serving.server import stopping_on_signals

COMPLETION = {"model": "m", "prompt": "x"}


class Recording(Counted):
    """An engine that keeps what it was asked, and answers as it is told."""

    def __init__(self, pieces: int = 1, error: Exception | None = None) -> None:
        super().__init__()
        self.requests: list[Generate] = []
        self.count, self.error = pieces, error

    async def pieces(self, request: Generate) -> Any:
        self.requests.append(request)
        for number in range(self.count):
            yield Piece(id=1, text="yes", tokens=1, prompt_tokens=1, ending="stop" if number == self.count - 1 else None)
        if self.error is not None:
            raise self.error


def app_of(engine: Any, limits: Limits | None = None) -> tuple[Any, Metrics]:
    metrics = Metrics()
    return make_app(Server(ModelPool({"m": of_several(engine)}, metrics), metrics, limits or Limits())), metrics


def posted(app: Any, *bodies: Any, path: str = "/v1/completions") -> list[httpx2.Response]:
    async def post() -> list[httpx2.Response]:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://m") as client:
            return [await client.post(path, json=body) for body in bodies]

    return asyncio.run(post())


def seeds_of(*bodies: dict[str, Any]) -> list[int]:
    engine = Recording()
    posted(app_of(engine)[0], *(COMPLETION | body for body in bodies))
    return [request.options["seed"] for request in engine.requests]


def test_no_two_texts_share_random_numbers() -> None:
    """Neither choices of one request, nor requests without a seed, nor seeds that lie side by side, nor another start."""
    unseeded = seeds_of({"n": 16}, {"n": 16}, {})
    assert len({*unseeded, *seeds_of({"n": 16})}) == len(unseeded) + 16
    beside = seeds_of({"n": 16, "seed": 7}, {"n": 16, "seed": 8})
    assert len(set(beside)) == 32 and (beside[0], beside[16]) == (7, 8)
    assert beside[:16] == seeds_of({"n": 16, "seed": 7})
    assert all(0 <= choice_seed(seed, index) < 2**63 for seed in (-1, 0, 2**64, 10**300) for index in range(3))


class Loading(Asleep):
    """An engine that starts when it is told to."""

    def __init__(self, size: int, error: Exception | None = None) -> None:
        super().__init__(size)
        self.go, self.error = asyncio.Event(), error

    async def start(self) -> Ready:
        self.state = "starting"
        await self.go.wait()
        if self.error is not None:
            self.state = "failed"
            raise self.error
        return await super().start()


async def leave(pool: ModelPool, name: str) -> None:
    """Ask for a model, and leave while it is loaded."""

    async def ask() -> None:
        async with pool.using(name):
            pass

    asking = asyncio.create_task(ask())
    await asyncio.sleep(0.01)
    asking.cancel()
    await asyncio.wait({asking})


def test_a_load_goes_on_when_its_client_leaves() -> None:
    """It is not begun twice, and makes room as always when the model turns out to be larger."""

    async def use() -> None:
        engines: dict[str, Any] = {"a": Asleep(10), "b": Loading(12)}
        pool = ModelPool(engines, Metrics(), sizes={"a": 10, "b": 5}, memory_bytes=20)
        async with pool.using("a"):
            pass
        await leave(pool, "b")
        await leave(pool, "b")
        assert engines["b"].state == "starting"
        engines["b"].go.set()
        async with pool.using("b"):
            assert engines["b"].starts == 1
            assert (engines["a"].state, pool.sizes["b"]) == ("asleep", 12), "the second look at the memory was not left out"
        await pool.stop()

    asyncio.run(use())


def test_the_end_of_the_server_ends_its_loads(caplog: pytest.LogCaptureFixture) -> None:
    async def use() -> None:
        engines: dict[str, Any] = {"b": Loading(12)}
        pool = ModelPool(engines, Metrics())
        await leave(pool, "b")
        waiting = asyncio.ensure_future(pool._wait_for_load("b"))
        await asyncio.sleep(0.01)
        await pool.stop()
        with pytest.raises(JobFailed, match="the server stops"):
            await waiting
        assert engines["b"].state == "asleep" and not pool._loads

    asyncio.run(use())
    assert not caplog.records


def test_a_load_that_fails_after_its_client_left_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def use() -> None:
        engine: Any = Loading(12, JobFailed("no disk"))
        pool = ModelPool({"b": engine}, Metrics())
        await leave(pool, "b")
        engine.go.set()
        await asyncio.sleep(0.01)

    asyncio.run(use())
    assert [record.getMessage() for record in caplog.records] == ["b could not be loaded: no disk"]


@pytest.mark.parametrize("kind", [JobFailed, NothingFits, RequestError])
def test_a_client_is_not_told_the_servers_options(kind: type[Exception], caplog: pytest.LogCaptureFixture) -> None:
    """A model that cannot be loaded is no fault of the client who asked for it."""

    async def ask() -> httpx2.Response:
        engine: Any = Loading(12, kind("/srv/m wants --max-memory"))
        engine.go.set()
        app = make_app(Server(ModelPool({"m": engine}, Metrics()), Metrics()))
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://m") as client:
            return await client.post("/v1/completions", json=COMPLETION)

    answer = asyncio.run(ask())
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "m could not be loaded; the server's log says why")
    assert "/srv/m wants --max-memory" in caplog.text


def test_an_engine_that_failed_takes_room_when_it_starts_again() -> None:
    async def use() -> None:
        engines: dict[str, Any] = {"a": Asleep(10), "b": Asleep(15)}
        pool = ModelPool(engines, Metrics(), sizes={"a": 10, "b": 15}, memory_bytes=20)
        async with pool.using("a"):
            pass
        engines["b"].state = "failed"
        async with pool.using("b"):
            assert engines["a"].state == "asleep"

    asyncio.run(use())


def test_a_replica_that_restarts_keeps_its_memory_and_promises_nothing() -> None:
    first, second = Counted(), Counted()
    for engine in (first, second):
        engine.ready = engine.ready.changed(capacity=2.0, predicted_capacity=3.0, resident_bytes=5)
        engine.pid, engine.heartbeat = 1, Heartbeat(live=0, waiting=0, resident_bytes=5)
    replicas = of_several(first, second)
    ready = replicas.ready
    assert ready is not None and (ready.capacity, ready.predicted_capacity, ready.rows) == (4.0, 6.0, 8)
    pool = ModelPool({"m": replicas}, Metrics(), sizes={"m": 10})
    second.state, second.heartbeat = "starting", Heartbeat(live=0, waiting=0, resident_bytes=0)
    ready = replicas.ready
    assert ready is not None and (ready.capacity, ready.predicted_capacity, ready.rows) == (2.0, 3.0, 4)
    assert pool._loaded_bytes("m") == 10
    first.state = "starting"
    assert replicas.ready is None


SLOW_END = PROCESS + "import time; time.sleep(0.5)\n"


def test_an_engine_is_asleep_before_its_process_has_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """So that a request that comes meanwhile loads it again, and does not fail."""
    monkeypatch.setattr("test_serve_engines.PROCESS", SLOW_END)

    async def use(engine: EngineProcess) -> None:
        process = engine._process
        stopping = asyncio.create_task(engine.stop())
        await asyncio.sleep(0)
        assert engine.state == "asleep" and process is not None and process.returncode is None
        assert (await engine.start()).rows == 1
        await stopping
        assert process.returncode is not None
        assert await engine.vectors(Embed(texts=("fox",))) == (["AACAPw=="], 1), "the new process was not ended for the old one"

    with_process(monkeypatch, tmp_path, use)


def test_who_waits_for_an_engine_that_is_unloaded_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    async def use(engine: EngineProcess) -> None:
        await engine.stop()
        monkeypatch.setattr("sys.executable", str(program))
        waiting = asyncio.create_task(engine.start())
        await asyncio.sleep(0.05)
        await engine.stop()
        with pytest.raises(EngineDied, match="was unloaded while it started"):
            await asyncio.wait_for(waiting, 5)

    program = tmp_path / "starting"
    program.write_text("#!/bin/sh\ncat > /dev/null\n")
    program.chmod(0o700)
    with_process(monkeypatch, tmp_path, use)


def test_the_warm_up_has_as_many_rows_as_the_cache_holds() -> None:
    prompts = [[1] * 30, [1] * 10]
    assert rows_that_fit(8, None, prompts) == 8
    assert rows_that_fit(8, 50 * 3 + 49, prompts) == 3 and WARMUP_TOKENS == 20
    assert rows_that_fit(2, 10_000, prompts) == 2
    with pytest.raises(NothingFits, match="cache holds 49 tokens.*--prompt-length .*--replicas, or more --max-memory"):
        rows_that_fit(8, 49, prompts)


LONG = "x" * (2 * MAX_LINE_BYTES)
SCORE = TokenScore(spelled=(255,) * 200_000, logprob=-1.0)
OUTGOING: list[Any] = [
    Refused.from_error(1, ValueError(LONG)),
    Refused.from_error(1, RuntimeError(LONG)),
    Refused(id=1, status=429, why=LONG),
    Failed(why="é" * MAX_LINE_BYTES, exit_code=1),
    Piece(id=1, text=LONG, tokens=1, prompt_tokens=1),
    Piece(id=1, text="", tokens=1, prompt_tokens=1, scores=(SCORE, SCORE)),
    Vector(id=1, row=LONG, tokens=1, last=True),
    Piece(id=1, text="\n" * (MAX_LINE_BYTES // 2), tokens=1, prompt_tokens=1),
]


@pytest.mark.parametrize("message", OUTGOING, ids=lambda message: type(message).__name__)
def test_no_line_of_an_engine_is_longer_than_the_server_reads(message: Any) -> None:
    async def read() -> bytes:
        reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        reader.feed_data(write_line(message).encode())
        reader.feed_eof()
        return await reader.readline()

    received = FROM_ENGINE.validate_json(asyncio.run(read()))
    assert getattr(received, "id", 1) == 1 and len(getattr(received, "why", "")) <= 1000


def test_a_client_sees_no_path_of_the_server() -> None:
    refused = Refused(id=1, status=400, why="'/srv/m' (in /srv/m/x): max_new_tokens is too large")
    hidden = hide_server(refused, ["/srv/m"])
    assert isinstance(hidden, Refused) and hidden.why == "the model (in the model/x): max_tokens is too large"


def test_a_refusal_of_a_long_field_is_short() -> None:
    (answer,) = posted(app_of(Recording())[0], COMPLETION | {"x" * 50_000: 1})
    assert answer.status_code == 400 and len(answer.content) < 3000


@pytest.mark.parametrize("headers", [{}, {"content-type": ""}, {"content-type": "text/plain"}])
def test_a_page_of_another_site_cannot_leave_out_the_type(headers: dict[str, str]) -> None:
    async def post() -> httpx2.Response:
        app, _ = app_of(Recording())
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://m") as client:
            content = json.dumps(GOOD["/v1/completions"]).encode()
            return await client.post("/v1/completions", content=content, headers={"origin": "http://elsewhere", **headers})

    assert asyncio.run(post()).status_code == 415


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("pieces", [0, 1, 2])
def test_a_fault_of_the_server_is_counted_and_logged(stream: bool, pieces: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "upshift.serving")
    app, metrics = app_of(Recording(pieces + 1, LookupError("broken")) if pieces else Recording(0, LookupError("broken")))
    (answer,) = posted(app, COMPLETION | {"stream": stream})
    begun = stream and pieces > 0
    assert answer.status_code == (200 if begun else 500) and "its log says how" in answer.text and "broken" not in answer.text
    status = "500 in a stream" if begun else "500"
    assert f'upshift_requests_total{{path="/v1/completions",status="{status}"}} 1.0' in metrics.render().decode()
    assert any(record.exc_info and "broken" in str(record.exc_info[1]) for record in caplog.records)
    assert any("POST /v1/completions" in record.getMessage() for record in caplog.records)


def test_a_stream_is_neither_cached_nor_held_back() -> None:
    (answer,) = posted(app_of(Recording())[0], COMPLETION | {"stream": True})
    assert (answer.headers["cache-control"], answer.headers["x-accel-buffering"]) == ("no-cache", "no")


def test_a_client_that_stops_reading_is_left() -> None:
    """The answer waits for it no longer than a request may take."""
    engine = Recording(1000)
    app, metrics = app_of(engine, Limits(request_seconds=0.1, send_seconds=0.1))
    messages = [{"type": "http.request", "body": json.dumps(COMPLETION | {"stream": True}).encode()}]

    async def receive() -> Any:
        return messages.pop() if messages else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"",
        "headers": [], "http_version": "1.1", "scheme": "http", "server": ("m", 80), "client": ("c", 1), "root_path": "",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
    }  # fmt: skip
    asyncio.run(asyncio.wait_for(app(scope, receive, send), 5))
    assert 'path="/v1/completions",status="200"' in metrics.render().decode()


def test_embeddings_that_would_wait_too_long_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("upshift.serving.engine.embedding.smooth", lambda old, measured: old)
    requests = [Embed(id=number, texts=("a",) * 50) for number in range(4)]
    taken = embedded_with_pace(monkeypatch, requests, text_seconds=0.001, max_ttft_ms=75.0)
    refused = [message for message in taken if isinstance(message, Refused)]
    assert [(message.id, message.status) for message in refused] == [(2, 429), (3, 429)]
    assert refused[0].retry_after == pytest.approx(0.025) and "75 ms" not in refused[0].why


def embedded_with_pace(monkeypatch: pytest.MonkeyPatch, requests: list[Embed], *, text_seconds: float, **more: Any) -> list[Any]:
    from upshift.serving.engine.embedding import EmbeddingWorker

    original = EmbeddingWorker.__init__

    def start(self: EmbeddingWorker, request: Any, **options: Any) -> None:
        original(self, request, **options)
        self.text_seconds = text_seconds

    monkeypatch.setattr(EmbeddingWorker, "__init__", start)
    return embedded(monkeypatch, *requests, **more)[0]


def test_token_ids_are_encoded_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = tuple(ord(letter) - ord("!") for letter in "abc")
    asked = (Embed(id=1, texts=("abc",)), Embed(id=2, texts=(ids, "d", ids)), Embed(id=3, texts=((100,),)))
    monkeypatch.setattr("test_serve_engines.Letters.longest", 5, raising=False)
    messages, _ = embedded(monkeypatch, *asked, Embed(id=4, texts=((1,) * 6,)))
    rows = {(message.id, index): message.row for index, message in enumerate(messages) if isinstance(message, Vector)}
    vectors = [np.frombuffer(base64.b64decode(row), dtype="<f4").tolist() for row in rows.values()]
    assert vectors == [[66.0, 3.0], [66.0, 3.0], [67.0, 1.0], [66.0, 3.0]]
    refused = {message.id: message for message in messages if isinstance(message, Refused)}
    assert set(refused) == {3, 4} and refused[4].code == "context_length_exceeded" and "token 100" in refused[3].why


def test_an_unknown_time_is_not_drawn_as_none_at_all() -> None:
    phase = summarize_phase(2.0, 1.0, [], 100.0)
    test = LoadTest(
        url="http://m",
        model="m",
        traffic=Traffic(),
        promised_ttft_ms=100.0,
        predicted_capacity=None,
        capacity=None,
        phases=(phase,),
    )
    figures = load_page_html(test)
    assert '"p99","y":[null]' in figures.replace(" ", "").replace("&#34;", '"'), figures[:2000]


def test_a_server_that_ended_leaves_no_signal_handlers_behind() -> None:
    """The caller's Ctrl-C would set an event of a loop that is closed."""

    async def serve_until(number: int) -> None:
        stop_requested = asyncio.Event()
        with stopping_on_signals(stop_requested):
            os.kill(os.getpid(), number)
            await asyncio.wait_for(stop_requested.wait(), 10)

    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.run(serve_until(number))
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
