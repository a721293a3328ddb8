"""The command line ``upshift``. Exit codes: 0 done, 1 the job failed, 2 wrong request, 3 nothing fits, 130 interrupted."""

from __future__ import annotations

import sys
from typing import Annotated, Any

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
from upshift.cli.plan import command as plan
from upshift.cli.progress import progress_lines
from upshift.disk_full import FREE_SOME, disk_full_message
from upshift.errors import JobFailed, UpshiftError
from upshift.settings import count_gpus_by_bus, quiet_libraries, read_ranks

UsageError: Any = typer.BadParameter.__bases__[0]  # click's, or that of the copy of click in newer versions of typer
INTERRUPTED = 130

app = typer.Typer(
    name="upshift",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version

        print(f"upshift {version('upshift')}")
        raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print it and stop")] = False,
) -> None:
    """Finds, proves and runs the fastest setup that fits, for any Hugging Face transformer."""


app.command("plan")(plan.command)
app.command("train")(train.command)
app.command("tune")(tune.command)
app.command("launch")(launch.command)
app.command("encode")(encode.command)
app.command("generate")(generate.command)
app.command("quantize")(quantize.command)
app.command("serve")(serve.command)
app.command("load-test")(load_test.command)
app.command("doctor")(doctor.command)
app.command("compare-runs")(doctor.compare_runs_command)
app.command("profile")(profile.command)
app.command("inspect")(inspect.command)
app.command("shard")(checkpoint.shard_command)
app.command("merge")(checkpoint.merge_command)
app.command("convert")(checkpoint.convert_command)
app.command("demo")(demo.command)
app.add_typer(bench.app, name="bench")
app.add_typer(xla.app, name="xla")
app.add_typer(data.app, name="data")


def main() -> None:
    """Run the command, print errors in one line each, and exit."""
    quiet_libraries()
    count_gpus_by_bus()
    ranks = read_ranks()
    title = " ".join(["upshift", *sys.argv[1:2]])
    try:
        with progress_lines(title, tables.err, is_enabled=ranks is None or ranks.rank == 0):
            code = app(standalone_mode=False)
    except UpshiftError as error:
        if str(error):  # an error without a message: another rank prints it
            print(f"upshift: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except UsageError as error:
        if len(sys.argv) == 1:  # the error is the help text
            error.show()
            sys.exit(0)
        path = error.ctx.command_path if error.ctx else "upshift"
        print(f"upshift: {error.format_message().rstrip('.')}; see {path} --help", file=sys.stderr)
        sys.exit(2)
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
