"""Bodies that are no request, or not named as JSON: 4xx in OpenAI's form, never 500; JSON is read, whatever it is called."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from functools import cache
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from test_serving_parts import Counted, of_several

from upshift.serving.app import Server, make_app
from upshift.serving.metrics import Metrics
from upshift.serving.model_pool import ModelPool
from upshift.serving.request_checks import Limits

PATHS = (
    "/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/responses", "/v1/responses/input_tokens",
    "/v1/messages", "/v1/messages/count_tokens",
    "/tokenize", "/detokenize", "/v1/files", "/v1/batches", "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
    "/rerank", "/score", "/api/embed",
)  # fmt: skip
GOOD = {
    "/v1/completions": {"model": "m", "prompt": "x"},
    "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "x"}]},
}
DEEP = {"lists": b"[" * 100_000 + b"]" * 100_000, "objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000}
MALFORMED: dict[str, bytes] = {
    "empty": b"",
    "white space": b" \r\n",
    "not UTF-8": b'{"model": "m", "prompt": "\xff\xfe"}',
    "latin-1": '{"model": "m", "prompt": "é"}'.encode("latin-1"),
    "UTF-16": '{"model": "m", "prompt": "x"}'.encode("utf-16"),
    "a form": b"model=m&prompt=x",
    "an array": b"[1, 2]",
    "an array of requests": b'[{"model": "m", "prompt": "x"}]',
    "a text": b'"model"',
    "a number": b"7",
    "null": b"null",
    "true": b"true",
    "cut off": b'{"model": "m", "prompt": ',
    "two objects": b'{"model": "m"}{"prompt": "x"}',
    "NaN": b'{"model": "m", "prompt": "x", "temperature": NaN}',
    "infinity": b'{"model": "m", "prompt": "x", "temperature": -Infinity}',
    "too large a number": b'{"model": "m", "prompt": "x", "temperature": 1e999}',
    "5,000 digits": b'{"model": "m", "prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    "nested lists": b'{"model": "m", "prompt": ' + DEEP["lists"] + b"}",
    "nested objects": b'{"model": "m", "prompt": ' + DEEP["objects"] + b"}",
    "nested at the top": DEEP["lists"],
    "nested somewhat": b'{"model": "m", "prompt": ' + b"[" * 300 + b"]" * 300 + b"}",
    "compressed": gzip.compress(b'{"model": "m", "prompt": "x"}'),
    "half a character": b'{"model": "m", "prompt": "\\ud800"}',
    "a name twice": b'{"model": "m", "prompt": "x", "prompt": 7}',
    "zero bytes": bytes(100),
    "python": b"{'model': 'm', 'prompt': 'x'}",
    "a large one": b'{"model": "m", "prompt": "' + b"x" * 200_000 + b'"}',
}
FORM = "application/x-www-form-urlencoded"
TYPES = (None, "application/json", "application/json; charset=latin-1", FORM, "text/plain", "", "?;=")


@cache
def app_of_all_requests() -> FastAPI:
    """One application, as a server has: to make it takes 90 ms, and thousands of bodies are sent here."""
    metrics = Metrics()
    return make_app(Server(ModelPool({"m": of_several(Counted())}, metrics), metrics, Limits(body_bytes=100_000)))


def asked(path: str, content: Any, headers: dict[str, str]) -> httpx2.Response:
    app = app_of_all_requests()

    async def ask() -> httpx2.Response:
        transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://m") as client:
            return await client.post(path, content=content, headers=headers)

    return asyncio.run(ask())


def check_refused(found: httpx2.Response) -> str:
    assert 400 <= found.status_code < 500, (found.status_code, found.text)
    error = found.json()["error"]
    if isinstance(error, str):  # Ollama's form
        assert len(error) < 500
        return error
    fields = {"message", "type"} if found.json().get("type") == "error" else {"message", "type", "param", "code"}
    assert set(error) == fields and len(error["message"]) < 500
    return str(error["message"])


@pytest.mark.parametrize("name", MALFORMED)
@pytest.mark.parametrize("path", PATHS)
def test_malformed_bodies(path: str, name: str) -> None:
    for kind in TYPES:
        check_refused(asked(path, MALFORMED[name], {} if kind is None else {"Content-Type": kind}))


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("path", GOOD)
def test_json_is_read_whatever_it_is_called(path: str, kind: str | None) -> None:
    """As curl -d sends it, and as a chunked body."""
    content = json.dumps(GOOD[path]).encode()

    async def chunks() -> AsyncIterator[bytes]:
        for byte in content:
            yield bytes([byte])

    headers = {} if kind is None else {"Content-Type": kind}
    for body in (content, chunks()):
        found = asked(path, body, headers)
        assert found.status_code == 200 and "yes" in found.text, found.text


def test_a_page_of_another_site_has_to_name_json() -> None:
    content, site = json.dumps(GOOD["/v1/completions"]).encode(), {"Origin": "http://elsewhere"}
    found = asked("/v1/completions", content, {**site, "Content-Type": "text/plain"})
    assert found.status_code == 415 and "application/json" in check_refused(found)
    assert asked("/v1/completions", content, {**site, "Content-Type": "application/json"}).status_code == 200


def test_a_compressed_body_is_refused_by_name() -> None:
    found = asked("/v1/completions", gzip.compress(b"{}"), {"Content-Encoding": "gzip", "Content-Type": "application/json"})
    assert found.status_code == 415 and "gzip" in check_refused(found)


def test_the_wrong_field_is_named_wherever_it_is() -> None:
    """In the query as in the body: the name alone, also if it is that of a place."""

    async def ask(method: str, path: str, body: Any = None) -> Any:
        transport = httpx2.ASGITransport(app_of_all_requests(), raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://m") as client:
            return (await client.request(method, path, json=body)).json()["error"]["param"]

    scored = {"model": "m", "query": 7, "documents": ["x"]}
    for method, path, body, field in (
        ("GET", "/v1/responses/x/input_items?limit=101", None, "limit"),
        ("GET", "/v1/responses/x?include=other", None, "include.0"),
        ("POST", "/v1/completions", {"model": "m", "prompt": "x", "n": 0}, "n"),
        ("POST", "/v1/completions", {"model": "m", "prompt": "x", "query": 0}, "query"),
        ("POST", "/v1/completions", {"model": "m", "prompt": "x", "body": 0}, "body"),
        ("POST", "/rerank", scored, "query"),
        ("POST", "/invocations", scored, "query"),
    ):
        assert asyncio.run(ask(method, path, body)) == field, (path, body)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text() | st.sampled_from(sorted(GOOD)), inside, max_size=3),
    max_leaves=8,
)


BODIES = st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode())


@given(BODIES, st.sampled_from(PATHS), st.sampled_from(TYPES))
def test_any_body(content: bytes, path: str, kind: str | None) -> None:
    check_refused(asked(path, content, {} if kind is None else {"Content-Type": kind}))
