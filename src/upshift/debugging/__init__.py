"""Diagnose a machine, a run and the numbers of a model.

Modules that look into models need torch, so they are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import Any

from upshift.debugging.finding import Finding

_MODULE_OF = {
    "DebugUnderflowOverflow": "numerics",
    "NumericsError": "numerics",
    "detect_overflow": "numerics",
    "keep_in_fp32": "half_precision",
}

__all__ = ["DebugUnderflowOverflow", "Finding", "NumericsError", "detect_overflow", "keep_in_fp32"]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"upshift.debugging.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
