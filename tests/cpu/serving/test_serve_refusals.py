"""What ``upshift serve`` refuses, and when: what can be known at once is said before an engine starts."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from command import Command
from running_server import write_models

from upshift.errors import JobFailed
from upshift.serving import server as door
from upshift.serving.engine_process import EngineProcess


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("serve"))


LIMITS = ("--max-ttft-ms", "--max-tpot-ms", "--total-memory", "--max-body-mb", "--request-seconds", "--race-seconds")


def test_what_cannot_be_served(upshift: Command, models: Path, tmp_path: Path) -> None:
    large = tmp_path / "large"
    shutil.copytree(models / "tiny", large)
    with (large / "model.safetensors").open("r+b") as file:
        file.truncate(2**28)  # a hole
    for arguments, words in (
        ((models / "tiny", large, "--port", 0, "--total-memory", 0.2), "large takes 256 MiB of memory or more"),
        ((models / "tiny", "--port", 0, "--host", "192.0.2.1"), "choose another --host"),
        ((models / "tiny", "--port", 0, "--host", "no.such.host"), "choose another --host"),
        *(((models / "tiny", option, "inf"), f"{option} inf is not a number") for option in LIMITS),
        *(((models / "tiny", option, "nan"), option) for option in LIMITS),
        (("a=x", "a=y"), "two models are called 'a'"),
        ((models / "tiny", "--api-key-file", tmp_path / "none"), "give a file with a key a line"),
        ((models / "tiny", "--port", 0, "--engine", "none"), "'none'"),
    ):
        answer = upshift("serve", *arguments)
        assert answer.code == 2 and words in answer.err, answer.err
        assert "Traceback" not in answer.err


def test_what_is_wrong_is_found_before_an_engine_starts(
    upshift: Command, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it is wrong with the last model: the first one may take minutes."""

    async def start(self: EngineProcess) -> None:
        raise JobFailed(f"{self.request.model} was started")

    monkeypatch.setattr(EngineProcess, "start", start)
    (tmp_path / "bare").mkdir()
    shutil.copy(models / "tiny" / "config.json", tmp_path / "bare")
    (tmp_path / "prompts.txt").touch()
    good = models / "tiny"
    for arguments, words in (
        ((good, tmp_path / "none"), "none' does not exist"),
        ((good, tmp_path / "bare"), "has no weights"),
        ((good, "no such name"), "does not exist"),
        ((good, "--prompts", tmp_path / "none.txt"), "none.txt must be a file"),
        ((good, "--prompts", tmp_path / "prompts.txt"), "is empty"),
        ((good, "--ssl-certfile", tmp_path / "none"), "--ssl-certfile"),
        ((good, "--ssl-keyfile", tmp_path / "none"), "give --ssl-certfile, too"),
    ):
        answer = upshift("serve", *arguments, "--port", 0)
        assert answer.code == 2 and words in answer.err, answer.err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        answer = upshift("serve", good, "--port", taken.getsockname()[1])
        assert answer.code == 2 and "cannot listen on 127.0.0.1" in answer.err and "--port" in answer.err
    assert f"{good} was started" in upshift("serve", good, "--port", 0).err


def test_control_tokens_may_be_allowed(upshift: Command, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []
    monkeypatch.setattr(door, "serve", lambda requests, *_, **__: found.extend(one.allow_special for one in requests.values()))
    assert upshift("serve", models / "tiny").code == upshift("serve", models / "tiny", "--allow-special").code == 0
    assert found == [False, True]


def test_names_of_models(upshift: Command, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory is itself, whatever its path looks like."""
    found: dict[str, str] = {}

    def served(requests: dict[str, Any], *_: Any, **__: Any) -> None:
        found.update({name: one.model for name, one in requests.items()})

    monkeypatch.setattr(door, "serve", served)
    monkeypatch.chdir(models)
    (models / "runs" / "lr=0.001").mkdir(parents=True)
    for said, name, model in (
        ("runs/lr=0.001", "lr=0.001", "runs/lr=0.001"), (".", models.name, "."), ("tiny/", "tiny", "tiny/"),
        ("a=tiny", "a", "tiny"), ("org/model", "org/model", "org/model"),
    ):  # fmt: skip
        found.clear()
        assert upshift("serve", said).code == 0 and found == {name: model}
    assert upshift("serve", "=tiny").code == 2 and upshift("serve", "").code == 2
