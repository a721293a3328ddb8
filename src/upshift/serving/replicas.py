"""Run several engines of one model behind one name. Each engine has a share of the cores, or a GPU of its own.

Prompts with the same beginning go to the same engine, which caches what it computed (``PromptCache``). If another engine
has far less to do, the prompt goes there."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

from upshift.errors import UpshiftError
from upshift.serving.engine_process import EngineDied, EngineProcess, RequestRefused, State, TokenizedPrompt, Vectors
from upshift.serving.messages import (
    DescribeTokenizer,
    Detokenize,
    Embed,
    EngineRequest,
    Generate,
    Heartbeat,
    LoadAdapter,
    Piece,
    Ready,
    Tokenize,
    UnloadAdapter,
)

ROUTING_LENGTH = 256  # characters, or tokens, of a prompt's beginning that decide where it goes
BUSY = 429


class ReplicaSet:
    """The engines of one model, at least one.

    A request goes to the next engine if too many requests wait in the first one, or if that one dies before the first token."""

    def __init__(self, request: EngineRequest, count: int = 1) -> None:
        self.request = request
        self.last_used = 0.0
        self.engines = [EngineProcess(request.changed(replica=number, replicas=count)) for number in range(count)]

    def call_on_restart(self, callback: Callable[[float], None]) -> None:
        """Call ``callback`` after each restart of an engine, with the seconds that the engine was away."""
        for engine in self.engines:
            engine.on_restart = callback

    def keep_no_spares(self) -> None:
        """Keep no spare processes from now on. Their memory does not count as memory of the model."""
        for engine in self.engines:
            engine.keeps_spare = False

    @property
    def spare_bytes(self) -> int:
        """Return the bytes of the spare processes, which are not in ``heartbeat``."""
        return sum(engine.spare.resident_bytes for engine in self.engines)

    @property
    def state(self) -> State:
        """Return the best state that any engine has."""
        best_first: tuple[State, ...] = ("ready", "starting", "failed", "asleep")
        return next(state for state in best_first if any(engine.state == state for engine in self.engines))

    @property
    def has_failed(self) -> bool:
        """Return whether any engine has failed. The other engines go on."""
        return any(engine.state == "failed" for engine in self.engines)

    @property
    def pids(self) -> list[int | None]:
        return [engine.pid for engine in self.engines]

    @property
    def in_flight(self) -> int:
        """Return the number of open requests."""
        return sum(engine.in_flight for engine in self.engines)

    @property
    def heartbeat(self) -> Heartbeat:
        """Return the sums of the engines' last heartbeats."""
        heartbeats = [engine.heartbeat for engine in self.engines]
        return Heartbeat(
            live=sum(heartbeat.live for heartbeat in heartbeats),
            waiting=sum(heartbeat.waiting for heartbeat in heartbeats),
            resident_bytes=sum(heartbeat.resident_bytes for heartbeat in heartbeats),
        )

    @property
    def ready(self) -> Ready | None:
        """Return the report of the first ready engine with the rows, bytes and capacity of all ready engines together."""
        reports = [engine.ready for engine in self.engines if engine.state == "ready" and engine.ready is not None]
        if not reports:
            return None
        return reports[0].changed(
            replicas=len(reports),
            rows=sum(report.rows for report in reports),
            resident_bytes=sum(report.resident_bytes for report in reports),
            capacity=_sum_known([report.capacity for report in reports]),
            predicted_capacity=_sum_known([report.predicted_capacity for report in reports]),
        )

    async def start(self) -> Ready:
        """Start the engines. The first engine runs the race, and the others reuse its result. Raise the error of an
        engine that cannot start."""
        first, *others = self.engines
        await first.start()
        await asyncio.gather(*(engine.start() for engine in others))
        ready = self.ready
        if ready is None:
            raise EngineDied("the engine died as soon as it was ready; try again in a moment")
        return ready

    async def stop(self) -> None:
        """Stop all engines."""
        await asyncio.gather(*(engine.stop() for engine in self.engines))

    async def pieces(self, request: Generate) -> AsyncIterator[Piece]:
        """Yield the pieces of an answer, as ``EngineProcess.pieces`` does."""
        prompt = request.prompt
        engines = self._rank_engines(prompt if isinstance(prompt, str) else repr(prompt[:ROUTING_LENGTH]))
        for engine in engines:
            has_begun = False
            try:
                async with aclosing(engine.pieces(request)) as pieces:
                    async for piece in pieces:
                        has_begun = True
                        yield piece
                return
            except (RequestRefused, EngineDied) as error:
                if has_begun or engine is engines[-1] or not _may_ask_next(error):
                    raise

    async def vectors(self, request: Embed) -> Vectors:
        """Return the vectors of a request, as ``EngineProcess.vectors`` does."""
        engines = self._rank_engines("")
        for engine in engines[:-1]:
            try:
                return await engine.vectors(request)
            except (RequestRefused, EngineDied) as error:
                if not _may_ask_next(error):
                    raise
        return await engines[-1].vectors(request)

    async def tokens(self, request: Tokenize) -> TokenizedPrompt:
        """Return the tokens of a prompt, as ``EngineProcess.tokens`` does."""
        return await self._rank_engines("")[0].tokens(request)

    async def text(self, request: Detokenize | DescribeTokenizer) -> str:
        """Return the text of token ids, as ``EngineProcess.text`` does."""
        return await self._rank_engines("")[0].text(request)

    async def change_adapters(self, order: LoadAdapter | UnloadAdapter) -> None:
        """Load or unload an adapter in all engines, as ``EngineProcess.change_adapters`` does.

        If one engine rejects an adapter, all engines are without it."""
        try:
            for engine in self.engines:
                await engine.change_adapters(order)
        except UpshiftError:
            if isinstance(order, LoadAdapter):
                for engine in self.engines:
                    if order.name in engine.request.adapters:
                        await engine.change_adapters(UnloadAdapter(name=order.name))
            raise

    def _rank_engines(self, prompt: str) -> list[EngineProcess]:
        """Return the engines in the order in which they are offered a request.

        Without a ready engine, return the first engine alone. It rejects the request with its own error."""
        ready_engines = [engine for engine in self.engines if engine.state == "ready"] or self.engines[:1]
        preferred = ready_engines[zlib.crc32(prompt[:ROUTING_LENGTH].encode()) % len(ready_engines)]
        rows = preferred.ready.rows if preferred.ready is not None else 1
        ranking = sorted(ready_engines, key=lambda engine: engine.in_flight)
        if prompt and preferred.in_flight - ranking[0].in_flight <= rows // 2:
            ranking.remove(preferred)
            ranking.insert(0, preferred)
        return ranking


def _may_ask_next(error: RequestRefused | EngineDied) -> bool:
    """Return whether another engine may answer a request that failed with this error."""
    return isinstance(error, EngineDied) or error.status == BUSY


def _sum_known(values: list[float | None]) -> float | None:
    """Return the sum of the values that are known, or None if no value is."""
    known_values = [value for value in values if value is not None]
    return sum(known_values) if known_values else None
