"""Run the process of one engine: ``python -m upshift.serving.engine.main``.

The first line of the input is an EngineRequest. After it, the process reads requests and writes answers, one JSON message
per line, until its input ends. It imports no web server, and the web server imports no torch."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from typing import Any, TextIO

from upshift.errors import RequestError, UpshiftError
from upshift.hardware import detect
from upshift.hardware.cpu_affinity import bind_process
from upshift.importing import importing
from upshift.serving.messages import TO_ENGINE, EngineRequest, Failed, Ready
from upshift.settings import quiet_libraries, take_gpu, wait_briefly
from upshift.value import Value


def main() -> None:
    start = time.perf_counter()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends this process after it has answered its requests
    quiet_libraries()
    wait_briefly()
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    request = EngineRequest.from_json(sys.stdin.readline(), origin="the engine's request")
    if request.replicas > 1:
        _take_share(request)

    def send(messages: list[Value]) -> None:
        _write_messages(output, messages, start)

    try:
        with importing():
            from upshift.inference.weights import find_weights

            run_engine = _select_engine(find_weights(request.model), request)
    except UpshiftError as error:
        send([Failed(why=str(error), exit_code=error.exit_code)])
        return
    inbox: queue.Queue[Any] = queue.Queue()
    threading.Thread(target=_read_requests, args=(inbox,), daemon=True).start()
    try:
        run_engine(request, inbox, send)
    except UpshiftError as error:
        send([Failed(why=str(error), exit_code=error.exit_code)])


def _take_share(request: EngineRequest) -> None:
    """Take the replica's share of the cores, or a GPU of its own, before any library asks for the devices."""
    if detect().gpus_per_node:
        take_gpu(request.replica)
    else:
        bind_process(request.replica, request.replicas)


def _select_engine(source: Any, request: EngineRequest) -> Any:
    """Return the function that serves a model of this kind: ``serve_embeddings`` or ``serve_texts``."""
    from upshift.inference.encoding.model_config import is_encoder, read_encoding_config
    from upshift.inference.generation.model import generation_task

    if is_encoder(source):
        config = read_encoding_config(source)
        if config.output != "embeddings":
            raise RequestError(f"{source.reference!r} gives {config.output}, which no address of OpenAI's is for") from None
        if request.options:
            shown = ", ".join(request.options)
            raise RequestError(
                f"--set gives {shown} to models that generate, and {source.reference!r} encodes texts; leave it out"
            )
        from upshift.serving.engine.embedding import serve_embeddings

        return serve_embeddings
    generation_task(source)
    from upshift.serving.engine.generation import serve_texts

    return serve_texts


def _read_requests(inbox: queue.Queue[Any]) -> None:
    """Put the requests of the input into the inbox, and None at its end or after an error."""
    try:
        for line in sys.stdin:
            inbox.put(TO_ENGINE.validate_json(line))
    finally:
        inbox.put(None)


def _write_messages(output: TextIO, messages: list[Value], start: float) -> None:
    """Write messages to the server. Add the seconds of importing since ``start`` to the Ready message."""
    if not messages:
        return
    lines = []
    for message in messages:
        if isinstance(message, Ready):
            measured_seconds = sum(message.seconds.values())
            importing_seconds = time.perf_counter() - start - measured_seconds
            message = message.changed(seconds={"importing": importing_seconds, **message.seconds})
        lines.append(message.to_json() + "\n")
    output.write("".join(lines))
    output.flush()


if __name__ == "__main__":
    main()
