"""Send one request to an OpenAI-compatible server, and time its first text and its last."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx2
from pydantic import BaseModel, ValidationError

from upshift.value import Value

MAX_MESSAGE_CHARACTERS = 200  # of a server's text in our messages


class Counts(BaseModel):
    """The token counts of an answer. Fields that only some servers send are ignored."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Event(BaseModel):
    """One event of a streamed answer. Fields that only some servers send are ignored."""

    choices: list[Any] | None = None
    usage: Counts | None = None
    error: Any = None


class RequestResult(Value):
    """The result of one request.

    ``status`` is the HTTP status, or 0 if the connection failed. ``why`` is the reason of a failure. Seconds count from the
    time when the request was due."""

    status: int
    due: float
    first_seconds: float | None = None
    seconds: float
    tokens: int = 0
    prompt_tokens: int = 0
    retry_after: bool = False
    why: str = ""

    @property
    def is_answered(self) -> bool:
        """Return whether the answer came completely."""
        return self.status == 200 and not self.why

    @property
    def token_seconds(self) -> float | None:
        """Return the mean seconds of a further token, or None without a first text and a second token."""
        if self.first_seconds is None or self.tokens < 2:
            return None
        return (self.seconds - self.first_seconds) / (self.tokens - 1)


async def send_request(
    client: httpx2.AsyncClient, model: str, prompt: str, max_tokens: int, *, due: float, start: float
) -> RequestResult:
    """Send a request, and time its answer.

    The request is due ``due`` seconds after ``start``, by ``time.perf_counter``. If that is past, the delay counts."""
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "stream": True, "stream_options": {"include_usage": True}}
    fields: dict[str, Any] = {"status": 0, "due": due}
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            fields |= {"status": response.status_code, "retry_after": "retry-after" in response.headers}
            if response.status_code != 200:
                fields["why"] = error_message(await response.aread())
            else:
                await _read_events(response, fields, start + due)
    except httpx2.HTTPError as error:
        fields |= {"status": 0, "why": f"{type(error).__name__}: {error}"}
    return RequestResult(**fields, seconds=time.perf_counter() - start - due)


async def _read_events(response: httpx2.Response, fields: dict[str, Any], start: float) -> None:
    """Read the events of an answer, and set the result's ``fields``."""
    events_with_text = 0
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            break
        try:
            event = Event.model_validate_json(data)
        except ValidationError:
            fields["why"] = f"an event is not of OpenAI's form: {data[:MAX_MESSAGE_CHARACTERS]}"
            return
        if event.error is not None:
            fields["why"] = error_message(data.encode())
            return
        if event.choices:
            events_with_text += 1
            fields.setdefault("first_seconds", time.perf_counter() - start)
        if event.usage is not None:
            counts = event.usage.model_dump(exclude_none=True)
            fields |= {"tokens": counts.get("completion_tokens", 0), "prompt_tokens": counts.get("prompt_tokens", 0)}
    fields["tokens"] = fields.get("tokens") or events_with_text  # servers that do not count send one token per event


def error_message(body: bytes) -> str:
    """Return the error's message in OpenAI's form, or else the body as text."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:MAX_MESSAGE_CHARACTERS]
    except (ValueError, KeyError, TypeError):
        return body[:MAX_MESSAGE_CHARACTERS].decode(errors="replace") or "it says nothing"
