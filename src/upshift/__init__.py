"""Find, prove and run the fastest setup that fits, for any Hugging Face transformer.

Each name is loaded when it is first used, so importing the package imports neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names for mypy, pyright and editors, which do not run __getattr__
    from upshift.benchmarking.ab_test import compare as compare
    from upshift.hardware.catalog.lookup import describe as describe
    from upshift.hardware.detect import detect as detect
    from upshift.hardware.spec import Host as Host
    from upshift.inference.encoding.cross_encoder import CrossEncoder as CrossEncoder
    from upshift.inference.encoding.encoder import Encoder as Encoder
    from upshift.inference.generation.generator import Generator as Generator
    from upshift.inference.media.encoder import MediaEncoder as MediaEncoder
    from upshift.loading.load import load_model as load_model
    from upshift.models.inspect import inspect as inspect
    from upshift.models.profile import ModelProfile as ModelProfile
    from upshift.planning.plan import Plan as Plan
    from upshift.planning.planner import plan as plan
    from upshift.planning.workload import Workload as Workload
    from upshift.record import Record as Record
    from upshift.training.run import train as train
    from upshift.tuning.trainer import Seq2SeqTrainer as Seq2SeqTrainer
    from upshift.tuning.trainer import Trainer as Trainer
    from upshift.tuning.tune import tune as tune

_MODULE_OF = {
    "plan": "upshift.planning.planner",
    "train": "upshift.training.run",
    "tune": "upshift.tuning.tune",
    "Trainer": "upshift.tuning.trainer",
    "Seq2SeqTrainer": "upshift.tuning.trainer",
    "CrossEncoder": "upshift.inference.encoding.cross_encoder",
    "Encoder": "upshift.inference.encoding.encoder",
    "MediaEncoder": "upshift.inference.media.encoder",
    "Generator": "upshift.inference.generation.generator",
    "compare": "upshift.benchmarking.ab_test",
    "inspect": "upshift.models.inspect",
    "load_model": "upshift.loading.load",
    "Plan": "upshift.planning.plan",
    "Host": "upshift.hardware.spec",
    "ModelProfile": "upshift.models.profile",
    "Workload": "upshift.planning.workload",
    "Record": "upshift.record",
    "detect": "upshift.hardware.detect",
    "describe": "upshift.hardware.catalog.lookup",
}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'upshift' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
