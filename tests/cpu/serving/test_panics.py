"""An error of any kind while one answer is made fails this request with 500, and the engine goes on with the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_tokens import USER, Panic
from test_tool_calls import TEMPLATES, TOOLS, folder, make_tokenizer  # noqa: F401 - the fixture

from upshift.serving.engine.answer_pieces import make_pieces
from upshift.serving.engine.generation import GenerationWorker
from upshift.serving.engine.main import write_line
from upshift.serving.messages import DecodedText, EngineRequest, Generate, Piece, Refused

NEW = 6
ERRORS = (Panic, ValueError, MemoryError, RecursionError)


def fail(error: type[BaseException]) -> Any:
    def function(*_: Any, **__: Any) -> Any:
        raise error("called Option::unwrap() on a None value")

    return function


@pytest.fixture(scope="module")
def worker(folder: Path) -> GenerationWorker:  # noqa: F811
    make_tokenizer(TEMPLATES["hermes"]).save_pretrained(folder)
    worker = GenerationWorker(EngineRequest(model=str(folder), engine="torch", prompt_length=4, output_length=4))
    worker.prepare()
    return worker


def request_of(number: int) -> Generate:
    options = {"max_new_tokens": NEW, "stop_strings": ["never said"]}
    return Generate(id=number, prompt=(USER,), tools=json.dumps(TOOLS), options=options, top=2, ignore_eos=True)


WHILE_IT_BEGINS = ("_read_prompt", "_make_guide", "_options", "_open_calls", "_open_reasoning", "_find_adapter")
WHILE_IT_RUNS = ("stream.add", "stream._decode", "calls.add", "token_bytes", "ticket.sequence.choose", "ticket.sequence.add",
                 "ticket.sequence._tokenizer.decode")  # fmt: skip


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("place", (*WHILE_IT_BEGINS, *WHILE_IT_RUNS))
def test_an_error_fails_its_own_request(
    place: str, error: type[BaseException], worker: GenerationWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Any] = []
    if place in WHILE_IT_BEGINS:
        with monkeypatch.context() as patch:
            patch.setattr(worker, place, fail(error))
            said += worker.answer(request_of(1))
    else:
        said += worker.answer(request_of(1))
        opened = worker._open_requests[1]
        *path, last = place.split(".")
        if not path:
            worker._open_requests[1] = opened._replace(**{last: fail(error)})
        elif last == "decode":
            opened.ticket.sequence._tokenizer = type("Failing", (), {"decode": fail(error)})()
        else:
            holder: Any = opened
            for name in path:
                holder = getattr(holder, name)
            if last == "choose":
                monkeypatch.setattr(type(holder), "is_greedy", False)
                holder._processors = fail(error)
            else:
                monkeypatch.setattr(holder, last, fail(error), raising=False)
    said += worker.answer(request_of(2))
    while worker.is_busy:
        said += make_pieces(worker.run_pass())
        said += worker.take_failures()
    refused = [message for message in said if isinstance(message, Refused)]
    assert {message.id for message in refused} == {1} and {message.status for message in refused} == {500}, said
    assert "alone" in refused[0].why
    others = [message for message in said if isinstance(message, Piece) and message.id == 2]
    assert sum(piece.tokens for piece in others) == NEW and others[-1].ending == "length"
    assert not worker._open_requests


def test_a_text_that_json_cannot_hold_fails_its_own_request() -> None:
    line = write_line(DecodedText.model_construct(kind="decoded", id=3, text="\ud800", last=True))
    refused = Refused.from_json(line, origin="the line")
    assert (refused.id, refused.status) == (3, 500)
