"""Check the API key, the body size and the upload rate before a request is read. Afterwards log a line without the
request's text, and count the request."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from upshift.serving.bodies import as_json, problem_of, takes_body
from upshift.serving.metrics import Metrics
from upshift.serving.refusals import Refusal, answer_of

logger = logging.getLogger(__name__)
OPEN = ("/", "/health", "/docs", "/openapi.json")  # without a key


@dataclass(frozen=True)
class Limits:
    """The limits of requests, and the ``keys`` of clients. Without keys, everybody may send requests."""

    request_seconds: float = 600.0
    body_bytes: int = 4 * 2**20
    body_seconds: float = 30.0
    keys: tuple[str, ...] = ()


class TooLarge(Exception):
    pass


class Guard:
    """An ASGI middleware that guards the server. Metrics count ``paths`` by their names, and all others as one."""

    def __init__(self, app: Any, limits: Limits, metrics: Metrics, paths: frozenset[str]) -> None:
        self._app = app
        self._limits = limits
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.perf_counter(), 0

        async def sent(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        found = self._refused(scope)
        if found is not None:
            await answer_of(found)(scope, receive, sent)
        else:
            await self._pass(scope, receive, sent)
        seconds = time.perf_counter() - start
        logger.info("%s %s %s %.3f s", scope["method"], quote(scope["path"]), status, seconds)
        path = scope["path"] if scope["path"] in self._paths else "other"
        self._metrics.requests.labels(path, str(status)).inc()

    def _refused(self, scope: Any) -> Refusal | None:
        limits, headers = self._limits, dict(scope["headers"])
        if limits.keys and scope["path"] not in OPEN:
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            same = [hmac.compare_digest(given.strip(), key.encode()) for key in limits.keys]
            if scheme.lower() != b"bearer" or not any(same):
                return Refusal(401, "send a key that this server knows: Authorization: Bearer KEY")
        size = headers.get(b"content-length", b"0")
        if size.isdigit() and int(size) > limits.body_bytes:
            return _too_large(limits.body_bytes)
        return None

    async def _pass(self, scope: Any, receive: Any, send: Any) -> None:
        """Read the whole body here, so that a body that is too large or too slow never reaches an address."""
        limits = self._limits
        try:
            async with asyncio.timeout(limits.body_seconds):
                body = await _read(receive, limits.body_bytes)
        except TooLarge:
            await answer_of(_too_large(limits.body_bytes))(scope, receive, send)
            return
        except TimeoutError:
            await answer_of(Refusal(408, f"the body did not come within {limits.body_seconds:g} s"))(scope, receive, send)
            return
        if body is None:  # it left
            return
        if scope["path"] in self._paths and takes_body(scope):
            problem = problem_of(scope, body)
            if problem is not None:
                await answer_of(problem)(scope, receive, send)
                return
            scope = as_json(scope)
        await self._run(scope, body, receive, send)

    async def _run(self, scope: Any, body: bytes, receive: Any, send: Any) -> None:
        """Run the application until the request is answered, or the client disconnects."""
        gone, messages = asyncio.Event(), [{"type": "http.request", "body": body, "more_body": False}]

        async def read() -> Any:
            if messages:
                return messages.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            gone.set()

        answering, watching = asyncio.create_task(self._app(scope, read, send)), asyncio.create_task(watch())
        try:
            await asyncio.wait({answering, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                answering.cancel()
                await asyncio.wait({answering})
            if not answering.cancelled():
                answering.result()
        finally:
            watching.cancel()
            answering.cancel()


async def _read(receive: Any, most: int) -> bytes | None:
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > most:
            raise TooLarge
        if not message.get("more_body"):
            return b"".join(parts)


def _too_large(most: int) -> Refusal:
    return Refusal(413, f"the body is larger than {most:,} bytes")
