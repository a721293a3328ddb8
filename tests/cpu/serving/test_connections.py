"""Clients that send their headers or bodies slowly, or too much of them, keep no place from others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from test_serving_parts import Counted, of_several

from upshift.serving.app import Server, make_app
from upshift.serving.metrics import Metrics
from upshift.serving.model_pool import ModelPool
from upshift.serving.request_checks import Limits
from upshift.serving.server import Address, make_config

LIMITS = Limits(header_seconds=0.4, header_bytes=2000, body_seconds=0.4, body_bytes=1000, connections=3)
GOOD = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n"
Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


def talk(clients: Callable[[Connect], Awaitable[Any]]) -> Any:
    """Run clients against a server over real sockets -> what they return."""

    async def run() -> Any:
        app = make_app(Server(ModelPool({"m": of_several(Counted())}, Metrics()), Metrics(), LIMITS))
        config = make_config(app, LIMITS, Address())
        config.lifespan = "off"  # there is no engine to stop
        server = uvicorn.Server(config)
        listener = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        listener.close()
        config.port = port
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            return await asyncio.wait_for(clients(lambda: asyncio.open_connection("127.0.0.1", port)), 20)
        finally:
            server.should_exit = True
            await serving

    return asyncio.run(run())


def status(answer: bytes) -> int:
    return int(answer.split()[1])


@pytest.mark.parametrize("begin", [b"", GOOD[:30]], ids=["nothing", "half of the headers"])
def test_headers_that_do_not_come_end_the_connection(begin: bytes) -> None:
    async def client(connect: Connect) -> bytes:
        reader, writer = await connect()
        writer.write(begin)
        return await reader.read()

    answer = talk(client)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert status(answer) == 408 and b"connection: close" in head
    assert json.loads(body)["error"]["message"] == "the headers did not come within 0.4 s"


def test_a_byte_at_a_time_does_not_hold_a_place() -> None:
    """Each byte comes sooner than the limit, in the headers, in a body, and in what follows an answer."""

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        answer = asyncio.create_task(reader.read())
        while not answer.done():
            writer.write(b"a")
            await asyncio.wait({answer}, timeout=0.05)
        return answer.result()

    async def clients(connect: Connect) -> list[bytes]:
        answers = []
        for begin in (b"GET / HTTP/1.1\r\nX: ", HEAD):
            reader, writer = await connect()
            writer.write(begin)
            answers.append(await drip(reader, writer))
        return answers

    of_headers, of_body = talk(clients)
    assert status(of_headers) == 408
    assert status(of_body) == 408 and b"the body did not come within 0.4 s" in of_body


def test_a_connection_is_kept_for_further_requests() -> None:
    async def client(connect: Connect) -> list[int]:
        reader, writer = await connect()
        statuses = []
        for _ in range(3):
            writer.write(GOOD[:20])
            await asyncio.sleep(0.2)  # together longer than the limit of one
            writer.write(GOOD[20:])
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r")[0])
            await reader.readexactly(length)
            statuses.append(status(head))
        return statuses

    assert talk(client) == [200, 200, 200]


@pytest.mark.parametrize(
    ("request_bytes", "code"),
    [
        (b"GET /version HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 3000, 431),
        (b"GET /version HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 3000 + b"\r\nConnection: close\r\n\r\n", 431),
        (b"POST /score HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 1001\r\n\r\n", 413),
        (b"POST /score HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n5DC\r\n" + b" " * 1500, 413),
    ],
    ids=["headers without end", "large headers", "an announced body", "a body in chunks"],
)
def test_what_is_too_large(request_bytes: bytes, code: int) -> None:
    async def client(connect: Connect) -> bytes:
        reader, writer = await connect()
        writer.write(request_bytes)
        return await reader.read()

    assert status(talk(client)) == code


def test_a_body_that_is_refused_can_be_sent_to_its_end() -> None:
    """The client reads why, and uses its connection again; headers without end after it are still cut."""

    async def client(connect: Connect) -> list[int]:
        reader, writer = await connect()
        writer.write(b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: 50000\r\n\r\n")
        statuses = []
        for rest, more in ((b"a" * 50_000, GOOD), (b"", GOOD[:-2] + b"X: " + b"a" * 3000)):
            head = await reader.readuntil(b"\r\n\r\n")
            statuses.append(status(head))
            await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r")[0]))
            writer.write(rest)
            await asyncio.sleep(0.05)  # so that the server reads the rest by itself
            writer.write(more)
        assert await reader.read() == b"", "an answer was sent before"
        return statuses

    assert talk(client) == [413, 200]


def test_more_connections_than_allowed_get_503_until_others_end() -> None:
    async def clients(connect: Connect) -> list[int]:
        silent = [await connect() for _ in range(3)]
        statuses = []
        for pause in (0.0, 0.6):  # after which the silent ones are gone
            await asyncio.sleep(pause)
            reader, writer = await connect()
            writer.write(GOOD.replace(b"Host", b"Connection: close\r\nHost"))
            answer = await reader.read()
            statuses.append(status(answer))
            if status(answer) == 503:
                head, _, body = answer.partition(b"\r\n\r\n")
                assert b"retry-after: 1" in head and json.loads(body)["error"]["message"].startswith("3 connections are open")
        return statuses + [status(await reader.read()) for reader, _ in silent]

    assert talk(clients) == [503, 200, 408, 408, 408]
