"""Run ``upshift engines install``, which makes a Python environment for an engine that cannot share ours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from upshift.cli import progress, tables
from upshift.cli.options import argument, option
from upshift.cli.usage.commands import HelpCommand, HelpGroup
from upshift.cli.usage.help_page import Panel
from upshift.errors import RequestError

NAMES = ("vllm",)
app = typer.Typer(
    cls=HelpGroup, no_args_is_help=True, help="Install an engine that runs in a Python environment of its own.",
    epilog="upshift engines install vllm",
)  # fmt: skip
Name = Annotated[str, argument("ENGINE", "The engine: vllm.")]
Output = Annotated[
    Path | None,
    option(
        "--output", "-o", text="The folder of the environment.", panel=Panel.OUTPUT, metavar="PATH",
        default="a folder of Upshift's cache, where every command finds it",
    ),
]  # fmt: skip
Device = Annotated[
    str | None,
    option(
        "--device", text="What the engine computes on", panel=Panel.ENGINES, metavar="NAME", choices=("cpu", "cuda"),
        default="cuda if this machine has an NVIDIA GPU, else cpu",
    ),
]  # fmt: skip
DryRun = Annotated[bool, option("--dry-run", text="Print the commands, and run nothing.", panel=Panel.OUTPUT)]


@app.callback()
def _group() -> None:
    """Keep ``install`` a word of the command, although it is the only one."""


@app.command("install", cls=HelpCommand, epilog="upshift engines install vllm\nupshift engines install vllm --dry-run")
def install_command(name: Name, output: Output = None, device: Device = None, dry_run: DryRun = False) -> None:
    """Install an engine with pip into a Python environment of its own. Needs 5 GiB of disk for a CPU."""
    from upshift.inference.engine_environment import VARIABLE, installed_folder
    from upshift.inference.engine_install import check_install, install, plan_install

    if name not in NAMES:
        raise RequestError(f"{name!r} is no engine with an environment of its own; use one of {', '.join(NAMES)}")
    folder = installed_folder() if output is None else output
    chosen: Any = device or _detected_device()
    plan = plan_install(folder, chosen)
    check_install(plan)
    tables.out.print(f"vLLM for {chosen} in {folder}: up to {plan.needed_gib:g} GiB of disk", highlight=False, soft_wrap=True)
    if dry_run:
        for command in plan.commands:
            tables.out.print(" ".join(command), highlight=False, soft_wrap=True)
        return
    with progress.activity("Installing vLLM"):
        environment = install(plan, lambda command: tables.err.print(command, highlight=False, soft_wrap=True))
    tables.out.print(f"Installed {environment.describe()}", highlight=False)
    if output is not None:
        tables.out.print(f"Use it with {VARIABLE}={environment.python}, or --engine-python", highlight=False, soft_wrap=True)


def _detected_device() -> str:
    """Return what the engine computes on here."""
    from upshift.hardware import detect

    return "cuda" if detect().device == "cuda" else "cpu"
