"""Collect the products of vendors with one module each. New modules in this folder are found automatically.

A module has ``CHIPS``, and ``FAMILIES`` for short names that mean one of several products.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules

from upshift.hardware.catalog.row import GpuFacts


def chips() -> dict[str, GpuFacts]:
    """Return the rows of all vendors."""
    return {key: facts for vendor in _vendors() for key, facts in vars(vendor)["CHIPS"].items()}


def families() -> dict[str, tuple[str, ...]]:
    """Return the names that mean one of several products."""
    return {name: keys for vendor in _vendors() for name, keys in vars(vendor).get("FAMILIES", {}).items()}


def _vendors() -> Iterator[object]:
    return (import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__))
