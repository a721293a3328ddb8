"""Train with TRL's trainers by a plan: ``from upshift.trl import SFTTrainer`` in place of ``from trl import SFTTrainer``.

Every trainer of TRL has a class of the same name here. It is TRL's own class with ``upshift.Trainer`` behind it in place of
``transformers.Trainer``, so TRL makes the batches, computes the loss and writes its metrics and files.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from upshift.errors import MissingExtra

# The trainers that TRL calls stable. Its other trainers are found by name, too.
STABLE_TRAINERS = ("DPOTrainer", "GRPOTrainer", "KTOTrainer", "RewardTrainer", "RLOOTrainer", "SFTTrainer")
__all__ = sorted(STABLE_TRAINERS)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module 'upshift.trl' has no attribute {name!r}")
    return _planned_trainer(name)


def __dir__() -> list[str]:
    return _trainer_names()


@cache
def _planned_trainer(name: str) -> Any:
    """Return TRL's trainer ``name`` with plans. Raise AttributeError if TRL has no such trainer."""
    names = _trainer_names()
    if name not in names:
        raise AttributeError(f"module 'upshift.trl' has no attribute {name!r}; it has {', '.join(names)}, and trl has the rest")
    from upshift.training.hf_trainer.trainer import with_plans
    from upshift.tuning.trainer import Trainer

    return with_plans(getattr(import_module("trl"), name), Trainer, module=__name__)


def _trainer_names() -> list[str]:
    """Return the names of TRL's trainers. Raise MissingExtra if TRL is not installed."""
    if find_spec("trl") is None:
        raise MissingExtra(library="trl", extra="trl", purpose="upshift.trl")
    return sorted(name for name in dir(import_module("trl")) if name.endswith("Trainer"))
