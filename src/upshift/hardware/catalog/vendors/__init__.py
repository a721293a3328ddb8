"""Collect the vendors whose products are one file: ``CHIPS``, and ``FAMILIES`` where a short name is no product.

A new file in this folder is found without being registered.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules

from upshift.hardware.catalog.row import GpuFacts


def chips() -> dict[str, GpuFacts]:
    return {key: facts for vendor in _vendors() for key, facts in vars(vendor)["CHIPS"].items()}


def families() -> dict[str, tuple[str, ...]]:
    """Return the names that mean one of several products."""
    return {name: keys for vendor in _vendors() for name, keys in vars(vendor).get("FAMILIES", {}).items()}


def _vendors() -> Iterator[object]:
    return (import_module(f"{__name__}.{found.name}") for found in iter_modules(__path__))
