"""Run the process of one engine: ``python -m upshift.serving.engine.main``.

The first line of the input is an EngineRequest. After it, the process reads requests and writes answers, one JSON message
per line, until its input ends. It imports no web server, and the web server imports no torch.

A spare process has an EngineRequest with modules in the first line. It imports them, and waits for the second EngineRequest."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
import traceback
from functools import partial
from typing import Any, TextIO

from upshift.benchmarking.meters import resident_bytes
from upshift.errors import EngineEnded, RequestError, UpshiftError
from upshift.hardware.replicas import take_share
from upshift.importing import importing
from upshift.inference.engine_environment import read_arguments
from upshift.inference.engine_errors import describe_error
from upshift.serving.messages import (
    MAX_LINE_BYTES,
    TO_ENGINE,
    EngineRequest,
    Failed,
    Generate,
    Heartbeat,
    Imported,
    Ready,
    Refused,
    SpareReady,
)
from upshift.serving.spare.imports import import_modules, imported_modules
from upshift.settings import quiet_libraries, wait_briefly
from upshift.value import Value

OPENAI_FIELDS = {  # by the names of the options of generation that an error may have
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sequence_bias": "logit_bias",
}


def main() -> None:
    start = time.perf_counter()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends this process after it has answered its requests
    quiet_libraries()
    wait_briefly()
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    request = _read_start()
    if request.replicas > 1:
        devices = read_arguments(request.engine_arguments).ranks * request.tensor_parallel
        take_share(request.replica, request.replicas, devices=devices)
    if request.modules:
        import_modules(request.modules)
        output.write(write_line(SpareReady(resident_bytes=resident_bytes())))
        output.flush()
        request = _read_start()
        start = time.perf_counter()
    known_modules = set(sys.modules)

    server_texts = [request.model]  # that no client may see
    is_ready = threading.Event()

    def send(messages: list[Value]) -> None:
        if any(isinstance(message, Ready) for message in messages):
            is_ready.set()
        _write_messages(output, [hide_server(message, server_texts) for message in messages], start, known_modules)

    try:
        with importing():
            from upshift.inference.weights import find_weights

            source = find_weights(request.model)
            run_engine = _select_engine(source, request)
            if source.directory is not None:
                server_texts.append(str(source.directory))
    except UpshiftError as error:
        send([Failed(why=str(error), exit_code=error.exit_code)])
        return
    inbox: queue.Queue[Any] = queue.Queue()
    threading.Thread(target=_read_requests, args=(inbox,), daemon=True).start()
    try:
        run_engine(request, inbox, send)
    except Exception as error:  # of any library
        if isinstance(error, EngineEnded) or is_ready.is_set():  # the server starts this process again, as if it had been killed
            sys.stderr.write(describe_end(error))
            sys.stderr.flush()
            os._exit(1)  # at once: clients wait until the server sees the end, and libraries take seconds to end
        if not isinstance(error, UpshiftError):
            raise
        send([Failed(why=str(error), exit_code=error.exit_code)])


def describe_end(error: Exception) -> str:
    """Return what the log has of the error that ended an engine: where it came from, and what it is in the last line."""
    has_origin = not isinstance(error, UpshiftError) or error.__cause__ is not None
    origin = "".join(traceback.format_exception(error)) if has_origin else ""
    return f"{origin}{describe_error(error)}\n"


def _read_start() -> EngineRequest:
    """Return the request to start with. End the process if the server does not need it any longer."""
    line = sys.stdin.readline()
    if not line:
        sys.exit()
    return EngineRequest.from_json(line, origin="the engine's request")


def _select_engine(source: Any, request: EngineRequest) -> Any:
    """Return the function that serves a model of this kind: ``serve_embeddings``, of texts or of pairs, or ``serve_texts``."""
    from upshift.inference.encoding.model_config import is_encoder, read_encoding_config
    from upshift.inference.generation.model import generation_task

    if is_encoder(source):
        config = read_encoding_config(source)
        is_cross_encoder = config.output == "class scores" and source.hf_config.num_labels == 1
        if config.output != "embeddings" and not is_cross_encoder:
            raise RequestError(
                f"{source.reference!r} gives {config.output}, which no address is for; serve a model that generates, one that "
                "gives embeddings, or a cross-encoder with one label"
            )
        if request.options:
            shown = ", ".join(request.options)
            raise RequestError(
                f"--set gives {shown} to models that generate, and {source.reference!r} encodes texts; leave it out"
            )
        if request.adapters:
            raise RequestError(
                f"--adapter {next(iter(request.adapters))} needs a model that generates, and {source.reference!r} encodes "
                "texts; merge it into the model (upshift merge)"
            )
        if request.generation_options:
            shown = " and ".join(request.generation_options)
            raise RequestError(f"only models that generate take {shown}, and {source.reference!r} encodes texts; leave this out")
        from upshift.serving.engine.embedding import serve_embeddings

        return partial(serve_embeddings, reads_pairs=is_cross_encoder)
    generation_task(source)
    from upshift.serving.engine.generation import serve_texts

    return serve_texts


def _read_requests(inbox: queue.Queue[Any]) -> None:
    """Put the requests of the input into the inbox, and None at its end or after an error."""
    try:
        for line in sys.stdin:
            message = TO_ENGINE.validate_json(line)
            if isinstance(message, Generate):  # it may wait for a pass before the engine takes it
                message = message.model_copy(update={"arrival": time.perf_counter()})
            inbox.put(message)
    finally:
        inbox.put(None)


def _write_messages(output: TextIO, messages: list[Value], start: float, known_modules: set[str]) -> None:
    """Write messages to the server.

    Two fields of the Ready message are added here: the seconds of importing since ``start``, and the number of modules that were
    imported after ``known_modules``. An Imported message with the names of all modules follows it."""
    if not messages:
        return
    lines = []
    for message in messages:
        if isinstance(message, Ready):
            measured_seconds = sum(message.seconds.values())
            importing_seconds = time.perf_counter() - start - measured_seconds
            seconds = {"importing": importing_seconds, **message.seconds}
            message = message.changed(seconds=seconds, late_imports=len(set(sys.modules) - known_modules))
            lines += [write_line(message), write_line(Imported(modules=imported_modules()))]
        else:
            lines.append(write_line(message))
    output.write("".join(lines))
    output.flush()


def hide_server(message: Value, server_texts: list[str]) -> Value:
    """Return a refusal in words that a client understands: without paths of the server, and with the names of OpenAI's fields.

    ``server_texts`` are the model's path and its directory. Other messages are returned as they are."""
    if not isinstance(message, Refused):
        return message
    why = message.why
    for text in server_texts:
        why = why.replace(repr(text), "the model")
        if os.sep in text:
            why = why.replace(text, "the model")
    for name, field in OPENAI_FIELDS.items():
        why = why.replace(name, field)
    return message.changed(why=why)


def write_line(message: Value) -> str:
    """Return a message as a line that the server can read.

    A longer line would end the engine for all requests, and so would a text that JSON cannot hold. In its place, the request of
    the message is rejected."""
    try:
        line = message.to_json() + "\n"
    except ValueError as error:  # pydantic's kind for a text that is no Unicode
        return Refused.from_error(getattr(message, "id", 0), error).to_json() + "\n"
    if len(line.encode()) <= MAX_LINE_BYTES:
        return line
    assert not isinstance(message, Ready | Failed | Heartbeat), "these have no text of a client"
    reason = f"a part of the answer is larger than {MAX_LINE_BYTES:,} bytes; ask for less of it"
    refused = Refused(id=getattr(message, "id", 0), status=500, why=reason, failure="OverflowError")
    return refused.to_json() + "\n"


if __name__ == "__main__":
    main()
