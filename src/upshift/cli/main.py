"""The command line ``upshift``. Exit codes: 0 done, 1 the job failed, 2 wrong request, 3 nothing fits, 130 interrupted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import typer

from upshift.cli import (
    bench,
    checkpoint,
    data,
    demo,
    doctor,
    encode,
    generate,
    inspect,
    launch,
    load_test,
    profile,
    quantize,
    serve,
    tables,
    train,
    tune,
    xla,
)
from upshift.cli.machine import engines
from upshift.cli.plan import command as plan
from upshift.cli.progress import progress_lines
from upshift.cli.usage.commands import HelpCommand, HelpGroup
from upshift.cli.usage.messages import MissingValue
from upshift.disk_full import FREE_SOME, disk_full_message
from upshift.errors import JobFailed, MissingExtra, RequestError, UpshiftError
from upshift.settings import count_gpus_by_bus, quiet_libraries, read_ranks
from upshift.versions import extra_with

INTERRUPTED = 130

app = typer.Typer(
    name="upshift",
    cls=HelpGroup,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="\n".join(
        (
            "upshift demo                                             # see it work",
            "upshift plan Qwen/Qwen3-8B --lora-rank 16 --on rtx-4090  # does it fit?",
            "upshift train Qwen/Qwen3-0.6B --data chats.jsonl         # fine-tune",
        )
    ),
)


def _print_version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version

        print(f"upshift {version('upshift')}")
        raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")] = False,
) -> None:
    """Upshift picks the fastest training or inference setup that fits your hardware, and runs it."""


class Entry(NamedTuple):
    """A command of ``upshift``: its name, its function, the group of the help page, and examples."""

    name: str
    function: Callable[..., None]
    panel: str
    examples: tuple[str, ...]


TRAIN, RUN, LOOK, WRITE, MACHINE = ("Train", "Run a model", "Look", "Write a model again", "Machine")
COMMANDS = (
    Entry("plan", plan.command, TRAIN, (
        "upshift plan Qwen/Qwen3-8B --on rtx-4090 --lora-rank 16",
        "upshift plan Qwen/Qwen3-8B --on 8xh100 --html plan.html",
        "upshift plan Qwen/Qwen3-8B --on rtx-4090 --generate",
    )),
    Entry("train", train.command, TRAIN, (
        "upshift train Qwen/Qwen3-0.6B --data chats.jsonl --output trained",
        "upshift train Qwen/Qwen3-8B --data chats.jsonl --lora-rank 16",
        "upshift train Qwen/Qwen3-0.6B --data chats.jsonl --output trained --resume",
    )),
    Entry("tune", tune.command, TRAIN, (
        "upshift tune Qwen/Qwen3-0.6B --data chats.jsonl --space space.yaml --trials 20",
    )),
    Entry("launch", launch.command, TRAIN, (
        "upshift launch --slurm --nodes 2 --gpus 8 -- train MODEL --data chats.jsonl",
        "upshift launch --hosts a,b -- train MODEL --data chats.jsonl",
    )),
    Entry("generate", generate.command, RUN, (
        'upshift generate Qwen/Qwen3-0.6B --chat --prompt "What is a GPU?"',
        "upshift generate Qwen/Qwen3-0.6B --prompts prompts.txt --output answers.jsonl",
    )),
    Entry("encode", encode.command, RUN, (
        "upshift encode BAAI/bge-small-en-v1.5 --input texts.txt --output vectors.npy",
    )),
    Entry("serve", serve.command, RUN, (
        "upshift serve Qwen/Qwen3-0.6B",
        "upshift serve Qwen/Qwen3-0.6B --max-ttft-ms 500",
    )),
    Entry("load-test", load_test.command, RUN, ("upshift load-test http://127.0.0.1:8000 --rate 1,2,4",)),
    Entry("inspect", inspect.command, LOOK, (
        "upshift inspect Qwen/Qwen3-8B",
        "upshift inspect Qwen/Qwen3-8B --placement --max-memory cpu=8GiB",
    )),
    Entry("profile", profile.command, LOOK, ("upshift profile -- train Qwen/Qwen3-0.6B --data chats.jsonl",)),
    Entry("compare-runs", doctor.compare_runs_command, LOOK, ("upshift compare-runs trained trained-again",)),
    Entry("convert", checkpoint.convert_command, WRITE, ("upshift convert trained --dtype bfloat16 --output trained-bf16",)),
    Entry("merge", checkpoint.merge_command, WRITE, ("upshift merge trained --output merged",)),
    Entry("quantize", quantize.command, WRITE, ("upshift quantize trained --bits 4 --texts texts.txt --output small",)),
    Entry("shard", checkpoint.shard_command, WRITE, ("upshift shard trained --max-shard-size 2GB --output sharded",)),
    Entry("doctor", doctor.command, MACHINE, (
        "upshift doctor --quick",
        "upshift doctor upshift-output",
        "upshift doctor --hosts a,b",
    )),
    Entry("demo", demo.command, MACHINE, ("upshift demo", "upshift demo --quick")),
)  # fmt: skip

for entry in COMMANDS:
    register = app.command(entry.name, cls=HelpCommand, rich_help_panel=entry.panel, epilog="\n".join(entry.examples))
    register(entry.function)
app.add_typer(bench.app, name="bench", rich_help_panel=MACHINE)
app.add_typer(data.app, name="data", rich_help_panel=WRITE)
app.add_typer(engines.app, name="engines", rich_help_panel=MACHINE)
app.add_typer(xla.app, name="xla", rich_help_panel=MACHINE)


def _shows_progress() -> bool:
    """Return whether this process shows progress: of several ranks, the first one.

    A command that trains refuses unclear ranks by itself. The others do not care.
    """
    try:
        ranks = read_ranks()
    except RequestError:
        return True
    return ranks is None or ranks.rank == 0


def _run(title: str) -> Any:
    """Run the command and return its exit code. Raise MissingExtra for a library of Upshift that is not installed.

    Commands import large libraries where they need them, so any place may be the first to miss one."""
    try:
        return app(standalone_mode=False)
    except ModuleNotFoundError as error:
        found = extra_with(error.name or "")
        if found is None:
            raise
        library, extra = found
        raise MissingExtra(library=library, extra=extra, purpose=title) from error


def main() -> None:
    """Run the command, print errors in one line each, and exit."""
    quiet_libraries()
    count_gpus_by_bus()
    title = " ".join(["upshift", *sys.argv[1:2]])
    try:
        with progress_lines(title, tables.err, is_enabled=_shows_progress()):
            code = _run(title)
    except UpshiftError as error:
        if isinstance(error, MissingValue) and error.page:
            typer.echo(error.page, err=True)
        if str(error):  # an error without a message: another rank prints it
            print(f"upshift: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except Exception as error:  # any library may raise it; a full disk is no bug, so it needs no traceback
        reason = disk_full_message(error)
        if reason is None:
            raise
        print(f"upshift: a file could not be written ({reason}); {FREE_SOME}", file=sys.stderr)
        sys.exit(JobFailed.exit_code)
    if code == INTERRUPTED:
        print("upshift: interrupted", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
