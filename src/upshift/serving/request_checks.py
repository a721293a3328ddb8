"""Check requests before the application reads them, then log and count them.

The checks are the API key, the size of the body, the upload rate, and that the body is a JSON object in UTF-8. The log has one
line per request, without the request's text."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote

from upshift.serving.metrics import Metrics
from upshift.serving.refusals import FAULT, Refusal, error_response

logger = logging.getLogger(__name__)

PUBLIC_PATHS = ("/", "/health", "/ping", "/docs", "/openapi.json")  # no API key is needed
MAX_DEPTH = 200  # of nested objects and lists
FILES_PATH = "/v1/files"  # whose uploads are forms
FORM_TYPE = b"multipart/form-data"
JSON_TYPE = (b"content-type", b"application/json")
REQUEST_ID = re.compile(rb"[!-~]{1,128}")  # a request id of a client that is safe in a log
TYPE_NAMES = {
    list: "an array",
    str: "a text",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


@dataclass(frozen=True)
class Limits:
    """The limits of requests, and the API keys of clients. Without keys, everybody may send requests.

    Clients may load adapters from ``adapter_folder``, and their batches are kept in ``batch_folder``. None allows neither."""

    request_seconds: float = 600.0
    body_bytes: int = 4 * 2**20
    body_seconds: float = 30.0
    header_seconds: float = 10.0  # of a request, from the beginning of its connection or from the answer before it
    header_bytes: int = 2**16
    connections: int = 1024  # beyond them, requests get status 503
    send_seconds: float = 10.0  # beyond request_seconds, in which the client must have read the answer
    keys: tuple[str, ...] = ()
    adapter_folder: Path | None = None
    batch_folder: Path | None = None


class BodyTooLarge(Exception):
    pass


class Guard:
    """An ASGI middleware that checks requests before the application reads them, logs them and counts them.

    ``paths`` are the paths that the metrics count by name. All other paths are counted together."""

    def __init__(self, app: Any, limits: Limits, metrics: Metrics, paths: frozenset[str]) -> None:
        self._app = app
        self._limits = limits
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        request_id = read_request_id(scope)
        status = 0  # as long as no answer was begun

        async def send_with_id(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                ids = [(b"x-request-id", request_id), (b"request-id", request_id)]  # OpenAI's name, and Anthropic's
                message = {**message, "headers": [*message["headers"], *ids]}
            await send(message)

        try:
            await self._check_and_run(scope, receive, send_with_id)
        except Exception as error:  # of any type: a fault of the server
            logger.error("request %s failed", request_id.decode(), exc_info=error)
            if status:
                status = FAULT.status
                raise
            await error_response(FAULT, route_path(scope))(scope, receive, send_with_id)
        finally:
            seconds = time.perf_counter() - start
            logger.info("%s %s %s %s %.3f s", request_id.decode(), scope["method"], quote(scope["path"]), status, seconds)
            path = route_path(scope)
            self._metrics.requests.labels(path if path in self._paths else "other", str(status)).inc()

    async def _check_and_run(self, scope: Any, receive: Any, send: Any) -> None:
        refusal = self._check_headers(scope)
        if refusal is not None:
            await error_response(refusal, route_path(scope))(scope, receive, send)
        else:
            await self._check_body_and_run(scope, receive, send)

    def _check_headers(self, scope: Any) -> Refusal | None:
        """Return a refusal if the API key is missing or wrong, or if the headers or the announced body are too large."""
        limits = self._limits
        if sum(len(name) + len(value) for name, value in scope["headers"]) > limits.header_bytes:
            return Refusal(431, f"the headers are larger than {limits.header_bytes:,} bytes")
        headers = dict(scope["headers"])
        if limits.keys and route_path(scope) not in PUBLIC_PATHS:
            client_key = read_key(headers)
            # Compare with every key, in constant time, so that the time does not depend on the key.
            matches = [hmac.compare_digest(client_key, key.encode()) for key in limits.keys]
            if not any(matches):
                return Refusal(401, "send a key that this server knows: Authorization: Bearer KEY, or x-api-key: KEY")
        size = headers.get(b"content-length", b"0")
        if size.isdigit() and int(size) > limits.body_bytes:
            return _refuse_size(limits.body_bytes)
        return None

    async def _check_body_and_run(self, scope: Any, receive: Any, send: Any) -> None:
        """Read the whole body before the application runs, so that a body that is too large or too slow never reaches
        an address."""
        limits = self._limits
        path = route_path(scope)
        try:
            async with asyncio.timeout(limits.body_seconds):
                body = await _read_body(receive, limits.body_bytes)
        except BodyTooLarge:
            await error_response(_refuse_size(limits.body_bytes), path)(scope, receive, send)
            return
        except TimeoutError:
            refusal = Refusal(408, f"the body did not come within {limits.body_seconds:g} s")
            await error_response(refusal, path)(scope, receive, send)
            return
        if body is None:  # the client has disconnected
            return
        if path in self._paths and takes_body(scope):
            is_upload = path == FILES_PATH
            problem = check_upload(scope) if is_upload else check_body(scope, body)
            if problem is not None:
                await error_response(problem, path)(scope, receive, send)
                return
            scope = scope if is_upload else mark_as_json(scope)
        await self._run(scope, body, receive, send)

    async def _run(self, scope: Any, body: bytes, receive: Any, send: Any) -> None:
        """Run the application until it has answered the request, the client disconnects, or the client has not read the answer
        in time."""
        disconnected = asyncio.Event()
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_body() -> Any:
            if messages:
                return messages.pop()
            await disconnected.wait()
            return {"type": "http.disconnect"}

        async def watch_connection() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            disconnected.set()

        answer_task = asyncio.create_task(self._app(scope, receive_body, send))
        watch_task = asyncio.create_task(watch_connection())
        try:
            seconds = self._limits.request_seconds + self._limits.send_seconds
            await asyncio.wait({answer_task, watch_task}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if not answer_task.done():
                answer_task.cancel()
                await asyncio.wait({answer_task})
            if not answer_task.cancelled():
                answer_task.result()
        finally:
            watch_task.cancel()
            answer_task.cancel()


class RootPath:
    """An ASGI middleware for a server that a proxy offers under the path ``prefix``, such as /llm.

    Some proxies remove the prefix from the path of a request, and some leave it there."""

    def __init__(self, app: Any, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            has_prefix = scope["path"].startswith(self._prefix + "/")
            path = scope["path"] if has_prefix else self._prefix + scope["path"]
            scope = {**scope, "root_path": self._prefix, "path": path}
        await self._app(scope, receive, send)


def route_path(scope: Any) -> str:
    """Return the path of a request without the prefix of ``RootPath``, as the application's routes have it."""
    path: str = scope["path"]
    prefix: str = scope.get("root_path", "")
    return path[len(prefix) :] if prefix and path.startswith(prefix + "/") else path


def read_key(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the API key of a request, as OpenAI's clients or as Anthropic's send it, or an empty text."""
    scheme, _, bearer_key = headers.get(b"authorization", b"").partition(b" ")
    return bearer_key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"").strip()


def read_request_id(scope: Any) -> bytes:
    """Return the client's x-request-id, or a new one if the client sends none that is safe in a log."""
    request_id: bytes = dict(scope["headers"]).get(b"x-request-id", b"")
    return request_id if REQUEST_ID.fullmatch(request_id) else uuid.uuid4().hex.encode()


async def _read_body(receive: Any, max_bytes: int) -> bytes | None:
    """Return the body of a request, or None if the client disconnects. Raise BodyTooLarge above ``max_bytes``."""
    chunks = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > max_bytes:
            raise BodyTooLarge
        if not message.get("more_body"):
            return b"".join(chunks)


def _refuse_size(max_bytes: int) -> Refusal:
    return Refusal(413, f"the body is larger than {max_bytes:,} bytes")


def takes_body(scope: Any) -> bool:
    """Return whether the request is for an address that reads a body."""
    return bool(scope["method"] == "POST")


def check_upload(scope: Any) -> Refusal | None:
    """Return a refusal if the body is not a form, or comes from a web page, which may send a form without permission."""
    headers = dict(scope["headers"])
    media_type = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    if media_type != FORM_TYPE:
        return Refusal(400, f"a file is sent as multipart/form-data, not as {_quote_header(media_type)}; use curl -F file=@FILE")
    return Refusal(415, "a web page cannot send files here; send them from a program") if b"origin" in headers else None


def check_body(scope: Any, body: bytes) -> Refusal | None:
    """Return a refusal if the body is not a JSON object in UTF-8. Return None if it is.

    ``curl -d`` names every body a form. As with other OpenAI-compatible servers, such a body is read as JSON. From a
    browser, the header must name JSON: a page of another site may send a form, or a body without a type, without permission,
    but not JSON."""
    headers = dict(scope["headers"])
    encoding = headers.get(b"content-encoding", b"identity").strip().lower()
    if encoding not in (b"", b"identity"):
        return Refusal(415, f"a body with Content-Encoding {_quote_header(encoding)} is not read here; send it as it is")
    media_type = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    is_json = media_type == b"application/json" or (media_type.startswith(b"application/") and media_type.endswith(b"+json"))
    if not is_json and b"origin" in headers:
        return Refusal(415, f"a browser's body is read as application/json alone, not as {_quote_header(media_type)}")
    problem = find_content_problem(body)
    return None if problem is None else Refusal(400, f"{problem}; send a JSON object in UTF-8")


def mark_as_json(scope: Any) -> Any:
    """Return the scope of the same request with the content type of JSON."""
    headers = [(name, value) for name, value in scope["headers"] if name.lower() != JSON_TYPE[0]]
    return {**scope, "headers": [*headers, JSON_TYPE]}


def find_content_problem(body: bytes) -> str | None:
    """Return why the body is not a JSON object that can be read, or None."""
    if not body.strip():
        return "the body is empty"
    try:
        document = json.loads(body.decode("utf-8"), parse_constant=_reject_constant)
    except UnicodeDecodeError:
        return "the body is not UTF-8"
    except RecursionError:
        return "the body is nested too deeply"
    except json.JSONDecodeError as error:
        return f"the body is not JSON ({error})"
    except ValueError as error:  # NaN, or a number with thousands of digits
        return f"the body has a number that is not possible ({str(error).partition(';')[0]})"
    if not isinstance(document, dict):
        return f"the body is {TYPE_NAMES[type(document)]}"
    return "the body is nested too deeply" if _is_too_deep(document) else None


def _is_too_deep(document: Any) -> bool:
    """Return whether objects and lists are nested more than MAX_DEPTH levels deep."""
    level = [document]
    for _ in range(MAX_DEPTH):
        items: list[Any] = []
        for container in level:
            items += container.values() if isinstance(container, dict) else container
        level = [item for item in items if isinstance(item, dict | list)]
        if not level:
            return False
    return True


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _quote_header(value: bytes) -> str:
    return ascii(value.decode("latin-1"))[:100]
