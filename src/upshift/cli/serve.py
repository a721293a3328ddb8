"""Run ``upshift serve``: serve models by OpenAI's API, each with the engine that is fastest for the expected requests."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from upshift.cli import progress, tables
from upshift.cli.options import RaceSeconds, number_option
from upshift.cli.tables import dim
from upshift.errors import MissingExtra, RequestError
from upshift.units import GIB, format_seconds
from upshift.versions import installed_version

EXPECTED = "default: 128, or what the model has positions for"


def command(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="directories or hub ids; NAME=MODEL gives it a name")],
    host: Annotated[str, typer.Option("--host", help="address to listen on; 0.0.0.0: all of this machine")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: a free one")] = 8000,
    max_latency_ms: Annotated[float | None, typer.Option("--max-latency-ms", help="promise: longest to a first token")] = None,
    max_tpot_ms: Annotated[float | None, typer.Option("--max-tpot-ms", help="promise: longest for a token more")] = None,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, help="most answers that are computed at once")] = 8,
    prompts: Annotated[Path | None, typer.Option("--prompts", help="what to expect: a .txt or .jsonl file")] = None,
    prompt_length: Annotated[
        int | None, typer.Option("--prompt-length", min=1, help=f"tokens to expect, without --prompts; {EXPECTED}")
    ] = None,
    output_length: Annotated[
        int | None, typer.Option("--output-length", min=1, help=f"tokens of an answer to expect; {EXPECTED}")
    ] = None,
    replicas: Annotated[
        int | None, typer.Option("--replicas", min=1, help="engines of each model; unasked: one a GPU, or a NUMA node")
    ] = None,
    max_waiting: Annotated[int, typer.Option("--max-waiting", min=1, help="requests that wait; more get 429")] = 256,
    quality: Annotated[str, typer.Option(help="exact, or the lowest cosine to transformers in fp32: 0.999")] = "exact",
    engine: Annotated[str | None, typer.Option(help="only this engine; unasked, all installed ones race")] = None,
    max_memory: Annotated[float | None, number_option("--max-memory", "GiB of all engines together", least=0.1)] = None,
    request_seconds: Annotated[float, number_option("--request-seconds", "longest that an answer takes", least=0.1)] = 600.0,
    max_body_mb: Annotated[float, number_option("--max-body-mb", "largest request", least=0.001)] = 4.0,
    api_key_file: Annotated[Path | None, typer.Option("--api-key-file", help="a key a line; none: everybody may ask")] = None,
    race_seconds: RaceSeconds = None,
) -> None:
    """Race the installed engines for each MODEL, prove what they hold, then serve until SIGTERM or Ctrl-C."""
    _check_libraries()
    from upshift.inference.race.types import read_limit, read_seconds
    from upshift.serving.app import Limits
    from upshift.serving.messages import EngineRequest
    from upshift.serving.server import Address, serve

    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(name)s %(message)s")
    names = _models_by_name(models)
    requests = {
        name: EngineRequest(
            model=model, quality=quality, engine=engine,
            max_ttft_ms=read_limit("max-latency-ms", max_latency_ms), max_tpot_ms=read_limit("max-tpot-ms", max_tpot_ms),
            concurrency=concurrency, prompts=None if prompts is None else str(prompts.resolve()), prompt_length=prompt_length,
            output_length=output_length, max_waiting=max_waiting, race_seconds=read_seconds(race_seconds),
        )
        for name, model in names.items()
    }  # fmt: skip
    limits = Limits(request_seconds=request_seconds, body_bytes=int(max_body_mb * 1e6), keys=_read_keys(api_key_file))
    tables.err.print(f"Racing the installed engines for {', '.join(names)}; a race that was run before is remembered")
    with progress.activity(f"Starting {', '.join(names)}"):
        serve(
            requests, Address(host, port), limits, replicas=_num_replicas(replicas),
            memory_bytes=None if max_memory is None else int(max_memory * GIB),
            on_ready=_print_ready, on_open=_print_address,
        )  # fmt: skip


def _check_libraries() -> None:
    for library in ("fastapi", "uvicorn", "prometheus-client", "llguidance"):
        if installed_version(library) is None:
            raise MissingExtra(library=library, extra="serve", purpose="upshift serve")


def _num_replicas(requested: int | None) -> int:
    """Return the number of replicas of each model: as requested, or one a GPU, or without GPUs one a NUMA node.

    Memory of another NUMA node is slower. Raise RequestError for more replicas than GPUs, or than cores."""
    from upshift.hardware import detect

    host = detect()
    cores = host.cpu.usable_cores if host.cpu is not None else 1
    limit = host.gpus_per_node or cores
    if requested is not None and requested > limit:
        unit = "GPUs" if host.gpus_per_node else "cores"
        raise RequestError(f"--replicas {requested} is more than the {limit} {unit} of this machine; ask for at most {limit}")
    nodes = host.cpu.numa_nodes if host.cpu is not None and host.cpu.numa_nodes else 1
    return requested or host.gpus_per_node or min(nodes, cores)


def _models_by_name(models: list[str]) -> dict[str, str]:
    """Return the models by the names that clients use: NAME of NAME=MODEL, else that of the directory, or MODEL itself.

    An existing directory is never split, since its path may have an equals sign."""
    models_by_name: dict[str, str] = {}
    for text in models:
        name, separator, model = text.partition("=")
        if text and Path(text).is_dir():
            name = Path(text).resolve().name
            model = text
        elif not separator:
            model = text
        if not name or not model:
            raise RequestError(f"{text!r} is no model; write MODEL or NAME=MODEL")
        if name in models_by_name:
            raise RequestError(f"two models are called {name!r}; write NAME=MODEL for one of them")
        models_by_name[name] = model
    return models_by_name


def _read_keys(path: Path | None) -> tuple[str, ...]:
    if path is None:
        return ()
    try:
        keys = tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read --api-key-file {path}: {error}; give a file with a key a line") from None
    if not keys:
        raise RequestError(f"--api-key-file {path} has no key; write a key a line")
    return keys


def _print_address(url: str) -> None:
    progress.stop()  # from here on it waits for requests
    tables.err.print(f"Serving at {url}  (OpenAI's API at {url}/v1, chat at {url}/)", soft_wrap=True)


def _print_ready(name: str, ready: Any) -> None:
    stages = ", ".join(f"{stage} {format_seconds(seconds)}" for stage, seconds in ready.seconds.items())
    engines = f" in {ready.replicas} engines" if ready.replicas > 1 else ""
    tables.err.print(f"{name}: {ready.setup}, {ready.rows} at once{engines} ({stages})")
    if ready.task == "generate":
        predicted = "" if ready.predicted_capacity is None else f" (predicted {ready.predicted_capacity:.2f})"
        dim(
            f"holds {ready.capacity:.2f} requests/s of the expected lengths{predicted}; "
            f"first token of a prompt alone {ready.ttft_ms:.0f} ms, then one in {ready.tpot_ms:.0f} ms with all rows filled",
            tables.err,
        )
    else:
        dim(f"encodes {ready.capacity:,.0f} texts/s", tables.err)
