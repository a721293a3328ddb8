"""Find what is wrong with this machine, this run, this loss.

Files that look into models need torch: they are loaded when used.
"""

from __future__ import annotations

import importlib
from typing import Any

from upshift.debugging.finding import Finding

_WITH_TORCH = {
    "DebugUnderflowOverflow": "numerics",
    "NumericsError": "numerics",
    "detect_overflow": "numerics",
    "keep_in_fp32": "half_precision",
}

__all__ = ["DebugUnderflowOverflow", "Finding", "NumericsError", "detect_overflow", "keep_in_fp32"]


def __getattr__(name: str) -> Any:
    if name in _WITH_TORCH:
        return getattr(importlib.import_module(f"upshift.debugging.{_WITH_TORCH[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
