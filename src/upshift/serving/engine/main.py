"""Run the process of one engine: ``python -m upshift.serving.engine.main``.

The first line of input is an EngineRequest. Then the process reads requests and writes answers, line by line, until
its input ends. It imports no web server, and the web server imports no torch."""

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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends it, when its requests are answered
    quiet_libraries()
    wait_briefly()
    said = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever libraries print is not among the answers
    request = EngineRequest.from_json(sys.stdin.readline(), origin="the engine's request")
    if request.replicas > 1:
        _take_share(request)

    def tell(values: list[Value]) -> None:
        _tell(said, values, start)

    try:
        with importing():
            from upshift.inference.weights import find_weights

            serve = _serving(find_weights(request.model))
    except UpshiftError as error:
        tell([Failed(why=str(error), exit_code=error.exit_code)])
        return
    inbox: queue.Queue[Any] = queue.Queue()
    threading.Thread(target=_read, args=(inbox,), daemon=True).start()
    try:
        serve(request, inbox, tell)
    except UpshiftError as error:
        tell([Failed(why=str(error), exit_code=error.exit_code)])


def _take_share(request: EngineRequest) -> None:
    """Take the replica's share of the cores, or a GPU of its own, before a library asks which devices there are."""
    if detect().gpus_per_node:
        take_gpu(request.replica)
    else:
        bind_process(request.replica, request.replicas)


def _serving(source: Any) -> Any:
    """Return the function that serves a model of this kind: ``embed`` or ``generate``."""
    from upshift.inference.encoding.model_config import is_encoder, read_recipe
    from upshift.inference.generation.model import generation_task

    if is_encoder(source):
        found = read_recipe(source)
        if found.output != "embeddings":
            raise RequestError(f"{source.reference!r} gives {found.output}, which no address of OpenAI's is for") from None
        from upshift.serving.engine.embedding import embed

        return embed
    generation_task(source)
    from upshift.serving.engine.generation import generate

    return generate


def _read(inbox: queue.Queue[Any]) -> None:
    try:
        for line in sys.stdin:
            inbox.put(TO_ENGINE.validate_json(line))
    finally:
        inbox.put(None)  # whatever ends it: nobody hears any more


def _tell(said: TextIO, values: list[Value], start: float) -> None:
    if values:
        lines = []
        for value in values:
            if isinstance(value, Ready):
                told = sum(value.seconds.values())
                value = value.changed(seconds={"importing": time.perf_counter() - start - told, **value.seconds})
            lines.append(value.to_json() + "\n")
        said.write("".join(lines))
        said.flush()


if __name__ == "__main__":
    main()
