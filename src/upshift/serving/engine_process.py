"""Run an engine for the server in a process of its own: start it, send it requests, and restart it when it dies."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import Literal, NamedTuple

from upshift.errors import JobFailed, NothingFits, RequestError
from upshift.serving.messages import (
    FROM_ENGINE,
    RACING,
    Cancel,
    DecodedText,
    DescribeTokenizer,
    Detokenize,
    Done,
    Embed,
    EngineMessage,
    EngineRequest,
    Failed,
    Generate,
    Heartbeat,
    Imported,
    LearnedLoad,
    LoadAdapter,
    Piece,
    Ready,
    Refused,
    Reply,
    Request,
    SpareReady,
    Tokenize,
    Tokens,
    UnloadAdapter,
    Vector,
)
from upshift.serving.spare.process import SpareProcess, kill_process, open_engine_process
from upshift.value import Value

logger = logging.getLogger(__name__)
State = Literal["asleep", "starting", "ready", "failed"]
END_SECONDS = 5.0  # an engine may take to end by itself
MAX_DEATHS = 3  # in a row, before the engine was ready
ERROR_LINES = 200  # of the engine's standard error, which ends with the traceback of an error
IDLE = Heartbeat(live=0, waiting=0, resident_bytes=0)  # until the first heartbeat comes


class EngineDied(JobFailed):
    """The engine died while it had the request, or it is starting again.

    ``retry_after`` is the number of seconds until it is expected to be ready. None: unknown."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RequestRefused(RequestError):
    """The engine rejected the request, or failed at it. ``status`` is the HTTP status."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.why)
        self.status = refused.status
        self.code = refused.code
        self.retry_after = refused.retry_after


class Vectors(NamedTuple):
    """The vectors of a request's texts. ``rows`` holds one vector per text, as fp32 in base64."""

    rows: list[str]
    tokens: int


class TokenizedPrompt(NamedTuple):
    """The token ids of a prompt. ``texts`` are their texts, or nothing if the request does not ask for them."""

    ids: list[int]
    texts: list[str]


class EngineProcess:
    """The process of one engine. ``on_restart`` receives the seconds from a death until the engine was ready again."""

    def __init__(self, request: EngineRequest, on_restart: Callable[[float], None] = lambda seconds: None) -> None:
        self.request = request
        self.on_restart = on_restart
        self.state: State = "asleep"
        self.ready: Ready | None = None
        self.heartbeat = IDLE
        self.failure: Failed | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._request_ids = itertools.count(1)
        self._inboxes: dict[int, asyncio.Queue[Reply | Refused | None]] = {}  # by request id
        self._state_changed = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None
        self._error_lines: deque[str] = deque(maxlen=ERROR_LINES)
        self._has_been_ready = False
        self._learned: LearnedLoad | None = None
        self._start_time = 0.0  # of the process
        self._restart_seconds: float | None = None  # of the last restart
        self.keeps_spare = request.replicas == 1  # the others go on meanwhile
        self.spare = SpareProcess(lambda: bool(self._inboxes))

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def in_flight(self) -> int:
        """Return the number of open requests."""
        return len(self._inboxes)

    async def start(self) -> Ready:
        """Start the process, and return when the engine is ready. Raise the error that keeps it from starting.

        Raise EngineDied if ``stop`` is called meanwhile."""
        if self._supervisor is None or self._supervisor.done():
            self.state = "starting"
            self.failure = None
            self._supervisor = asyncio.create_task(self._supervise())
        while self.state == "starting":
            self._state_changed.clear()
            await self._state_changed.wait()
        if self.failure is not None:
            error_types = {2: RequestError, 3: NothingFits}
            raise error_types.get(self.failure.exit_code, JobFailed)(self.failure.why)
        if self.ready is None:
            raise EngineDied("the model was unloaded while it started; try again in a moment")
        return self.ready

    async def stop(self) -> None:
        """Stop the process. Open requests are lost, so check ``in_flight`` first.

        The engine counts as asleep from now on, although its process may take seconds to end."""
        supervisor = self._supervisor
        process = self._process  # ``start`` may replace it from here on
        self._supervisor = None
        self.ready = None
        self.failure = None
        self._set_state("asleep")
        self._abandon_requests()
        if supervisor is not None:
            supervisor.cancel()
            await asyncio.wait({supervisor})
        await asyncio.gather(self._end(process), self.spare.stop())

    async def pieces(self, request: Generate) -> AsyncGenerator[Piece]:
        """Yield the pieces of an answer. When the consumer stops, cancel the request. Raise RequestRefused or
        EngineDied."""
        async with aclosing(self._replies(request)) as replies:
            async for piece in replies:
                assert isinstance(piece, Piece)
                yield piece

    async def vectors(self, request: Embed) -> Vectors:
        """Return the vectors of a request. When the caller stops, cancel the request. Raise RequestRefused or
        EngineDied."""
        rows: list[str] = []
        tokens = 0
        async with aclosing(self._replies(request)) as replies:
            async for vector in replies:
                assert isinstance(vector, Vector)
                rows.append(vector.row)
                tokens += vector.tokens
        return Vectors(rows, tokens)

    async def tokens(self, request: Tokenize) -> TokenizedPrompt:
        """Return the tokens of a prompt. Raise RequestRefused or EngineDied."""
        ids: list[int] = []
        texts: list[str] = []
        async with aclosing(self._replies(request)) as replies:
            async for part in replies:
                assert isinstance(part, Tokens)
                ids += part.ids
                texts += part.texts
        return TokenizedPrompt(ids, texts)

    async def text(self, request: Detokenize | DescribeTokenizer) -> str:
        """Return the text of token ids, or the settings of the tokenizer. Raise RequestRefused or EngineDied."""
        text = ""
        async with aclosing(self._replies(request)) as replies:
            async for part in replies:
                assert isinstance(part, DecodedText)
                text += part.text
        return text

    async def change_adapters(self, order: LoadAdapter | UnloadAdapter) -> None:
        """Load or unload an adapter. Raise RequestRefused or EngineDied.

        From then on, the process loads the same adapters when it starts again."""
        async with aclosing(self._replies(order)) as replies:
            async for reply in replies:
                assert isinstance(reply, Done)
        adapters = {name: folder for name, folder in self.request.adapters.items() if name != order.name}
        if isinstance(order, LoadAdapter):
            adapters[order.name] = order.folder
        self.request = self.request.changed(adapters=adapters)

    async def _replies(self, request: Request) -> AsyncGenerator[Reply]:
        """Send a request, and yield the replies. When the consumer stops before the last one, cancel the request."""
        request_id = next(self._request_ids)
        inbox = self._open_inbox(request_id)
        try:
            await self._send(request.model_copy(update={"id": request_id}))
            while True:
                reply = self._raise_failures(await inbox.get())
                if reply.last:
                    self._inboxes.pop(request_id, None)
                    yield reply
                    return
                yield reply
        finally:
            await self._cancel_if_open(request_id)

    def _open_inbox(self, request_id: int) -> asyncio.Queue[Reply | Refused | None]:
        return self._inboxes.setdefault(request_id, asyncio.Queue())

    async def _cancel_if_open(self, request_id: int) -> None:
        if self._inboxes.pop(request_id, None) is not None and (self._process and self._process.returncode is None):
            with suppress(EngineDied):
                await self._send(Cancel(id=request_id))

    async def _send(self, message: Value) -> None:
        if self.state != "ready" or self._process is None or self._process.stdin is None:
            elapsed = time.monotonic() - self._start_time
            raise EngineDied("the engine is starting again; try again in a moment", self._expected_seconds - elapsed)
        self._process.stdin.write(message.to_json().encode() + b"\n")
        with suppress(ConnectionError):  # the end of the engine's output reports its death
            await self._process.stdin.drain()

    async def _supervise(self) -> None:
        """Run the process again each time it dies, until it reports a failure or dies too often."""
        deaths = 0
        death_time = 0.0
        while self.failure is None and deaths < MAX_DEATHS:
            self._set_state("starting")
            if await self._run_process(death_time):
                deaths = 0
            deaths += 1
            death_time = time.monotonic()
        if self.failure is None:
            last_line = self._error_lines[-1] if self._error_lines else "it said nothing"
            self.failure = Failed(why=f"the engine of {self.request.model} died {deaths} times: {last_line}", exit_code=1)
        self._set_state("failed")

    async def _run_process(self, death_time: float) -> bool:
        """Run one process from its start to its end, then end all open requests.

        Return whether the engine was ready. ``death_time`` is the time when the process before it died, or 0."""
        was_ready = False
        self.heartbeat = IDLE
        self._error_lines.clear()
        self._start_time = time.monotonic()
        try:
            self._process = await self.spare.take() or await open_engine_process()
            error_reader = asyncio.create_task(self._read_errors())
            assert self._process.stdin is not None and self._process.stdout is not None
            request = self.request.changed(is_restart=self._has_been_ready, learned=self._learned)
            self._process.stdin.write(request.to_json().encode() + b"\n")
            async for line in self._process.stdout:
                message = FROM_ENGINE.validate_json(line)
                was_ready = was_ready or isinstance(message, Ready)
                self._take_message(message, death_time)
            await self._process.wait()
            await error_reader
            if was_ready:
                self._log_end()
        except Exception as error:  # a process whose output cannot be read is of no use
            self._error_lines.append(f"its answer was not understood ({type(error).__name__})")
            logger.error("the engine of %s is ended: %s", self.request.model, self._error_lines[-1])
            await kill_process(self._process)
        self._abandon_requests()
        return was_ready

    def _log_end(self) -> None:
        """Log the traceback of the error that ended the engine, if it wrote one, and then its last line."""
        lines = list(self._error_lines) or ["it said nothing"]
        begin = next((index for index, line in enumerate(lines) if line.startswith("Traceback")), len(lines) - 1)
        reason = f"the engine of {self.request.model} ended, and is started again: {lines[-1]}"
        logger.error("%s", "\n".join([*lines[begin:-1], reason]))

    def _take_message(self, message: EngineMessage, death_time: float) -> None:
        if isinstance(message, Ready):
            self._take_ready(message, death_time)
        elif isinstance(message, Failed):
            self.failure = message
        elif isinstance(message, Heartbeat):
            self.heartbeat = message
            self._learned = message.learned
        elif isinstance(message, Imported):
            if self.keeps_spare:
                self.spare.prepare(self.request.changed(modules=message.modules))
        elif not isinstance(message, SpareReady):  # of the spare process that this engine was
            self._deliver(message)

    def _take_ready(self, ready: Ready, death_time: float) -> None:
        self.ready = ready
        self._has_been_ready = True
        if ready.replaces_template:
            logger.warning("%s: --chat-template is used in place of the chat template of the tokenizer", self.request.model)
        for name, reason in ready.lost_adapters.items():
            logger.error("the adapter %s was not loaded again: %s", name, reason)
        self._set_state("ready")
        if death_time:
            self._restart_seconds = time.monotonic() - death_time
            self.on_restart(self._restart_seconds)

    def _deliver(self, answer: Reply | Refused) -> None:
        """Put an answer into the inbox of its request, if the request is still open."""
        if isinstance(answer, Refused) and answer.failure is not None:
            logger.error("a request failed in the engine of %s: %s", self.request.model, answer.failure)
        if answer.id in self._inboxes:
            self._inboxes[answer.id].put_nowait(answer)

    @property
    def _expected_seconds(self) -> float:
        """Return how long a restart is expected to take: as the last one, or as the first start without its race."""
        if self._restart_seconds is not None:
            return self._restart_seconds
        return 0.0 if self.ready is None else sum(self.ready.seconds.values()) - self.ready.seconds.get(RACING, 0.0)

    def _raise_failures(self, answer: Reply | Refused | None) -> Reply:
        """Return the answer. Raise RequestRefused for a rejected request, and EngineDied for None."""
        if answer is None:
            message = "the engine died while it computed this; it is started again: try again in a moment"
            raise EngineDied(message, self._expected_seconds)
        if isinstance(answer, Refused):
            raise RequestRefused(answer)
        return answer

    async def _read_errors(self) -> None:
        """Keep the last lines of the process's standard error."""
        assert self._process is not None and self._process.stderr is not None
        while chunk := await self._process.stderr.read(2**16):
            self._error_lines.extend(line for line in chunk.decode(errors="replace").splitlines() if line.strip())

    def _set_state(self, state: State) -> None:
        self.state = state
        self._state_changed.set()

    def _abandon_requests(self) -> None:
        """Send None to all open requests: the engine is gone."""
        for inbox in self._inboxes.values():
            inbox.put_nowait(None)
        self._inboxes.clear()

    async def _end(self, process: asyncio.subprocess.Process | None) -> None:
        """Close the input of a process, and kill the process if it does not end by itself."""
        if process is None or process.returncode is not None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), END_SECONDS)
        except TimeoutError:
            await kill_process(process)
