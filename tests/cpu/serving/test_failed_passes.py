"""An error of an engine fails the requests at which it comes. Three failed passes in a row end the engine, with a reason."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_serve_engines import with_process
from test_serving_parts import Clock, Toy, answer, made, ticket
from test_tokens import Panic

from upshift.errors import EngineEnded, EngineFailed, JobFailed, RequestError
from upshift.inference.engine_errors import ComputationFailed, computing
from upshift.inference.generation.engines.base import ComputedRows
from upshift.inference.generation.media import MediaPrompt
from upshift.inference.generation.options import GenerationOptions
from upshift.inference.generation.sequence import GeneratedSequence
from upshift.serving.engine.admission import Ticket
from upshift.serving.engine.main import describe_end
from upshift.serving.engine.scheduler import Scheduler
from upshift.serving.engine.warmup import measure_passes
from upshift.serving.engine_process import EngineProcess
from upshift.serving.messages import Embed, Refused

WAYS = ("whole", "chunks", "thread")  # in which an engine computes a prompt
CHUNK = 8


class Failing(Toy):
    """An engine that computes prompts in one way, and raises the next of ``errors`` at each of them unless that is None."""

    def __init__(self, clock: Clock, way: str, errors: list[BaseException | None]) -> None:
        super().__init__(clock, chunks=way == "chunks")
        self.errors = iter(errors)
        self.step_error: BaseException | None = None

    def admit(self, prompts: Any, prefix: Any = None) -> np.ndarray:
        self.fail()
        return super().admit(prompts, *([prefix] if prefix else []))

    def compute_chunks(self, prompts: Any, prefix: Any, next_width: Any) -> Any:
        self.fail()
        yield from super().compute_chunks(prompts, prefix, next_width)

    def compute_apart(self, prompts: Any) -> ComputedRows:
        self.fail()
        rows = [list(prompt) for prompt in prompts]
        return ComputedRows(np.zeros(0), rows, self._said(rows), 0)

    def step(self, tokens: np.ndarray) -> np.ndarray:
        if self.step_error is not None:
            raise self.step_error
        return super().step(tokens)

    def fail(self) -> None:
        error = next(self.errors, None)
        if error is not None:
            raise error


def failing(way: str, *errors: BaseException | None) -> tuple[Scheduler, Failing]:
    clock = Clock()
    scheduler = made(clock, rows=3, chunk_tokens=CHUNK)
    engine = Failing(clock, way, list(errors))
    scheduler.engine = engine
    return scheduler, engine


def ticket_of(way: str, number: int, *, new: int = 1) -> Ticket:
    prompt = [(number + place) % 16 for place in range(3 if way == "whole" else 3 * CHUNK)]
    ids = MediaPrompt(prompt, {"pixels": np.zeros(1)}) if way == "thread" else prompt
    return Ticket(number, GeneratedSequence(0, ids, GenerationOptions(max_new_tokens=new), None), 0.0)


def compute_all(scheduler: Scheduler, tickets: list[Ticket]) -> None:
    """Compute requests one after the other, so that each pass has one prompt and no other row."""
    for one in tickets:
        scheduler.add(one)
        for _ in range(1000):
            if not scheduler.is_busy:
                break
            scheduler.step()
    assert not scheduler.is_busy


@pytest.mark.parametrize("way", WAYS)
def test_a_success_between_failures_ends_their_row(way: str) -> None:
    """The engine ends only when nothing succeeds between three failures. Requests that are not possible are no failures."""
    bad = RuntimeError("bad kernel")
    scheduler, _ = failing(way, bad, None, bad, None, bad, bad)
    tickets = [ticket_of(way, number) for number in range(6)]
    compute_all(scheduler, tickets)
    assert [one.id for one, _ in scheduler.failed] == [0, 2, 4, 5]
    assert all(tickets[number].sequence.tokens == answer(tickets[number].sequence.prompt, 1) for number in (1, 3))
    scheduler, _ = failing(way, bad, bad, *[RequestError("a picture is broken")] * 3, bad)
    with pytest.raises(EngineFailed, match="3 passes failed in a row, the last one with: .*RuntimeError: bad kernel"):
        compute_all(scheduler, [ticket_of(way, number) for number in range(7)])
    assert [one.id for one, _ in scheduler.failed] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("way", WAYS)
def test_a_panic_of_the_engine_fails_its_own_request(way: str) -> None:
    scheduler, _ = failing(way, Panic("index out of bounds"))
    tickets = [ticket_of(way, number) for number in range(2)]
    compute_all(scheduler, tickets)
    ((failed, error),) = scheduler.failed
    assert failed is tickets[0] and "Panic: index out of bounds" in str(error) and isinstance(error, ComputationFailed)
    assert "alone" in Refused.from_error(0, error).why and len(tickets[1].sequence.tokens) == 1


@pytest.mark.parametrize("error", [RuntimeError("bad kernel"), Panic("index out of bounds")])
@pytest.mark.parametrize("way", WAYS)
def test_an_engine_that_fails_in_the_warm_up_says_so_in_one_line(way: str, error: BaseException) -> None:
    """At a prompt and at a step. The server would start it again if this was an EngineEnded, or a fault of ours."""
    length = 3 if way == "whole" else 3 * CHUNK
    for errors, step_error in (([error] * 9, None), ([], error)):
        scheduler, engine = failing("chunks" if way == "chunks" else "whole", *errors)
        engine.step_error = step_error
        with pytest.raises(ComputationFailed, match=f"failed while it computed: .*{error}; choose another one") as failed:
            measure_passes(scheduler, [[number + 1] * length for number in range(3)], None, 3)
        assert "\n" not in str(failed.value)


def test_a_rank_that_fails_in_the_warm_up_is_one_line() -> None:
    scheduler, engine = failing("whole")
    engine.step_error = EngineFailed("rank 0 of the model ended: no memory")
    with pytest.raises(JobFailed, match="rank 0") as failed:
        measure_passes(scheduler, [[1, 2, 3]], None, 1)
    assert not isinstance(failed.value, EngineEnded)


def failed_rank() -> EngineFailed:
    """Return the error of a group of ranks, as rank_group.py raises it: the text alone comes from the other process."""
    cause = JobFailed(str(ComputationFailed(ValueError("no kernel"))))
    ended = EngineFailed(f"rank 0 of the model ended: {cause}")
    ended.__cause__ = cause
    return ended


@pytest.mark.parametrize("error", [ValueError("no kernel"), failed_rank()])
def test_who_has_no_token_hears_that_the_whole_engine_failed(error: Exception) -> None:
    """The reason is the library's, without the hint for whoever started the server. Who has a token is sent elsewhere."""
    scheduler, engine = failing("whole")
    first, second = ticket(0, Clock(), prompt=3), ticket(1, Clock(), prompt=4)
    scheduler.add(first)
    scheduler.step()
    scheduler.live.append(second)
    engine.step_error = error
    with pytest.raises(EngineFailed):
        scheduler.step()
    ((failed, found),) = scheduler.failed
    refused = Refused.from_error(1, found)
    assert failed is second and refused.status == 500
    assert refused.why == "the engine failed, and starts again: ValueError: no kernel"


def test_the_log_has_the_origin_of_an_error_and_its_name_last() -> None:
    """A fault of ours is not called one of the engine's library."""

    def find_nothing() -> Any:
        empty: dict[str, int] = {}
        return empty["nothing"]

    def text_of(error: Exception) -> list[str]:
        return describe_end(error).splitlines()

    with pytest.raises(KeyError) as ours:
        find_nothing()
    *origin, last = text_of(ours.value)
    assert last == "KeyError: 'nothing'" and any("find_nothing" in line for line in origin)
    with pytest.raises(ComputationFailed) as library, computing():
        find_nothing()
    *origin, last = text_of(library.value)
    assert last.startswith("the engine failed while it computed: KeyError") and any("find_nothing" in line for line in origin)
    assert text_of(EngineEnded("rank 1 has ended")) == ["rank 1 has ended"]


def test_the_server_logs_why_an_engine_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The traceback comes first, and what else the process wrote before it stays out."""
    lines = ["a warning", "Traceback (most recent call last):", '  File "x.py", line 1, in f', "KeyError: 'y'", "KeyError: 'y'"]
    caplog.set_level(logging.ERROR)

    async def use(engine: EngineProcess) -> None:
        with pytest.raises(JobFailed):
            await engine.vectors(Embed(texts=("ending\n" + "\n".join(lines),)))

    with_process(monkeypatch, tmp_path, use)
    assert caplog.messages == ["\n".join([*lines[1:-1], f"the engine of m ended, and is started again: {lines[-1]}"])]
