"""Train with TRL's trainers by a plan: ``from upshift.trl import SFTTrainer`` in place of ``from trl import SFTTrainer``.

Every trainer of TRL has a class of the same name here, those of ``trl.experimental`` too. It is TRL's own class with
``upshift.Trainer`` behind it in place of ``transformers.Trainer``, so TRL makes the batches, computes the loss and writes its
metrics and files.
"""

from __future__ import annotations

from typing import Any

from upshift.tuning.library_trainers import LibraryTrainers

# The trainers that TRL calls stable. Its experimental trainers are found by name, too.
STABLE_TRAINERS = ("DPOTrainer", "DistillationTrainer", "GRPOTrainer", "KTOTrainer", "RewardTrainer", "RLOOTrainer", "SFTTrainer")
__all__ = sorted(STABLE_TRAINERS)
_TRAINERS = LibraryTrainers(library="trl", extra="trl", module=__name__, experimental="trl.experimental")


def __getattr__(name: str) -> Any:
    return _TRAINERS.planned(name)


def __dir__() -> list[str]:
    return _TRAINERS.names()
