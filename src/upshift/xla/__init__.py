"""TensorFlow and XLA: a Hugging Face checkpoint as a program of TensorFlow, trained, and compiled for CPU and TPU.

``upshift.xla.model``, ``generate`` and ``train``; their names are loaded when they are used, as TensorFlow takes seconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {"build": "upshift.xla.model", "generate": "upshift.xla.generation.generator", "train": "upshift.xla.training.train"}

__all__ = ["build", "generate", "train"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from upshift.xla.tensorflow import need_tensorflow

    need_tensorflow(f"upshift.xla.{name}")
    return getattr(import_module(_HOMES[name]), name)
