"""``upshift``: one command per thing a user wants. Exit codes: 0 done, 1 the job failed, 2 wrong request, 3 nothing fits."""

from __future__ import annotations

import sys

import click
import typer

from upshift.cli import demo, encode, generate, inspect, plan, quantize, train
from upshift.errors import UpshiftError
from upshift.settings import quiet_libraries

app = typer.Typer(
    name="upshift",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Finds, proves and runs the fastest setup that fits, for any Hugging Face transformer.",
)
app.command("plan")(plan.command)
app.command("train")(train.command)
app.command("encode")(encode.command)
app.command("generate")(generate.command)
app.command("quantize")(quantize.command)
app.command("inspect")(inspect.command)
app.command("demo")(demo.command)


def main() -> None:
    quiet_libraries()
    try:
        code = app(standalone_mode=False)
    except UpshiftError as error:
        print(f"upshift: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(0)
    except click.ClickException as error:
        error.show(file=sys.stderr)
        sys.exit(2)
    except (KeyboardInterrupt, click.exceptions.Abort):
        print("upshift: interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
