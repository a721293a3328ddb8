"""Upshift finds, proves and runs the fastest setup that fits, for any Hugging Face transformer.

Names are loaded when they are first used: importing the package imports neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "plan": "upshift.planning.planner",
    "train": "upshift.training.run",
    "tune": "upshift.tuning.tune",
    "Trainer": "upshift.tuning.trainer",
    "Seq2SeqTrainer": "upshift.tuning.trainer",
    "Encoder": "upshift.inference.encoding.encoder",
    "Generator": "upshift.inference.generation.generator",
    "compare": "upshift.benchmarking.contest",
    "inspect": "upshift.models.inspect",
    "load_model": "upshift.loading.load",
    "Plan": "upshift.planning.plan",
    "Host": "upshift.hardware.spec",
    "ModelProfile": "upshift.models.profile",
    "Workload": "upshift.planning.workload",
    "Record": "upshift.record",
    "detect": "upshift.hardware.detect",
    "describe": "upshift.hardware.table",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'upshift' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
