"""Define options that take a number: inf and nan are within every range, and no limit of anything."""

from __future__ import annotations

import math
from typing import Any

import typer


def number(name: str, what: str | None, *, least: float) -> Any:
    """An option; ``what``: its help."""
    return typer.Option(name, help=what, callback=_finite, min=least)


def _finite(value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value:g} is not possible; give a finite number")
    return value
