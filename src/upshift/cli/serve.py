"""Run ``upshift serve``: serve models by OpenAI's API, each with the engine that is fastest for the expected requests."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from upshift.cli import progress, tables
from upshift.cli.options import (
    ApiKeyFile,
    Engine,
    EnginePython,
    EngineSettings,
    GenerationSettings,
    MaxTpot,
    MaxTtft,
    OutputLength,
    PromptLength,
    Quality,
    RaceSeconds,
    TensorParallel,
    argument,
    check_existing_folder,
    check_new_folder,
    option,
    read_api_keys,
    read_generation_settings,
    read_settings_of,
)
from upshift.cli.tables import dim
from upshift.cli.usage.commands import HelpCommand
from upshift.cli.usage.help_page import Panel
from upshift.errors import MissingExtra, RequestError
from upshift.serving.messages import EngineRequest
from upshift.units import GIB, format_seconds
from upshift.versions import installed_version

DEFAULT_CONCURRENCY = 8
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[A-Za-z0-9._~:\[\]-]+")
ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+")


def _check_origins(origins: list[str]) -> list[str]:
    """Return origins of web pages. Raise RequestError for a text that no browser sends as an origin."""
    for origin in origins:
        if origin != "*" and not ORIGIN.fullmatch(origin):
            raise RequestError(
                f"--allow-origin {origin!r} is no origin; write a scheme and a host without a path, such as https://example.org, "
                "or * for all pages"
            )
    return origins


def _check_root_path(path: str) -> str:
    """Return the path of a proxy. Raise RequestError if it does not begin with a slash, or ends with one."""
    if path and not ROOT_PATH.fullmatch(path):
        raise RequestError(f"--root-path {path!r} is no path of a proxy; write one such as /llm, without a slash at its end")
    return path


def _check_traces_endpoint(url: str) -> str:
    """Return the address of a collector. Raise RequestError if it is none, or if a library is missing that sends to it."""
    try:
        address = urlsplit(url)
        is_address = address.scheme in ("http", "https") and bool(address.hostname) and address.port != 0
    except ValueError:  # a port that is no number up to 65,535, or a host in brackets that is no IPv6 address
        is_address = False
    if not is_address:
        raise RequestError(
            f"--otlp-traces-endpoint {url!r} is no address; write the address by which the collector takes traces by HTTP, such "
            "as http://localhost:4318/v1/traces"
        )
    for library in ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http", "opentelemetry-instrumentation-asgi"):
        if installed_version(library) is None:
            raise MissingExtra(library=library, extra="traces", purpose="--otlp-traces-endpoint")
    return url


def _check_template(template: str) -> str:
    """Return the text of a chat template. Raise RequestError if it cannot be read."""
    from upshift.training.data.data_options import read_chat_template

    return read_chat_template(template)


Models = Annotated[
    list[str],
    argument("MODEL...", "One or several models: folders or model ids. NAME=MODEL gives a model a name for clients."),
]
ListenHost = Annotated[
    str,
    option(
        "--host", text="The address to listen on. 0.0.0.0 listens on all networks of this machine.", panel=Panel.SERVER,
        metavar="ADDRESS",
    ),
]  # fmt: skip
Port = Annotated[
    int,
    option(
        "--port", text="The port to listen on. 0 takes a free one.", panel=Panel.SERVER, metavar="N", least=0, most=65535
    ),
]  # fmt: skip
Concurrency = Annotated[
    int | None,
    option(
        "--concurrency", text="The most answers to compute at once.", panel=Panel.SERVER, metavar="N",
        default=str(DEFAULT_CONCURRENCY), least=1,
    ),
]  # fmt: skip
AllowOrigin = Annotated[
    list[str] | None,
    option(
        "--allow-origin", panel=Panel.SERVER, metavar="ORIGIN", default="none", check=_check_origins,
        text="Allow the web pages of a site to use the server, such as https://example.org. * allows all pages.",
    ),
]  # fmt: skip
RootPath = Annotated[
    str,
    option(
        "--root-path", panel=Panel.SERVER, metavar="PATH", default="none", check=_check_root_path,
        text="The path under which a proxy offers the server, such as /llm.",
    ),
]  # fmt: skip
TracesEndpoint = Annotated[
    str | None,
    option(
        "--otlp-traces-endpoint", panel=Panel.SERVER, metavar="URL", default="no traces", check=_check_traces_endpoint,
        text="Send a trace of each request to this address of an OpenTelemetry collector, such as "
        "http://localhost:4318/v1/traces.",
    ),
]  # fmt: skip
SslCertfile = Annotated[
    Path | None,
    option(
        "--ssl-certfile", text="A certificate in a PEM file. The server then uses HTTPS.", panel=Panel.SERVER, metavar="PATH",
        default="HTTP",
    ),
]  # fmt: skip
SslKeyfile = Annotated[
    Path | None,
    option(
        "--ssl-keyfile", text="The private key of the certificate, in a PEM file.", panel=Panel.SERVER, metavar="PATH",
        default="in the certificate's file",
    ),
]  # fmt: skip
ChatTemplate = Annotated[
    str | None,
    option(
        "--chat-template", panel=Panel.SERVER, metavar="FILE", default="the model's own", check=_check_template,
        text="The template of chats: a Jinja file, its text, or a name (chatml).",
    ),
]  # fmt: skip
AllowSpecial = Annotated[
    bool,
    option(
        "--allow-special", panel=Panel.SERVER,
        text="Read control tokens in the messages of a chat as such. Without it, they are plain text.",
    ),
]  # fmt: skip
Adapters = Annotated[
    list[str] | None,
    option(
        "--adapter", panel=Panel.SERVER, metavar="NAME=FOLDER", default="none",
        text="Serve a LoRA adapter without merging it. Requests name it as their model. Repeat it for several adapters.",
    ),
]  # fmt: skip
AdapterFolder = Annotated[
    Path | None,
    option(
        "--adapter-folder", panel=Panel.SERVER, metavar="FOLDER", default="clients load none",
        check=partial(check_existing_folder, "--adapter-folder"),
        text="Let clients load adapters from this folder, and unload them, while the server runs.",
    ),
]  # fmt: skip
ImageFolder = Annotated[
    Path | None,
    option(
        "--image-folder", panel=Panel.SERVER, metavar="FOLDER", default="no files are read",
        check=partial(check_existing_folder, "--image-folder"),
        text="Let messages name pictures of this folder, by file: URLs with absolute paths.",
    ),
]  # fmt: skip
BatchFolder = Annotated[
    Path | None,
    option(
        "--batch-folder", panel=Panel.SERVER, metavar="FOLDER", default="no batches",
        check=partial(check_new_folder, "--batch-folder"),
        text="Take OpenAI's batches (/v1/files, /v1/batches), and keep their files in this folder.",
    ),
]  # fmt: skip
Prompts = Annotated[
    Path | None,
    option(
        "--prompts", text="Typical prompts, on which the engines are tested: a .txt or .jsonl file.", panel=Panel.TEXT,
        metavar="PATH", default="made-up prompts",
    ),
]  # fmt: skip
Replicas = Annotated[
    int | None,
    option(
        "--replicas", text="Engines of each model.", panel=Panel.SERVER, metavar="N", default="one for each GPU or NUMA node",
        least=1,
    ),
]  # fmt: skip
MaxWaiting = Annotated[
    int,
    option(
        "--max-waiting", text="The most requests that wait. The server rejects more with status 429.", panel=Panel.LIMITS,
        metavar="N", least=1,
    ),
]  # fmt: skip
TotalMemory = Annotated[
    float | None,
    option(
        "--total-memory", panel=Panel.LIMITS, metavar="GIB", default="no limit", least=0.1,
        text="The memory of all engines together, in GiB. If it is full, the model that was used least recently is unloaded.",
    ),
]  # fmt: skip
RequestSeconds = Annotated[
    float,
    option(
        "--request-seconds", text="The longest time of one request, in seconds.", panel=Panel.LIMITS, metavar="SECONDS", least=0.1
    ),
]  # fmt: skip
MaxBodyMb = Annotated[
    float,
    option("--max-body-mb", text="The largest request, in megabytes.", panel=Panel.LIMITS, metavar="MB", least=0.001),
]

FOR_TEXTS = {  # options that only models use which generate, by name
    "max_tpot_ms": "--max-tpot-ms", "output_length": "--output-length", "concurrency": "--concurrency",
    "chat_template": "--chat-template",
    "engine_python": "--engine-python", "engine_settings": "--engine-set",
}  # fmt: skip
NOT_OF_A_SERVER = {  # options of generation
    "seed": "each request has a seed of its own",
    "prompt_lookup_num_tokens": "a server computes several texts at once, and one text alone can look tokens up",
}


def command(
    models: Models,
    host: ListenHost = "127.0.0.1",
    port: Port = 8000,
    max_ttft_ms: MaxTtft = None,
    max_tpot_ms: MaxTpot = None,
    concurrency: Concurrency = None,
    prompts: Prompts = None,
    prompt_length: PromptLength = None,
    output_length: OutputLength = None,
    settings: GenerationSettings = None,
    replicas: Replicas = None,
    tensor_parallel: TensorParallel = None,
    max_waiting: MaxWaiting = 256,
    quality: Quality = "exact",
    engine: Engine = None,
    engine_python: EnginePython = None,
    engine_settings: EngineSettings = None,
    adapter: Adapters = None,
    adapter_folder: AdapterFolder = None,
    batch_folder: BatchFolder = None,
    image_folder: ImageFolder = None,
    total_memory: TotalMemory = None,
    request_seconds: RequestSeconds = 600.0,
    max_body_mb: MaxBodyMb = 4.0,
    api_key_file: ApiKeyFile = None,
    chat_template: ChatTemplate = None,
    allow_special: AllowSpecial = False,
    allow_origin: AllowOrigin = None,
    root_path: RootPath = "",
    otlp_traces_endpoint: TracesEndpoint = None,
    ssl_certfile: SslCertfile = None,
    ssl_keyfile: SslKeyfile = None,
    race_seconds: RaceSeconds = None,
) -> None:
    """Serve models with an OpenAI-compatible API. Tests the installed engines, uses the fastest one, and stops at Ctrl-C."""
    given = dict(locals())
    _check_prompts(prompts, prompt_length)
    _check_libraries()
    from upshift.hardware.replicas import count_replicas
    from upshift.inference.engine_environment import choose_environment
    from upshift.serving.server import serve

    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(name)s %(message)s")
    names = models_by_name(models)
    requests = _engine_requests(names, given)
    request = next(iter(requests.values()))
    environment = choose_environment(engine, engine_python, request.engine_arguments, tensor_parallel=request.tensor_parallel)
    ranks = request.tensor_parallel if environment is None else environment.arguments.ranks
    limits = _make_limits(request_seconds, max_body_mb, api_key_file, adapter_folder, batch_folder)
    address = _make_address(host, port, ssl_certfile, ssl_keyfile, root_path, allow_origin)
    if engine is None:
        tables.err.print(f"Racing the installed engines for {', '.join(names)}; a race that was run before is remembered")
    with progress.activity(f"Starting {', '.join(names)}"):
        serve(
            requests, address, limits, replicas=count_replicas(replicas, devices=ranks),
            memory_bytes=None if total_memory is None else int(total_memory * GIB), generation_options=_typed_for_texts(given),
            traces_endpoint=otlp_traces_endpoint, on_ready=_print_ready, on_open=_print_address,
        )  # fmt: skip


def _read_adapters(pairs: list[str]) -> dict[str, Path]:
    """Return the folders of adapters by their names. Raise RequestError for a text that is none, or a name that comes twice."""
    adapters: dict[str, Path] = {}
    for pair in pairs:
        name, _, folder = pair.partition("=")
        if not name or not folder:
            raise RequestError(f"--adapter {pair!r} is no adapter; write NAME=FOLDER, with the name that requests will use")
        if name in adapters:
            raise RequestError(f"--adapter {pair}: two adapters are called {name!r}; give one of them another name")
        adapters[name] = Path(folder)
    return adapters


def _assign_adapters(
    folders: Mapping[str, Path], names: Mapping[str, str], adapter_folder: Path | None, engine: str | None, tensor_parallel: int
) -> dict[str, dict[str, str]]:
    """Return the folders of adapters by the names of their models, then by their own names."""
    from upshift.serving.adapter_files import assign_adapters, check_engine_of_adapters

    adapters = assign_adapters(folders, names)
    if adapters or adapter_folder is not None:
        check_engine_of_adapters(engine, loads_later=adapter_folder is not None, tensor_parallel=tensor_parallel)
    return adapters


def _make_address(
    host: str, port: int, certificate: Path | None, private_key: Path | None, root_path: str, origins: list[str] | None
) -> Any:
    from upshift.serving.app import Site
    from upshift.serving.server import Address

    return Address(host, port, certificate, private_key, Site(root_path, tuple(origins or ())))


def _make_limits(
    request_seconds: float, max_body_mb: float, api_key_file: Path | None, adapter_folder: Path | None, batch_folder: Path | None
) -> Any:
    from upshift.serving.request_checks import Limits

    return Limits(
        request_seconds=request_seconds,
        body_bytes=int(max_body_mb * 1e6),
        keys=() if api_key_file is None else read_api_keys(api_key_file),
        adapter_folder=adapter_folder,
        batch_folder=_make_folder(batch_folder),
    )


def _make_folder(folder: Path | None) -> Path | None:
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RequestError(f"--batch-folder {folder} cannot be made: {error.strerror}; give another folder") from None
    return folder


def _engine_requests(names: Mapping[str, str], given: Mapping[str, Any]) -> dict[str, EngineRequest]:
    """Return the requests of the engines by the names of the models. ``given``: the options of the command by name."""
    from upshift.inference.adapters import check_adapters
    from upshift.inference.race.types import read_limit, read_seconds

    same = ("quality", "engine", "prompt_length", "output_length", "max_waiting", "allow_special", "chat_template")
    tensor_parallel = given["tensor_parallel"] or 1
    folders = _read_adapters(given["adapter"] or [])
    adapters = _assign_adapters(folders, names, given["adapter_folder"], given["engine"], tensor_parallel)
    if given["engine"] == "vllm":
        check_adapters([folder for folders in adapters.values() for folder in folders.values()])
    prompts: Path | None = given["prompts"]
    engine_python: Path | None = given["engine_python"]
    image_folder: Path | None = given["image_folder"]
    engine_settings = given["engine_settings"] or []
    fields: dict[str, Any] = {
        **{name: given[name] for name in same},
        "engine_python": None if engine_python is None else str(engine_python),
        "tensor_parallel": tensor_parallel,
        "engine_arguments": read_settings_of("--engine-set", engine_settings, example="tensor_parallel_size=2"),
        "max_ttft_ms": read_limit("max-ttft-ms", given["max_ttft_ms"]),
        "max_tpot_ms": read_limit("max-tpot-ms", given["max_tpot_ms"]),
        "concurrency": given["concurrency"] or DEFAULT_CONCURRENCY,
        "prompts": None if prompts is None else str(prompts.resolve()),
        "image_folder": None if image_folder is None else str(image_folder.resolve()),
        "race_seconds": read_seconds(given["race_seconds"]),
        "options": _read_settings(given["settings"] or []),
        "generation_options": _typed_for_texts(given) if len(names) == 1 else (),
    }
    takes_any = given["adapter_folder"] is not None
    return {
        name: EngineRequest(model=model, takes_adapters=takes_any or name in adapters, adapters=adapters.get(name, {}), **fields)
        for name, model in names.items()
    }


def _typed_for_texts(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the options that the user typed and that only models use which generate."""
    return tuple(option for name, option in FOR_TEXTS.items() if given[name] is not None)


def parse(words: Sequence[str]) -> Any:
    """Parse the words that follow ``upshift serve`` into a context of typer. Raise RequestError for wrong options.

    The ``params`` of the result are the options by name."""
    app = typer.Typer(add_completion=False)
    app.command("serve", cls=HelpCommand)(command)
    return typer.main.get_command(app).make_context("upshift serve", list(words))


def _check_prompts(prompts: Path | None, prompt_length: int | None) -> None:
    if prompts is not None and prompt_length is not None:
        raise RequestError(
            f"--prompt-length {prompt_length} is of the prompts that the server expects, and --prompts {prompts} has them; leave "
            "one of them out"
        )


def _check_libraries() -> None:
    for library in ("fastapi", "uvicorn", "prometheus-client", "llguidance"):
        if installed_version(library) is None:
            raise MissingExtra(library=library, extra="serve", purpose="upshift serve")


def _read_settings(pairs: list[str]) -> dict[str, Any]:
    """Return the options of generation for all requests. Raise RequestError for one that a server does not use."""
    options = read_generation_settings(pairs)
    for name, reason in NOT_OF_A_SERVER.items():
        if options.get(name) is not None:
            raise RequestError(f"--set {name}={json.dumps(options[name])} is not possible here: {reason}; leave it out")
    return options


def models_by_name(models: list[str]) -> dict[str, str]:
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
            f"first token after {ready.ttft_ms:.0f} ms if nothing else runs, "
            f"each further token {ready.tpot_ms:.0f} ms under full load",
            tables.err,
        )
    else:
        dim(f"encodes {ready.capacity:,.0f} texts/s", tables.err)
