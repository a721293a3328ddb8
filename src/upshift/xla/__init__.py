"""Build, train and generate with a Hugging Face model in TensorFlow, compiled by XLA for CPU and TPU.

The public functions are ``build``, ``generate`` and ``train``. Each is loaded when it is first used, because importing
TensorFlow takes seconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MODULE_OF = {"build": "upshift.xla.model", "generate": "upshift.xla.generation.generator", "train": "upshift.xla.training.train"}

__all__ = ["build", "generate", "train"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from upshift.xla.tensorflow import need_tensorflow

    need_tensorflow(f"upshift.xla.{name}")
    return getattr(import_module(_MODULE_OF[name]), name)
