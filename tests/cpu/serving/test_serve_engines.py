"""Engines of the server one by one: what each process does with requests, and the server with a process that goes wrong."""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import queue
import signal
import stat
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running_server import write_models

from upshift.errors import EngineFailed, JobFailed, RequestError
from upshift.inference.generation.generator import Generator
from upshift.models.source import ModelSource
from upshift.serving.engine import embedding
from upshift.serving.engine.embedding import serve_embeddings
from upshift.serving.engine.generation import GenerationWorker
from upshift.serving.engine_process import EngineDied, EngineProcess, RequestRefused
from upshift.serving.messages import Cancel, Embed, EngineRequest, Heartbeat, Ready, Refused, Vector
from upshift.serving.spare import process
from upshift.serving.spare.process import SpareProcess

VOCABULARY = 100


class Panic(BaseException):
    """As the Rust code of tokenizers raises it: it is no Exception."""


class Letters:
    """An encoder whose tokens are letters. It fails at a text with an exclamation mark; without a token nothing is finite."""

    shortest = 1  # tokens of a text

    def __init__(self, model: str, **more: Any) -> None:
        self.source = ModelSource(reference=model, directory=None, config={"model_type": "bert", "vocab_size": VOCABULARY})
        self.tokenizer = self.encoding = self.setup = self.engine = self
        self.passes: list[int] = []

    def label(self) -> str:
        return "letters"

    def prepare(self, texts: Any) -> Letters:
        return self

    def tokenize(self, texts: Any) -> list[list[int]]:
        if any("~" in text for text in texts):
            raise Panic("no tildes")
        return [[ord(letter) - ord("!") for letter in text if letter != " "] for text in texts]

    def rows(self, ids: list[list[int]]) -> np.ndarray:
        self.passes.append(len(ids))
        if any(0 in row for row in ids):
            raise ValueError("no exclamation marks")
        return np.array([[max(row, default=-np.inf), len(row)] for row in ids], dtype=np.float32)


def embedded(
    monkeypatch: pytest.MonkeyPatch, *asked: Embed | Cancel, said: list[Any] | None = None, **more: Any
) -> tuple[list[Any], Letters]:
    """Return the answers to these requests, which come at once, and the encoder. ``said`` gets all messages, also if it fails."""
    said = [] if said is None else said
    inbox, made = queue.Queue[Any](), list[Letters]()

    def tell(values: list[Any]) -> None:
        said.extend(values)
        if inbox.empty() and any(isinstance(value, Heartbeat) and not value.waiting for value in values):
            inbox.put(None)

    def encoder(model: str, **options: Any) -> Letters:
        made.append(Letters(model))
        for one in asked:
            inbox.put(one)
        return made[0]

    monkeypatch.setattr(embedding, "Encoder", encoder)
    serve_embeddings(EngineRequest(model="m", prompt_length=2, **more), inbox, tell)
    assert isinstance(said[0], Ready)
    return [one for one in said[1:] if not isinstance(one, Heartbeat)], made[0]


def test_a_vector_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    said, _ = embedded(monkeypatch, Embed(id=1, texts=("abc", "d")), Embed(id=2, texts=("e f",)))
    rows = [np.frombuffer(base64.b64decode(one.row), dtype="<f4").tolist() for one in said]
    assert rows == [[66.0, 3.0], [67.0, 1.0], [69.0, 2.0]]
    assert [(one.id, one.tokens, one.last) for one in said] == [(1, 3, False), (1, 1, True), (2, 2, True)]


def test_vectors_are_shortened() -> None:
    rows = np.array([[0.6, 0.8, 0.0], [0.0, 0.6, 0.8]], dtype=np.float32)
    assert embedding.shorten(rows, 2, normalize=False).tolist() == rows[:, :2].tolist()
    np.testing.assert_allclose(embedding.shorten(rows, 2, normalize=True), [[0.6, 0.8], [0.0, 1.0]], atol=1e-6)


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        ("", 500, "input 1 has no vector of finite numbers"),
        ("é", 400, "token 200 is not one of the model's 100"),
        ("wow!", 500, "ValueError: no exclamation marks"),
        ("~", 500, "Panic: no tildes"),
    ],
)
def test_a_text_that_cannot_be_encoded_ends_its_own_request(
    text: str, status: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, _ = embedded(monkeypatch, Embed(id=1, texts=("a",)), Embed(id=2, texts=("a", text)), Embed(id=3, texts=("b",)))
    refused = {one.id: one for one in said if isinstance(one, Refused)}
    assert list(refused) == [2] and refused[2].status == status and words in refused[2].why
    assert {one.id for one in said if isinstance(one, Vector)} == {1, 3}


def test_texts_of_who_left_are_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    said, encoder = embedded(monkeypatch, Embed(id=1, texts=("a",) * 600), Embed(id=2, texts=("b",) * 600), Cancel(id=2))
    assert len(said) == 600 and encoder.passes[1:] == [512, 88]


def test_embeddings_wait_as_many_as_may(monkeypatch: pytest.MonkeyPatch) -> None:
    said, _ = embedded(monkeypatch, *(Embed(id=number, texts=("a",)) for number in range(5)), max_waiting=2)
    assert [one.id for one in said if isinstance(one, Vector)] == [0, 1, 2]
    refused = [one for one in said if isinstance(one, Refused)]
    assert [(one.id, one.status) for one in refused] == [(3, 429), (4, 429)] and refused[0].retry_after is not None


def test_chats_are_nothing_to_encode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    with pytest.raises(RequestError, match="has chats alone, and 'm' encodes texts"):
        embedded(monkeypatch, prompts=str(chats))


class Prepared(Exception):
    pass


def test_made_up_prompts_are_of_the_models_tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its tokenizer knows more of them than it has vectors for."""
    write_models(tmp_path)
    monkeypatch.setattr(Generator, "vocabulary", 10)
    found: list[list[int]] = []

    def prepare(self: Generator, ids: list[list[int]], options: Any) -> None:
        found.extend(ids)
        raise Prepared

    monkeypatch.setattr(Generator, "prepare", prepare)
    with pytest.raises(Prepared):
        GenerationWorker(EngineRequest(model=str(tmp_path / "tiny"), engine="torch")).prepare()
    assert len(found) == 8 and {token for ids in found for token in ids} == set(range(10))
    (tmp_path / "prompts.txt").write_text("the quick fox\n")
    with pytest.raises(RequestError, match="is not one of the model's 10"):
        prompts = str(tmp_path / "prompts.txt")
        GenerationWorker(EngineRequest(model=str(tmp_path / "tiny"), engine="torch", prompts=prompts)).prepare()


PROCESS = """#!{python}
import json, sys

def say(**said):
    print(json.dumps(said), flush=True)

sys.stdin.readline()
say(kind="ready", task="encode", setup="", rows=1, cache_tokens=None, positions=None, resident_bytes=1, seconds={{}})
for line in sys.stdin:
    asked = json.loads(line)
    text = asked.get("texts", [None])[0]
    if asked["kind"] == "cancel":
        say(kind="beat", live=0, waiting=asked["id"], resident_bytes=1)
    elif text == "long":
        print("x" * 2**23, flush=True)
    elif text is not None and text.startswith("ending"):
        print(text.partition("\\n")[2], file=sys.stderr, flush=True)
        sys.exit(1)
    elif text == "odd":
        print("no JSON", flush=True)
    elif text == "failing":
        say(kind="refused", id=asked["id"], status=500, why="secret", failure="ValueError")
    elif text != "silent":
        say(kind="vector", id=asked["id"], row="AACAPw==", tokens=1, last=True)
"""


def with_process(monkeypatch: pytest.MonkeyPatch, folder: Path, use: Callable[[EngineProcess], Awaitable[None]]) -> None:
    program = folder / "process"
    program.write_text(PROCESS.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(program))

    async def run() -> None:
        engine = EngineProcess(EngineRequest(model="m"))
        await engine.start()
        await use(engine)
        await engine.stop()
        assert engine.state == "asleep" and engine.in_flight == 0

    asyncio.run(asyncio.wait_for(run(), 60))


async def until(said: Callable[[], bool]) -> None:
    while not said():
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("answer", ["long", "odd"])
def test_an_answer_that_is_not_understood(answer: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Who waited is told, and the engine starts again."""

    async def use(engine: EngineProcess) -> None:
        before = engine.pid
        found = await asyncio.gather(
            engine.vectors(Embed(texts=("silent",))), engine.vectors(Embed(texts=(answer,))), return_exceptions=True
        )
        assert all(isinstance(one, EngineDied) for one in found)
        await until(lambda: engine.state == "ready" and engine.pid != before)
        assert await engine.vectors(Embed(texts=("fox",))) == (["AACAPw=="], 1)

    with_process(monkeypatch, tmp_path, use)


def test_an_engine_that_never_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere")
    with pytest.raises(JobFailed, match="died 3 times"):
        asyncio.run(EngineProcess(EngineRequest(model="m")).start())


def test_who_leaves_is_told_to_the_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def use(engine: EngineProcess) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.vectors(Embed(texts=("silent",))), 0.1)
        await until(lambda: engine.heartbeat.waiting == 1)  # the number of the request that it was told of
        with pytest.raises(RequestRefused) as refused:
            await engine.vectors(Embed(texts=("failing",)))
        assert refused.value.status == 500

    with_process(monkeypatch, tmp_path, use)
    assert "ValueError" in caplog.text and "secret" not in caplog.text


SPARE = """#!{python}
import sys

sys.stdin.readline()
{answer}
sys.stdin.readline()
"""
READY = """print('{"kind": "spare", "resident_bytes": 7}', flush=True)"""


@pytest.fixture
def write_spare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Return a function that makes a program the spare process. Each answers a first line, and waits for a second one."""
    monkeypatch.setattr(process, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(process, "free_memory_bytes", lambda: 2**40)

    def write(answer: str) -> None:
        program = tmp_path / "spare"
        program.write_text(SPARE.format(python=PYTHON, answer=answer))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(sys, "executable", str(program))

    return write


PYTHON = sys.executable


def with_spare(use: Callable[[SpareProcess], Awaitable[None]]) -> None:
    async def run() -> None:
        spare = SpareProcess(lambda: False)
        spare.prepare(EngineRequest(model="m"))
        await use(spare)
        await spare.stop()
        assert spare.resident_bytes == 0

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_spare_process_that_dies_is_replaced(write_spare: Callable[[str], None], caplog: pytest.LogCaptureFixture) -> None:
    """Its bytes are not counted for any longer, and after some deaths the engine goes on without."""
    write_spare(READY)

    async def use(spare: SpareProcess) -> None:
        pids = set()
        for _ in range(process.MAX_STARTS):
            await until(lambda: spare.resident_bytes == 7)
            assert spare._process is not None
            pids.add(spare._process.pid)
            os.kill(spare._process.pid, signal.SIGKILL)
            await until(lambda: spare.resident_bytes == 0)
        assert spare._task is not None
        await spare._task
        assert len(pids) == process.MAX_STARTS and await spare.take() is None
        spare.prepare(EngineRequest(model="m"))  # the next process of the engine has a spare process again
        await until(lambda: spare.resident_bytes == 7)
        taken = await spare.take()
        assert taken is not None and taken.returncode is None and spare.resident_bytes == 0
        await process.kill_process(taken)

    with_spare(use)
    assert f"{process.MAX_STARTS} of them ended while they waited" in caplog.text


@pytest.mark.parametrize("answer", ["sys.exit(1)", "print('no JSON', flush=True)", "print('x' * 2**23, flush=True)"])
def test_a_spare_process_that_is_of_no_use(
    answer: str, write_spare: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    write_spare(answer)

    async def use(spare: SpareProcess) -> None:
        assert spare._task is not None
        await spare._task
        assert await spare.take() is None

    with_spare(use)
    assert "ended while it waited" in caplog.text


@pytest.mark.parametrize("reason", ["memory", "system"])
def test_without_a_spare_process(
    reason: str, write_spare: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The memory that is free is too little, or no process can start: the log says so."""
    caplog.set_level(logging.INFO)
    write_spare(READY)
    if reason == "memory":
        monkeypatch.setattr(process, "free_memory_bytes", lambda: 2**30)
    else:
        monkeypatch.setattr(sys, "executable", "/nowhere")

    async def use(spare: SpareProcess) -> None:
        assert spare._task is not None
        await spare._task
        assert await spare.take() is None

    with_spare(use)
    words = "it could not be started" if reason == "system" else "only 1.00 GiB of memory are free"
    assert f"no spare process for m: {words}" in caplog.text


def test_an_encoder_that_fails_at_everything_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library's error fails one request in one line; after three in a row, the process ends with the reason."""
    answers, _ = embedded(monkeypatch, Embed(id=1, texts=("!",)), Embed(id=2, texts=("!",)), Embed(id=3, texts=("a",)))
    assert [one.id for one in answers if isinstance(one, Refused)] == [1, 2]
    for good in (0, 1):  # a request that was answered keeps its vector, and each that failed is told
        said: list[Any] = []
        asked = [Embed(id=number, texts=("a" if number < good else "!",)) for number in range(3 + good)]
        with pytest.raises(EngineFailed, match="3 passes failed in a row, the last one with: no exclamation marks"):
            embedded(monkeypatch, *asked, said=said)
        answers = [(one.id, isinstance(one, Refused)) for one in said if isinstance(one, Refused | Vector)]
        assert answers == [(number, number >= good) for number in range(3 + good)]


@pytest.mark.parametrize("others", [0, 1])
def test_a_request_with_many_bad_texts_ends_alone(others: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has several parts in one pass, and counts as one failure."""
    many = [Embed(id=number, texts=("!",) * 4 * embedding.PART_TEXTS) for number in (1, 2)]
    answers, _ = embedded(monkeypatch, *many, *[Embed(id=3, texts=("a",))] * others)
    assert [(one.id, type(one)) for one in answers] == [(1, Refused), (2, Refused), (3, Vector)][: 2 + others]
