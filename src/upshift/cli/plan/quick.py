"""Plan from the sizes in a model's config (``--quick``): no trace, no torch, about a second."""

from __future__ import annotations

from typing import Annotated

import typer

from upshift.cli.options import command_line_options, option
from upshift.cli.usage.help_page import Panel
from upshift.errors import RequestError

Quick = Annotated[
    bool,
    option(
        "--quick", panel=Panel.PLAN,
        text="Estimate from the config alone, without a trace.",
    ),
]  # fmt: skip
ESTIMATED = "From the sizes in the config, without a trace (--quick). Leave --quick out for the model's own operations."
UNUSED = ("data", "objective", "lock", "check", "largest")  # they need a trace, or the model's own tokenizer


def check_options(context: typer.Context, *, quick: bool) -> None:
    """Raise RequestError for an option that ``--quick`` does not use, if it is given."""
    if not quick:
        return
    options = command_line_options(context)
    unused = [options[name] for name in UNUSED if name in options]
    if unused:
        raise RequestError(f"--quick does not use {', '.join(unused)}; leave --quick out, or leave out {', '.join(unused)}")
