"""End connections whose headers are too large or do not come, before they take the places of other clients.

Uvicorn waits for headers without end, and for the rest of a body after it has answered. Its own limit of connections answers in
plain text, which clients of an API do not read."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from upshift.internals.uvicorn_names import CYCLE, CYCLE_SCOPE, HTTP_PROTOCOL, RESPONSE_COMPLETE, SCOPE
from upshift.serving.refusals import RETRY_SECONDS, Refusal, error_response
from upshift.serving.request_checks import route_path

STATUS_LINES = {408: b"HTTP/1.1 408 Request Timeout\r\n", 431: b"HTTP/1.1 431 Request Header Fields Too Large\r\n"}


class LimitedConnection(asyncio.Protocol):
    """A connection of uvicorn that ends if a request's headers need longer than ``header_seconds``, or more than
    ``header_bytes``. ``connections`` has those that are open.

    The rest of a body that comes after the answer, such as one that was too large, has as much time, and is dropped."""

    def __init__(self, *, header_seconds: float, header_bytes: int, connections: set[LimitedConnection], **settings: Any) -> None:
        self._connections = connections
        self._http = HTTP_PROTOCOL.get()(**settings)
        self._header_seconds = header_seconds
        self._header_bytes = header_bytes
        self._received_bytes = 0  # since the last request
        self._transport: Any = None
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._connections.add(self)
        self._http.connection_made(transport)
        self._start_deadline()

    def data_received(self, data: bytes) -> None:
        self._http.data_received(data)
        if self._is_answering:
            self._stop_deadline()
            self._received_bytes = 0
            return
        if not self._is_dropping_body:
            self._received_bytes += len(data)
        if self._deadline is None:
            self._start_deadline()
        if self._received_bytes > self._header_bytes:
            self._refuse(Refusal(431, f"the headers are larger than {self._header_bytes:,} bytes"))

    def eof_received(self) -> bool | None:
        ends: bool | None = self._http.eof_received()
        return ends

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        self._connections.discard(self)
        self._http.connection_lost(exc)

    def pause_writing(self) -> None:
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._http.resume_writing()

    @property
    def _is_answering(self) -> bool:
        """Return whether the headers of a request have come whose answer is not complete."""
        cycle = CYCLE.of(self._http)
        return cycle is not None and not RESPONSE_COMPLETE.of(cycle)

    @property
    def _is_dropping_body(self) -> bool:
        """Return whether what comes is still of the request that was answered: the headers of the next one have not begun."""
        cycle = CYCLE.of(self._http)
        return cycle is not None and SCOPE.of(self._http) is CYCLE_SCOPE.of(cycle)

    def _start_deadline(self) -> None:
        self._deadline = asyncio.get_running_loop().call_later(self._header_seconds, self._end_wait)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end_wait(self) -> None:
        self._deadline = None
        if not self._is_answering:
            self._refuse(Refusal(408, f"the headers did not come within {self._header_seconds:g} s"))

    def _refuse(self, refusal: Refusal) -> None:
        """Send an answer in OpenAI's form, and close the connection. An answer of before was sent already."""
        self._stop_deadline()
        if self._transport.is_closing():
            return
        if CYCLE.of(self._http) is None:
            self._transport.write(_write_answer(refusal))
        self._transport.close()


class ConnectionLimit:
    """An ASGI application that answers 503 while there are more than ``limit`` open connections."""

    def __init__(self, app: Any, limit: int, connections: set[LimitedConnection]) -> None:
        self._app = app
        self._limit = limit
        self._connections = connections

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or len(self._connections) <= self._limit:
            await self._app(scope, receive, send)
            return
        reason = f"{self._limit:,} connections are open already, and there may be no more; try again in a moment"
        response = error_response(Refusal(503, reason, retry_after=RETRY_SECONDS), route_path(scope))
        response.headers["Connection"] = "close"
        await response(scope, receive, send)


def _write_answer(refusal: Refusal) -> bytes:
    """Return a whole HTTP answer, after which the connection ends."""
    body = json.dumps(refusal.body()).encode()
    headers = b"content-type: application/json\r\nconnection: close\r\ncontent-length: " + str(len(body)).encode()
    return STATUS_LINES[refusal.status] + headers + b"\r\n\r\n" + body
