"""Load models when requests ask for them. Unload the least recently used models when memory runs out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from upshift.errors import JobFailed, RequestError, UpshiftError
from upshift.serving.messages import Ready
from upshift.serving.metrics import Metrics
from upshift.serving.replicas import ReplicaSet
from upshift.units import format_bytes, format_seconds

logger = logging.getLogger(__name__)


class NoRoom(JobFailed):
    """The model does not fit into memory at the moment."""


@dataclass
class ModelPool:
    """The engines of all models that a server offers, some of them loaded.

    Loading and unloading are tasks of the pool. They go on when the client whose request began them leaves. ``engines`` holds the
    engines by model name. ``memory_bytes`` is the memory limit of all engines together, or None for no limit. ``sizes`` holds the
    bytes that a model is expected to take at least. The first load of a model replaces its expected bytes by the measured
    bytes."""

    engines: dict[str, ReplicaSet]
    metrics: Metrics
    sizes: dict[str, int] = field(default_factory=dict)
    memory_bytes: int | None = None
    adapters: dict[str, str] = field(default_factory=dict)  # names of their models, by the names of the adapters
    _load_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _users: dict[str, int] = field(default_factory=dict)
    _loads: dict[str, asyncio.Task[None]] = field(default_factory=dict)  # that load or unload a model now, by its name

    def __post_init__(self) -> None:
        for name, engine in self.engines.items():
            engine.call_on_restart(partial(self._record_restart, name))
            if self.memory_bytes is not None:
                engine.keep_no_spares()
            self.adapters |= dict.fromkeys(engine.request.adapters, name)

    @property
    def names(self) -> list[str]:
        """Return all names that a request may ask for: of models, and of adapters."""
        return [*self.engines, *self.adapters]

    @asynccontextmanager
    async def using(self, name: str) -> AsyncIterator[ReplicaSet]:
        """Yield the loaded engine of a model. The engine stays loaded within the context."""
        engine = self.engines[name]
        self._users[name] = self._users.get(name, 0) + 1
        try:
            while engine.state != "ready":  # it may die again before this request goes on
                await self._wait_for_load(name)
            engine.last_used = time.monotonic()
            yield engine
        finally:
            self._users[name] -= 1

    async def start(self) -> None:
        """Start the engines in their order, as many as fit into memory. Raise the error of an engine that cannot start."""
        for name in self.engines:
            self._check_size(name)
        async with AsyncExitStack() as contexts:  # in use, so that a later model cannot unload an earlier one
            for name in self.engines:
                with suppress(NoRoom):
                    await contexts.enter_async_context(self.using(name))

    async def unload(self, name: str) -> None:
        """Unload a model. Raise RequestError if requests use it, or if it is being loaded."""
        unload = self.begin_unload(name)
        if unload is not None:
            await asyncio.wait({unload})
        if unload is None or self.engines[name].state != "asleep":
            raise RequestError(f"{name} is used by other requests, and stays loaded; unload it when they have ended")

    def begin_unload(self, name: str) -> asyncio.Task[None] | None:
        """Begin to unload a model, and return the task. Return None if requests use the model, or if it is being loaded."""
        if name in self._loads or self._users.get(name):
            return None
        return self._begin(name, self._unload(name))

    async def stop(self) -> None:
        """Cancel the loads that run, and stop all engines."""
        loads = list(self._loads.values())
        for load in loads:
            load.cancel()
        if loads:
            await asyncio.wait(loads)
        await asyncio.gather(*(engine.stop() for engine in self.engines.values()))

    def update_gauges(self) -> None:
        """Set the gauges of the metrics to the present values."""
        for name, engine in self.engines.items():
            self.metrics.in_flight.labels(name).set(engine.in_flight)
            self.metrics.record_sequences(name, live=engine.heartbeat.live, waiting=engine.heartbeat.waiting)
            self.metrics.resident.labels(name).set(self._loaded_bytes(name))

    async def _wait_for_load(self, name: str) -> None:
        """Wait until a load of the model has ended, and begin one if none runs. Raise the load's error."""
        load = self._loads.get(name)
        if load is None:
            load = self._begin(name, self._load(name))
        await asyncio.wait({load})  # which does not cancel the load if it is itself canceled
        if load.cancelled():
            raise JobFailed(f"the server stops, and does not load {name}; ask another server")
        load.result()

    def _begin(self, name: str, change: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start the task of a model that loads or unloads it."""
        task = asyncio.create_task(change)
        task.add_done_callback(partial(self._end_load, name))
        self._loads[name] = task
        return task

    async def _unload(self, name: str) -> None:
        """Unload a model, unless a request has begun to use it meanwhile."""
        async with self._load_lock:
            if self.engines[name].state != "asleep" and not self._users.get(name):
                await self.engines[name].stop()

    def _end_load(self, name: str, load: asyncio.Task[None]) -> None:
        """Forget a load that has ended. Log its error if no request waits for it."""
        del self._loads[name]
        error = None if load.cancelled() else load.exception()
        if error is not None and not self._users.get(name):
            logger.error("%s could not be loaded: %s", name, error)

    async def _load(self, name: str) -> None:
        async with self._load_lock:
            engine = self.engines[name]
            needs_room = engine.state in ("asleep", "failed")
            start = time.monotonic()
            if needs_room:
                await self._make_room(name)
            try:
                ready = await engine.start()
            except UpshiftError:
                if needs_room and engine.state != "failed":  # some of its replicas may run
                    await engine.stop()
                raise
            self.sizes[name] = ready.resident_bytes
            if not needs_room:
                return
            self._record_start(name, time.monotonic() - start, ready)
            try:
                await self._make_room(name)
            except UpshiftError:  # the model takes more memory than expected
                await engine.stop()
                raise

    async def _make_room(self, name: str) -> None:
        """Unload idle models until the model ``name`` fits.

        Raise RequestError if the model is larger than the limit, and NoRoom if the models in use leave too little
        memory. In both cases no model is unloaded."""
        self._check_size(name)
        while (excess := self._excess_bytes(name)) > 0:
            idle = [
                other
                for other, engine in self.engines.items()
                if other != name and engine.state == "ready" and not self._users.get(other)
            ]
            if excess > sum(map(self._loaded_bytes, idle)):
                raise NoRoom(f"{name} has no room beside the models that are answering now; try again later")
            least_recent = min(idle, key=lambda other: self.engines[other].last_used)
            await self.engines[least_recent].stop()

    def _excess_bytes(self, name: str) -> int:
        """Return the bytes above the limit if the model ``name`` is loaded too. Return 0 without a limit."""
        if self.memory_bytes is None:
            return 0
        other_bytes = sum(self._loaded_bytes(other) for other in self.engines if other != name)
        return self._size(name) + other_bytes - self.memory_bytes

    def _check_size(self, name: str) -> None:
        """Raise RequestError if the model alone is larger than the limit."""
        if self.memory_bytes is not None and self._size(name) > self.memory_bytes:
            raise RequestError(
                f"{name} takes {format_bytes(self._size(name))} of memory or more, and --total-memory allows "
                f"{format_bytes(self.memory_bytes)}; allow more, or serve it elsewhere"
            )

    def _size(self, name: str) -> int:
        """Return the bytes that the model takes now, or its expected bytes if it is not loaded."""
        return self._loaded_bytes(name) or self.sizes.get(name, 0)

    def _loaded_bytes(self, name: str) -> int:
        """Return the bytes that the model takes now, or 0 if it is not loaded. An engine that starts counts as large as it is
        expected to become, also as one of several."""
        engine = self.engines[name]
        if engine.state not in ("ready", "starting"):
            return 0
        ready_bytes = engine.ready.resident_bytes if engine.ready is not None else 0
        return max(engine.heartbeat.resident_bytes, ready_bytes, self.sizes.get(name, 0))

    def _record_restart(self, name: str, seconds: float) -> None:
        self.metrics.restarts.labels(name).inc()
        self.metrics.restart.labels(name).set(seconds)
        ready = self.engines[name].ready
        assert ready is not None
        self._record_start(name, seconds, ready)

    def _record_start(self, name: str, seconds: float, ready: Ready) -> None:
        durations = ", ".join(f"{phase} {format_seconds(duration)}" for phase, duration in ready.seconds.items())
        logger.info("%s is ready after %s: %s", name, format_seconds(seconds), durations)
        for phase, duration in ready.seconds.items():
            self.metrics.start.labels(name, phase).set(duration)
