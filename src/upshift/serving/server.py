"""Run ``upshift serve``: start the engines, then accept requests. After SIGTERM, answer the open requests and stop."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import uvicorn

from upshift.errors import RequestError
from upshift.inference.generation.prompts import check_prompts
from upshift.inference.weights import find_weights, weights_size
from upshift.loading.output_lock import LOCK_NAME, OutputLock
from upshift.models.source import find_model
from upshift.serving.app import Server, Site, make_app
from upshift.serving.connections import ConnectionLimit, LimitedConnection
from upshift.serving.messages import EngineRequest, Ready
from upshift.serving.metrics import Metrics
from upshift.serving.model_pool import ModelPool
from upshift.serving.replicas import ReplicaSet
from upshift.serving.request_checks import Limits
from upshift.serving.request_traces import RequestTraces, make_provider

DRAIN_SECONDS = 30
PORT_ERRORS = (errno.EADDRINUSE, errno.EACCES)  # errors that another port may solve


@dataclass(frozen=True)
class Address:
    """The address that the server listens on. Port 0 stands for a free port.

    With ``certificate``, the server speaks HTTPS. ``private_key`` is a file, or None if the certificate's file has the key."""

    host: str = "127.0.0.1"
    port: int = 8000
    certificate: Path | None = None
    private_key: Path | None = None
    site: Site = field(default_factory=Site)


def serve(
    requests: Mapping[str, EngineRequest],
    address: Address,
    limits: Limits,
    *,
    replicas: int = 1,
    memory_bytes: int | None = None,
    generation_options: Sequence[str] = (),
    traces_endpoint: str | None = None,
    on_ready: Callable[[str, Ready], None] = lambda name, ready: None,
    on_open: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve models until a signal ends the server. Raise the error of an engine that cannot start.

    Args:
        requests: engine requests by the model names that clients use.
        address: the address to listen on.
        limits: limits of requests, and the API keys.
        replicas: number of engines of each model.
        memory_bytes: memory of all engines together. None sets no limit.
        generation_options: options of the user that only models that generate use.
        traces_endpoint: the address of a collector of OpenTelemetry. None sends no traces.
        on_ready: receives the name and the report of each engine that has started.
        on_open: receives the URL when the server accepts requests.
    """
    _check_certificate(address)  # report what is wrong before a race that takes minutes
    listener = _listen(address)
    for request in requests.values():
        _check_request(request)
    metrics = Metrics()
    engines = {name: ReplicaSet(request, replicas) for name, request in requests.items()}
    sizes: dict[str, int] = {}
    if memory_bytes is not None:
        sizes = {name: replicas * _min_engine_bytes(request) for name, request in requests.items()}
    traces = None if traces_endpoint is None else RequestTraces(make_provider(traces_endpoint))
    server = Server(ModelPool(engines, metrics, sizes, memory_bytes), metrics, limits, traces=traces)
    logging.getLogger("upshift.serving").setLevel(logging.INFO)
    app = make_app(server, address.site)
    config = make_config(app if traces is None else traces.wrap(app), limits, address)
    runner = asyncio.Runner(loop_factory=config.get_loop_factory())  # uvloop, where it is installed
    with runner, holding(limits.batch_folder):
        try:
            runner.run(_run_server(server, config, listener, generation_options, on_ready, on_open))
        finally:
            if traces is not None:
                traces.close()


def make_config(app: Any, limits: Limits, address: Address) -> uvicorn.Config:
    """Return the settings of uvicorn for an application."""
    connections: set[LimitedConnection] = set()
    connection = partial(
        LimitedConnection,
        header_seconds=limits.header_seconds,
        header_bytes=limits.header_bytes,
        connections=connections,
    )
    return uvicorn.Config(
        ConnectionLimit(app, limits.connections, connections),
        http=cast(Any, connection),
        access_log=False,
        ssl_certfile=address.certificate,
        ssl_keyfile=address.private_key,
        log_config=None,
        timeout_graceful_shutdown=DRAIN_SECONDS,
        timeout_keep_alive=30,
        ws="none",
        server_header=False,
    )


@contextmanager
def holding(folder: Path | None) -> Iterator[None]:
    """Hold a folder of batches while open. Raise RequestError if another server holds it."""
    lock = None if folder is None else OutputLock(folder, folder / LOCK_NAME)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


async def _run_server(
    server: Server,
    config: uvicorn.Config,
    listener: socket.socket,
    generation_options: Sequence[str],
    on_ready: Callable[[str, Ready], None],
    on_open: Callable[[str], None],
) -> None:
    """Start the engines, then run uvicorn. A signal stops either of them."""
    stop_requested = asyncio.Event()
    with stopping_on_signals(stop_requested):
        start_task = asyncio.create_task(server.pool.start())
        stop_task = asyncio.create_task(stop_requested.wait())
        try:
            await asyncio.wait({start_task, stop_task}, return_when=asyncio.FIRST_COMPLETED)
            if stop_requested.is_set():
                start_task.cancel()
                return
            start_task.result()
            _check_options_are_used(server.pool, generation_options)
            for name, engine in server.pool.engines.items():
                if engine.ready is not None:
                    on_ready(name, engine.ready)
            host, port = listener.getsockname()[:2]
            on_open(f"{'https' if config.is_ssl else 'http'}://{_format_address(host, port)}")
            await uvicorn.Server(config).serve(sockets=[listener])
        finally:
            stop_task.cancel()
            await server.pool.stop()


def _check_options_are_used(pool: ModelPool, generation_options: Sequence[str]) -> None:
    """Raise RequestError for options of generation if all models encode."""
    tasks = {engine.ready.task if engine.ready is not None else "unknown" for engine in pool.engines.values()}
    if generation_options and tasks <= {"encode", "score"}:
        shown = " and ".join(generation_options)
        raise RequestError(f"only models that generate take {shown}, and all models here encode texts; leave this out")


def _min_engine_bytes(request: EngineRequest) -> int:
    """Return a lower bound of an engine's memory: the size of the weight files, or a quarter of it where fp32 weights
    may become 8-bit weights."""
    divisor = 1 if request.quality == "exact" else 4
    return weights_size(find_model(request.model)) // divisor


def _check_request(request: EngineRequest) -> None:
    """Raise RequestError if the model of an engine, or its file of expected prompts, cannot be found. Download no weights."""
    if request.prompts is not None:
        check_prompts(Path(request.prompts), "--prompts")
    find = find_weights if Path(request.model).exists() else find_model
    find(request.model)


@contextmanager
def stopping_on_signals(stop_requested: asyncio.Event) -> Iterator[None]:
    """Set ``stop_requested`` at SIGTERM and SIGINT while open, and then restore the handlers of before.

    These handlers act before uvicorn installs its own, and after uvicorn has restored them. Uvicorn raises the signal
    that ended it once more, and these handlers keep that signal from ending the process as a failure."""
    loop = asyncio.get_running_loop()
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in previous:
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(stop_requested.set))
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: the handler was not set by Python


def _check_certificate(address: Address) -> None:
    """Raise RequestError if the certificate and its key cannot be used."""
    if address.certificate is None:
        if address.private_key is not None:
            raise RequestError(f"--ssl-keyfile {address.private_key} is the key of a certificate; give --ssl-certfile, too")
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(address.certificate, address.private_key, password=_refuse_password)
    except (OSError, ValueError) as error:
        shown_key = "" if address.private_key is None else f" with --ssl-keyfile {address.private_key}"
        raise RequestError(
            f"--ssl-certfile {address.certificate}{shown_key} cannot be used: {error}; give a certificate and its key, without a "
            "password, as PEM files"
        ) from None


def _refuse_password() -> str:
    raise ValueError("the key has a password")


def _listen(address: Address) -> socket.socket:
    """Return a listening socket. Raise RequestError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        listener = socket.create_server((address.host, address.port), family=family, backlog=2048)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        option = "--host: an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all"
        if getattr(error, "errno", None) in PORT_ERRORS:
            option = "--port"
        shown_address = _format_address(address.host, address.port)
        raise RequestError(f"cannot listen on {shown_address}: {reason}; choose another {option}") from None
    listener.setblocking(False)
    return listener


def _format_address(host: str, port: int) -> str:
    """Return ``host:port``, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
