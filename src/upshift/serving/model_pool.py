"""Load models when requests ask for them. Unload the least recently used ones when memory runs out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

from upshift.errors import JobFailed, RequestError, UpshiftError
from upshift.serving.messages import Ready
from upshift.serving.metrics import Metrics
from upshift.serving.replicas import Replicas
from upshift.units import format_bytes, format_seconds

logger = logging.getLogger(__name__)


class NoRoom(JobFailed):
    """The model has no room in memory for now."""


@dataclass
class Served:
    """The models that are served.

    ``memory_bytes``: the limit of all engines together. None: no limit. ``sizes``: the least bytes that a model is
    expected to take before its first load. After it, the measured bytes replace them."""

    engines: dict[str, Replicas]
    metrics: Metrics
    sizes: dict[str, int] = field(default_factory=dict)
    memory_bytes: int | None = None
    _loading: asyncio.Lock = field(default_factory=asyncio.Lock)
    _users: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, engine in self.engines.items():
            engine.on_restart(partial(self._restarted, name))

    @asynccontextmanager
    async def using(self, name: str) -> AsyncIterator[Replicas]:
        """Yield a model's engine, ready. The engine is not unloaded meanwhile."""
        engine = self.engines[name]
        self._users[name] = self._users.get(name, 0) + 1
        try:
            if engine.state != "ready":
                await self._load(name)
            engine.last_used = time.monotonic()
            yield engine
        finally:
            self._users[name] -= 1

    async def start(self) -> None:
        """Start as many engines as have room, in their order. Raise the error that keeps one from starting."""
        for name in self.engines:
            self._check_size(name)
        async with AsyncExitStack() as started:  # in use, so that none makes room for a later one
            for name in self.engines:
                with suppress(NoRoom):
                    await started.enter_async_context(self.using(name))

    async def stop(self) -> None:
        await asyncio.gather(*(engine.stop() for engine in self.engines.values()))

    def observe(self) -> None:
        """Set the gauges when they are read."""
        for name, engine in self.engines.items():
            self.metrics.in_flight.labels(name).set(engine.in_flight)
            self.metrics.live.labels(name).set(engine.beat.live)
            self.metrics.waiting.labels(name).set(engine.beat.waiting)
            self.metrics.resident.labels(name).set(self._held(name))

    async def _load(self, name: str) -> None:
        async with self._loading:
            engine = self.engines[name]
            asleep, start = engine.state == "asleep", time.monotonic()
            if asleep:
                await self._make_room(name)
            ready = await engine.start()
            self.sizes[name] = ready.resident_bytes
            if not asleep:
                return
            self._started(name, time.monotonic() - start, ready)
            try:
                await self._make_room(name)
            except UpshiftError:  # it takes more than was expected
                await engine.stop()
                raise

    async def _make_room(self, name: str) -> None:
        """Unload idle models until the model fits. Raise RequestError if it is too large for the limit, and NoRoom if
        busy models leave no room. Then no model is unloaded."""
        self._check_size(name)
        while (excess := self._excess(name)) > 0:
            others = {one: engine for one, engine in self.engines.items() if one != name}
            idle = [one for one, engine in others.items() if engine.state == "ready" and not self._users.get(one)]
            if excess > sum(map(self._held, idle)):
                raise NoRoom(f"{name} has no room beside the models that are answering now; try again later")
            await self.engines[min(idle, key=lambda one: self.engines[one].last_used)].stop()

    def _excess(self, name: str) -> int:
        """Return the bytes above the limit if this model is loaded. Without a limit, return 0."""
        if self.memory_bytes is None:
            return 0
        return self._size(name) + sum(self._held(one) for one in self.engines if one != name) - self.memory_bytes

    def _check_size(self, name: str) -> None:
        if self.memory_bytes is not None and self._size(name) > self.memory_bytes:
            raise RequestError(
                f"{name} takes {format_bytes(self._size(name))} of memory or more, and --max-memory allows "
                f"{format_bytes(self.memory_bytes)}; allow more, or serve it elsewhere"
            )

    def _size(self, name: str) -> int:
        return self._held(name) or self.sizes.get(name, 0)

    def _held(self, name: str) -> int:
        engine = self.engines[name]
        if engine.state not in ("ready", "starting"):
            return 0
        if engine.ready is None:
            return self.sizes.get(name, 0)
        return max(engine.beat.resident_bytes, engine.ready.resident_bytes)

    def _restarted(self, name: str, seconds: float) -> None:
        self.metrics.restarts.labels(name).inc()
        self.metrics.restart.labels(name).set(seconds)
        ready = self.engines[name].ready
        assert ready is not None
        self._started(name, seconds, ready)

    def _started(self, name: str, seconds: float, ready: Ready) -> None:
        parts = ", ".join(f"{part} {format_seconds(took)}" for part, took in ready.seconds.items())
        logger.info("%s is ready after %s: %s", name, format_seconds(seconds), parts)
        for part, took in ready.seconds.items():
            self.metrics.start.labels(name, part).set(took)
