"""``upshift load-test`` against servers that answer oddly, and with rates and addresses that are none."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from command import Command

MODELS, TEXT = '{"data": [{"id": "x"}]}', 'data: {"choices": [{"text": "a"}]}\n\n'
SHORT = ("--rate", "20", "--duration", "0.3")


@contextmanager
def answering(models: str, events: str, health: str = "{}") -> Iterator[str]:
    """A server that says just this."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *said: Any) -> None: ...

        def do_GET(self) -> None:
            self._say(models if self.path == "/v1/models" else health, "application/json")

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self._say(events, "text/event-stream")

        def _say(self, text: str, kind: str) -> None:
            self.send_response(200)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    serving = threading.Thread(target=server.serve_forever, args=(0.01,))
    serving.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    serving.join()
    server.server_close()


@pytest.mark.parametrize(
    ("models", "events", "code", "words"),
    [
        ("[]", "", 2, "is no list of models"),
        ('{"data": null}', "", 2, "is no list of models"),
        ('{"data": [1]}', "", 2, "is no list of models"),
        ("oops", "", 2, "is no list of models"),
        ('{"data": []}', "", 2, "no model is served"),
        ('{"data": [{"id": "x"}, {"id": "y"}]}', "", 2, "several models are served"),
        (MODELS, "data: {oops\n\n", 1, "an event is not of OpenAI's form: {oops"),
        (MODELS, "data: []\n\n", 1, "an event is not of OpenAI's form: []"),
        (MODELS, 'data: {"choices": [{}], "usage": 5}\n\n', 1, "an event is not of OpenAI's form"),
        (MODELS, 'data: {"error": "boom"}\n\n', 1, "boom"),
        (MODELS, 'data: {"error": {"message": "too much"}}\n\n', 1, "too much"),
    ],
)
def test_odd_servers(models: str, events: str, code: int, words: str, upshift: Command) -> None:
    with answering(models, events) as url:
        found = upshift("load-test", url, *SHORT)
    assert found.code == code and words in found.err and "Traceback" not in found.err, found.err


def test_what_servers_say_beside_it_is_theirs(upshift: Command) -> None:
    health = '{"models": {"x": {"capacity": "much", "promised_ttft_ms": null, "predicted_capacity": 2.0}}}'
    with answering(MODELS, f': ping\n\n{TEXT}data: {{"choices": [], "usage": null}}\n\ndata: [DONE]\n\n', health) as url:
        found = json.loads(upshift("load-test", url, *SHORT, "--json").out)
    assert found["phases"][0]["tokens_per_second"] > 0
    assert (found["capacity"], found["predicted_capacity"]) == (None, 2.0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("http://127.0.0.1:99999",), "is no address"),
        (("http://127.0.0.1:x",), "is no address"),
        (("127.0.0.1:9",), "is no address"),
        (("ftp://127.0.0.1:9",), "is no address"),
        (("http://",), "is no address"),
        (("http://127.0.0.1:9",), "no server of OpenAI's addresses answers"),
        (("http://127.0.0.1:9", "--rate", "0.01", "--duration", "1"), "--rate 0.01 asks nothing within --duration 1"),
        (("http://127.0.0.1:9", "--duration", "inf"), "--duration inf is not a number of at least 0.1"),
        (("http://127.0.0.1:9", "--max-ttft-ms", "nan"), "--max-ttft-ms nan is not a number above 0"),
        (("http://127.0.0.1:9", "--max-ttft-ms", "0"), "--max-ttft-ms 0 is not a number above 0"),
    ],
)
def test_wrong_arguments(arguments: tuple[str, ...], words: str, upshift: Command) -> None:
    found = upshift("load-test", *arguments)
    assert found.code == 2 and words in found.err and "Traceback" not in found.err, found.err
