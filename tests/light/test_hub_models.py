"""A model that the hub does not give: the cause and the next step stand in one line, and nothing is asked again and again."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from upshift.errors import RequestError
from upshift.models.source import find_model

CLOSED = "http://127.0.0.1:9"  # the port of a service that no machine runs any more


@pytest.fixture(autouse=True)
def _asks_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", CLOSED)
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A hub that answers 404 to everything, and gives the error code of the path's last name. Yields the paths asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.send_response(403 if "Gated" in self.path else 404)
            self.send_header("X-Error-Code", self.path.split("/")[2])
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_HEAD

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    yield asked
    server.shutdown()
    server.server_close()


def refusal(reference: str) -> str:
    with pytest.raises(RequestError) as raised:
        find_model(reference)
    return str(raised.value)


def write_model(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))


@pytest.mark.parametrize(("proxy", "named"), [(None, "127.0.0.1 does not"), (CLOSED, "the proxy 127.0.0.1 does not")])
def test_a_network_that_is_down_is_said_at_once(proxy: str | None, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if proxy is not None:
        monkeypatch.setattr(constants, "ENDPOINT", "http://hub.example")
        monkeypatch.setenv("http_proxy", proxy)
    begin = time.monotonic()
    words = refusal("org/name")
    assert named in words and "HF_ENDPOINT" in words and "did you mean" not in words
    assert time.monotonic() - begin < 5  # huggingface_hub's own attempts take a minute


def test_a_model_in_the_cache_needs_no_network(tmp_path: Path) -> None:
    folder = tmp_path / "hub" / "models--org--name"
    write_model(folder / "snapshots" / ("0" * 40))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    assert find_model("org/name").config["model_type"] == "llama"


@pytest.mark.parametrize(
    ("code", "word"),
    [("RepoNotFound", "no such model"), ("GatedRepo", "ask for access"), ("EntryNotFound", "no config.json on the hub")],
)
def test_the_answer_of_the_hub_is_said(code: str, word: str, hub: list[str]) -> None:
    words = refusal(f"org/{code}")
    assert word in words and "\n" not in words and hub


@pytest.mark.parametrize("reference", ["demo/traind", "./demo/traind"])
def test_a_misspelt_folder_is_told_from_its_neighbours(reference: str, tmp_path: Path) -> None:
    write_model(tmp_path / "demo" / "trained")
    assert refusal(reference).endswith("did you mean demo/trained?")


def test_a_run_that_has_not_ended_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "trained" / "checkpoint-44").mkdir(parents=True)
    words = refusal("trained")
    assert "checkpoint-44" in words and "--resume" in words
