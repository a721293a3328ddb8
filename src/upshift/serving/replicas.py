"""Run several engines of one model behind one name, each with a part of the cores or a GPU of its own.

Prompts with the same beginning go to the same engine, which keeps what it computed (prompt_cache.py), unless another
engine has far less to do."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

from upshift.serving.engine_client import EngineProcess, RequestRefused, State, Vectors
from upshift.serving.messages import Beat, Embed, EngineRequest, Generate, Piece, Ready

ALIKE = 256  # characters, or tokens, that prompts begin with
BUSY = 429


class Replicas:
    """The engines of one model, at least one. A request that one engine rejects because too many wait goes to the
    others."""

    def __init__(self, request: EngineRequest, count: int = 1) -> None:
        self.request, self.last_used = request, 0.0
        self.engines = [EngineProcess(request.changed(replica=number, replicas=count)) for number in range(count)]

    def on_restart(self, tell: Callable[[float], None]) -> None:
        for engine in self.engines:
            engine.on_restart = tell

    @property
    def state(self) -> State:
        """Return the state of the engine that is best off."""
        states: tuple[State, ...] = ("ready", "starting", "failed", "asleep")
        return next(state for state in states if any(engine.state == state for engine in self.engines))

    @property
    def failed(self) -> bool:
        """Return whether any engine has failed. The other engines go on."""
        return any(engine.state == "failed" for engine in self.engines)

    @property
    def pids(self) -> list[int | None]:
        return [engine.pid for engine in self.engines]

    @property
    def in_flight(self) -> int:
        return sum(engine.in_flight for engine in self.engines)

    @property
    def beat(self) -> Beat:
        live, waiting, held = (
            sum(getattr(engine.beat, name) for engine in self.engines) for name in ("live", "waiting", "resident_bytes")
        )
        return Beat(live=live, waiting=waiting, resident_bytes=held)

    @property
    def ready(self) -> Ready | None:
        """Return rows, bytes and capacity of all engines together, and the rest as the first engine reported it."""
        said = [engine.ready for engine in self.engines if engine.ready is not None]
        if not said:
            return None
        capacities = [one.capacity for one in said if one.capacity is not None]
        return said[0].changed(
            replicas=len(said), rows=sum(one.rows for one in said), resident_bytes=sum(one.resident_bytes for one in said),
            capacity=sum(capacities) if capacities else None,
        )  # fmt: skip

    async def start(self) -> Ready:
        """Start the engines. The first one races, and the others reuse its result. Raise the error that keeps one
        from starting."""
        first, *others = self.engines
        await first.start()
        await asyncio.gather(*(engine.start() for engine in others))
        ready = self.ready
        assert ready is not None
        return ready

    async def stop(self) -> None:
        await asyncio.gather(*(engine.stop() for engine in self.engines))

    async def pieces(self, asked: Generate) -> AsyncIterator[Piece]:
        """Yield the pieces of an answer, as ``EngineProcess.pieces`` does."""
        prompt = asked.prompt
        *others, last = self._order(prompt if isinstance(prompt, str) else repr(prompt[:ALIKE]))
        for engine in others:
            try:
                async with aclosing(engine.pieces(asked)) as pieces:
                    async for piece in pieces:
                        yield piece
                return
            except RequestRefused as refused:
                if refused.status != BUSY:
                    raise
        async with aclosing(last.pieces(asked)) as pieces:
            async for piece in pieces:
                yield piece

    async def vectors(self, asked: Embed) -> Vectors:
        """Return the vectors of a request, as ``EngineProcess.vectors`` does."""
        *others, last = self._order("")
        for engine in others:
            try:
                return await engine.vectors(asked)
            except RequestRefused as refused:
                if refused.status != BUSY:
                    raise
        return await last.vectors(asked)

    def _order(self, beginning: str) -> list[EngineProcess]:
        """Return the engines in the order in which they get the request. If none is ready, return the first one,
        which reports that itself."""
        able = [engine for engine in self.engines if engine.state == "ready"] or self.engines[:1]
        home = able[zlib.crc32(beginning[:ALIKE].encode()) % len(able)]
        rows = home.ready.rows if home.ready is not None else 1
        order = sorted(able, key=lambda engine: engine.in_flight)
        if beginning and home.in_flight - order[0].in_flight <= rows // 2:
            order.remove(home)
            order.insert(0, home)
        return order
