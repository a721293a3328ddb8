"""Run an engine for the server as a process that is started, sent requests, and started again when it dies."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Literal, NamedTuple

from upshift import parent_process
from upshift.errors import JobFailed, NothingFits, RequestError
from upshift.serving.messages import (
    FROM_ENGINE,
    Beat,
    Cancel,
    Embed,
    EngineRequest,
    Failed,
    Generate,
    Piece,
    Ready,
    Refused,
    Vector,
)
from upshift.value import Value

logger = logging.getLogger(__name__)
State = Literal["asleep", "starting", "ready", "failed"]
LINE_BYTES = 2**20  # of a vector, or of the text of a few tokens
END_SECONDS = 5.0
MOST_DEATHS = 3  # one after the other, before it was ready
KEPT_LINES = 20  # of its standard error
IDLE = Beat(live=0, waiting=0, resident_bytes=0)  # until it says


class EngineDied(JobFailed):
    """The engine died while it had the request, or is starting again."""


class RequestRefused(RequestError):
    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.why)
        self.status, self.retry_after = refused.status, refused.retry_after


class Vectors(NamedTuple):
    """The vectors of a request's texts. ``rows`` holds one vector a text, fp32 in base64."""

    rows: list[str]
    tokens: int


class EngineProcess:
    """The process of one model's engine. ``on_restart`` gets the seconds from a death until the engine was ready
    again."""

    def __init__(self, request: EngineRequest, on_restart: Callable[[float], None] = lambda seconds: None) -> None:
        self.request, self.on_restart = request, on_restart
        self.state: State = "asleep"
        self.ready: Ready | None = None
        self.beat = IDLE
        self.failure: Failed | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._numbers = itertools.count(1)
        self._open: dict[int, asyncio.Queue[Piece | Vector | Refused | None]] = {}
        self._changed = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None
        self._last_words: deque[str] = deque(maxlen=KEPT_LINES)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def in_flight(self) -> int:
        return len(self._open)

    async def start(self) -> Ready:
        """Start the process, and return when the engine is ready. Raise the error that keeps the engine from
        starting."""
        if self._runner is None or self._runner.done():
            self.state, self.failure = "starting", None
            self._runner = asyncio.create_task(self._run())
        while self.state == "starting":
            self._changed.clear()
            await self._changed.wait()
        if self.failure is not None:
            kinds = {2: RequestError, 3: NothingFits}
            raise kinds.get(self.failure.exit_code, JobFailed)(self.failure.why)
        assert self.ready is not None
        return self.ready

    async def stop(self) -> None:
        """Stop the process. Open requests are lost, so check ``in_flight`` first."""
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.wait({self._runner})
        await self._end()
        self.state, self.ready, self._runner = "asleep", None, None
        self._lose()

    async def pieces(self, asked: Generate) -> AsyncGenerator[Piece]:
        """Yield the pieces of an answer. The request is canceled when the consumer stops. Raise RequestRefused or
        EngineDied."""
        number = next(self._numbers)
        inbox = self._listen(number)
        try:
            await self._send(asked.model_copy(update={"id": number}))
            while True:
                piece = _checked(await inbox.get())
                assert isinstance(piece, Piece)
                if piece.ending is not None:
                    self._open.pop(number, None)
                    yield piece
                    return
                yield piece
        finally:
            await self._leave(number)

    async def vectors(self, asked: Embed) -> Vectors:
        """Return the vectors of a request. The request is canceled when the caller stops. Raise RequestRefused or
        EngineDied."""
        number = next(self._numbers)
        inbox = self._listen(number)
        rows, tokens = list[str](), 0
        try:
            await self._send(asked.model_copy(update={"id": number}))
            while True:
                vector = _checked(await inbox.get())
                assert isinstance(vector, Vector)
                rows.append(vector.row)
                tokens += vector.tokens
                if vector.last:
                    self._open.pop(number, None)
                    return Vectors(rows, tokens)
        finally:
            await self._leave(number)

    async def _leave(self, number: int) -> None:
        if self._open.pop(number, None) is not None and (self._process and self._process.returncode is None):
            with suppress(EngineDied):
                await self._send(Cancel(id=number))

    def _listen(self, number: int) -> asyncio.Queue[Piece | Vector | Refused | None]:
        return self._open.setdefault(number, asyncio.Queue())

    async def _send(self, value: Value) -> None:
        if self.state != "ready" or self._process is None or self._process.stdin is None:
            raise EngineDied("the engine is starting again; try again in a moment")
        self._process.stdin.write(value.to_json().encode() + b"\n")
        with suppress(ConnectionError):  # its death is told by the end of its answers
            await self._process.stdin.drain()

    async def _run(self) -> None:
        deaths, died = 0, 0.0
        while self.failure is None and deaths < MOST_DEATHS:
            self._become("starting")
            if await self._live(died):
                deaths = 0
            deaths, died = deaths + 1, time.monotonic()
        if self.failure is None:
            last = self._last_words[-1] if self._last_words else "it said nothing"
            self.failure = Failed(why=f"the engine of {self.request.model} died {deaths} times: {last}", exit_code=1)
        self._become("failed")

    async def _live(self, died: float) -> bool:
        """Run one process from its start to its end, and tell all waiting requests of its end.

        Return whether the engine was ready. ``died`` is the time when the process before it died, or 0."""
        was_ready, self.beat = False, IDLE
        try:
            self._process = await asyncio.create_subprocess_exec(
                *parent_process.command("upshift.serving.engine.main"), stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, limit=LINE_BYTES,
            )  # fmt: skip
            listening = asyncio.create_task(self._hear_errors())
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.write(self.request.to_json().encode() + b"\n")
            async for line in self._process.stdout:
                said = FROM_ENGINE.validate_json(line)
                if isinstance(said, Ready):
                    self.ready, was_ready = said, True
                    self._become("ready")
                    if died:
                        self.on_restart(time.monotonic() - died)
                elif isinstance(said, Failed):
                    self.failure = said
                elif isinstance(said, Beat):
                    self.beat = said
                else:
                    self._pass_on(said)
            await self._process.wait()
            await listening
        except Exception as error:  # whatever it said, nobody can go on with it
            self._last_words.append(f"its answer was not understood ({type(error).__name__})")
            logger.error("the engine of %s is ended: %s", self.request.model, self._last_words[-1])
            await self._kill()
        self._lose()
        return was_ready

    def _pass_on(self, said: Piece | Vector | Refused) -> None:
        if isinstance(said, Refused) and said.failure is not None:
            logger.error("a request failed in the engine of %s: %s", self.request.model, said.failure)
        if said.id in self._open:
            self._open[said.id].put_nowait(said)

    async def _hear_errors(self) -> None:
        assert self._process is not None and self._process.stderr is not None
        while line := await self._process.stderr.read(2**16):
            self._last_words.extend(text for text in line.decode(errors="replace").splitlines() if text.strip())

    def _become(self, state: State) -> None:
        self.state = state
        self._changed.set()

    def _lose(self) -> None:
        """Tell all waiting requests that the engine is gone."""
        for inbox in self._open.values():
            inbox.put_nowait(None)
        self._open.clear()

    async def _end(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), END_SECONDS)
        except TimeoutError:
            await self._kill()

    async def _kill(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            process.kill()
            while process.stdout is not None and await process.stdout.read(2**16):  # its end is not seen while a pipe is full
                pass
            await process.wait()


def _checked(said: Piece | Vector | Refused | None) -> Piece | Vector:
    if said is None:
        raise EngineDied("the engine died while it computed this; it is started again: try again in a moment")
    if isinstance(said, Refused):
        raise RequestRefused(said)
    return said
