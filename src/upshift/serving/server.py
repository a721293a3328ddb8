"""Run ``upshift serve``: start the engines, then open the addresses. After SIGTERM, answer the open requests first."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import uvicorn

from upshift.errors import RequestError
from upshift.inference.weights import weights_size
from upshift.models.source import find_model
from upshift.serving.app import Limits, Server, make_app
from upshift.serving.messages import EngineRequest, Ready
from upshift.serving.metrics import Metrics
from upshift.serving.model_pool import Served
from upshift.serving.replicas import Replicas

DRAIN_SECONDS = 30
MOST_CONNECTIONS = 1024
OF_PORTS = (errno.EADDRINUSE, errno.EACCES)


@dataclass(frozen=True)
class Address:
    host: str = "127.0.0.1"
    port: int = 8000


def serve(
    requests: Mapping[str, EngineRequest],
    address: Address,
    limits: Limits,
    *,
    replicas: int = 1,
    memory_bytes: int | None = None,
    on_ready: Callable[[str, Ready], None] = lambda name, ready: None,
    on_open: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve models until a signal ends the server.

    ``requests`` maps the names that clients use to engine requests. ``replicas`` is the number of engines of each
    model. Raise the error that keeps an engine from starting."""
    listening = _listen(address)  # a port that is taken is told before minutes of racing
    metrics = Metrics()
    engines = {name: Replicas(one, replicas) for name, one in requests.items()}
    limited = {} if memory_bytes is None else requests
    sizes = {name: replicas * _least_bytes(one) for name, one in limited.items()}
    server = Server(Served(engines, metrics, sizes, memory_bytes), metrics, limits)
    logging.getLogger("upshift.serving").setLevel(logging.INFO)
    config = uvicorn.Config(
        make_app(server), access_log=False, log_config=None, timeout_graceful_shutdown=DRAIN_SECONDS,
        limit_concurrency=MOST_CONNECTIONS, timeout_keep_alive=30, ws="none", server_header=False,
    )  # fmt: skip
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:  # uvloop, where it is installed
        runner.run(_serve(server, config, listening, on_ready, on_open))


async def _serve(
    server: Server,
    config: uvicorn.Config,
    listening: socket.socket,
    on_ready: Callable[[str, Ready], None],
    on_open: Callable[[str], None],
) -> None:
    ended = asyncio.Event()
    _end_by_signals(ended)
    starting, ending = asyncio.create_task(server.served.start()), asyncio.create_task(ended.wait())
    try:
        await asyncio.wait({starting, ending}, return_when=asyncio.FIRST_COMPLETED)
        if ended.is_set():
            starting.cancel()
            return
        starting.result()
        for name, engine in server.served.engines.items():
            if engine.ready is not None:
                on_ready(name, engine.ready)
        on_open(f"http://{_said(*listening.getsockname()[:2])}")
        await uvicorn.Server(config).serve(sockets=[listening])
    finally:
        ending.cancel()
        await server.served.stop()


def _least_bytes(request: EngineRequest) -> int:
    """Return the least bytes that an engine of the model takes: its files' size, or a quarter where fp32 may become 8
    bits."""
    return weights_size(find_model(request.model)) // (1 if request.quality == "exact" else 4)


def _end_by_signals(ended: asyncio.Event) -> None:
    """Set ``ended`` at SIGTERM and SIGINT before uvicorn takes signals over, and when uvicorn gives them back.
    Uvicorn raises again the signal that ended it, which is no failure."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(ended.set))


def _listen(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        listening = socket.create_server((address.host, address.port), family=family, backlog=2048)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        host = "--host: an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all"
        option = "--port" if getattr(error, "errno", None) in OF_PORTS else host
        raise RequestError(f"cannot listen on {_said(address.host, address.port)}: {why}; choose another {option}") from None
    listening.setblocking(False)
    return listening


def _said(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
