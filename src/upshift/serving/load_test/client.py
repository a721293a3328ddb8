"""Send one request, and time its first text and its last."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx2
from pydantic import BaseModel, ValidationError

from upshift.value import Value

MOST_WORDS = 200  # of what a server says


class Counts(BaseModel):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Event(BaseModel):
    """One event of a streamed answer. Fields that only some servers send are ignored."""

    choices: list[Any] | None = None
    usage: Counts | None = None
    error: Any = None


class Asked(Value):
    """A request that was sent. ``status`` is that of HTTP, or 0 if the connection failed. Seconds count from the time
    when the request was due."""

    status: int
    due: float
    first_seconds: float | None = None
    seconds: float
    tokens: int = 0
    prompt_tokens: int = 0
    retry_after: bool = False
    why: str = ""

    @property
    def done(self) -> bool:
        return self.status == 200 and not self.why

    @property
    def token_seconds(self) -> float | None:
        """Return the mean seconds of a further token, or None without a first text and a second token."""
        if self.first_seconds is None or self.tokens < 2:
            return None
        return (self.seconds - self.first_seconds) / (self.tokens - 1)


async def ask(client: httpx2.AsyncClient, model: str, prompt: str, max_tokens: int, *, due: float, start: float) -> Asked:
    """Send a request that is due ``due`` seconds after ``start`` (of ``time.perf_counter``), and time its answer. The
    due time may be past: the delay counts."""
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "stream": True, "stream_options": {"include_usage": True}}
    told: dict[str, Any] = {"status": 0, "due": due}
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            told |= {"status": answer.status_code, "retry_after": "retry-after" in answer.headers}
            if answer.status_code != 200:
                told["why"] = _reason(await answer.aread())
            else:
                await _follow(answer, told, start + due)
    except httpx2.HTTPError as error:
        told |= {"status": 0, "why": f"{type(error).__name__}: {error}"}
    return Asked(**told, seconds=time.perf_counter() - start - due)


async def _follow(answer: httpx2.Response, told: dict[str, Any], start: float) -> None:
    events = 0
    async for line in answer.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            break
        try:
            said = Event.model_validate_json(data)
        except ValidationError:
            told["why"] = f"an event is not of OpenAI's form: {data[:MOST_WORDS]}"
            return
        if said.error is not None:
            told["why"] = _reason(data.encode())
            return
        if said.choices:
            events += 1
            told.setdefault("first_seconds", time.perf_counter() - start)
        if said.usage is not None:
            counted = said.usage.model_dump(exclude_none=True)
            told |= {"tokens": counted.get("completion_tokens", 0), "prompt_tokens": counted.get("prompt_tokens", 0)}
    told["tokens"] = told.get("tokens") or events  # servers that do not count send a token an event


def _reason(body: bytes) -> str:
    """Return the error's message in OpenAI's form, or else the body as text."""
    try:
        said = json.loads(body)["error"]
        return str(said["message"] if isinstance(said, dict) else said)[:MOST_WORDS]
    except (ValueError, KeyError, TypeError):
        return body[:MOST_WORDS].decode(errors="replace") or "it says nothing"
