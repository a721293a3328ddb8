"""Keep a process that has imported what an engine imports, so that an engine that dies starts again without its imports."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from upshift import parent_process
from upshift.hardware.host_memory import free_memory_bytes
from upshift.serving.messages import FROM_ENGINE, MAX_LINE_BYTES, EngineRequest, SpareReady
from upshift.units import format_bytes

logger = logging.getLogger(__name__)
MIN_FREE_BYTES = 2 * 2**30  # of the memory that this process may use, so that a spare process leaves enough for requests
PAUSE_SECONDS = 10.0  # the imports slow answers down, so they begin when the engine has been idle for this long
LONGEST_WAIT = 60.0  # seconds after which the imports begin without such a pause
MAX_STARTS = 3  # of spare processes that end while they wait, for one process of the engine
POLL_SECONDS = 0.5


async def open_engine_process() -> asyncio.subprocess.Process:
    """Start the process of an engine, which waits for its request."""
    return await asyncio.create_subprocess_exec(
        *parent_process.command("upshift.serving.engine.main"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=MAX_LINE_BYTES,
    )


async def kill_process(process: asyncio.subprocess.Process | None) -> None:
    """Kill a process, and wait until it has ended."""
    if process is not None and process.returncode is None:
        process.kill()
        while process.stdout is not None and await process.stdout.read(2**16):  # asyncio sees no end while a pipe is full
            pass
        await process.wait()


class SpareProcess:
    """The spare process of one engine, or none. ``is_busy`` says whether the engine works."""

    def __init__(self, is_busy: Callable[[], bool]) -> None:
        self.resident_bytes = 0
        self._is_busy = is_busy
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None

    def prepare(self, request: EngineRequest) -> None:
        """Begin to keep a process, unless one is kept. It imports the modules of the request."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._keep(request))

    async def take(self) -> asyncio.subprocess.Process | None:
        """Return the process, which the engine may now start with. It may still import. None: there is none."""
        await self._end_task()
        process, self._process = self._process, None
        self.resident_bytes = 0
        return None if process is None or process.returncode is not None else process

    async def stop(self) -> None:
        await kill_process(await self.take())

    async def _end_task(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def _keep(self, request: EngineRequest) -> None:
        """Start a process, and start another one if it ends while it waits."""
        for _ in range(MAX_STARTS):
            await self._wait_for_pause()
            free_bytes = free_memory_bytes()
            if free_bytes < MIN_FREE_BYTES:
                logger.info("no spare process for %s: only %s of memory are free", request.model, format_bytes(free_bytes))
                return
            try:
                process = await open_engine_process()
            except OSError as error:  # such as too many processes, or open files
                logger.warning("no spare process for %s: it could not be started (%s)", request.model, error)
                return
            self._process = process
            await self._wait_for_end(process, request)
            self._process = None
            self.resident_bytes = 0
            logger.warning("the spare process for %s ended while it waited (exit code %s)", request.model, process.returncode)
        logger.warning("no spare process for %s: %d of them ended while they waited", request.model, MAX_STARTS)

    async def _wait_for_pause(self) -> None:
        last_busy = time.monotonic()
        deadline = last_busy + LONGEST_WAIT
        while (now := time.monotonic()) < min(last_busy + PAUSE_SECONDS, deadline):
            await asyncio.sleep(POLL_SECONDS)
            last_busy = now if self._is_busy() else last_busy

    async def _wait_for_end(self, process: asyncio.subprocess.Process, request: EngineRequest) -> None:
        """Send a new process its request, and return when the process has ended. Kill it if its answer is not understood."""
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(request.to_json().encode() + b"\n")
        try:
            message = FROM_ENGINE.validate_json(await process.stdout.readline())
        except (ValueError, ConnectionError):  # also without an answer, if the process has ended
            message = None
        if isinstance(message, SpareReady):
            self.resident_bytes = message.resident_bytes
            logger.info("a spare process for %s waits, with %s", request.model, format_bytes(message.resident_bytes))
            await process.wait()
        else:
            self._process = None
            await kill_process(process)
