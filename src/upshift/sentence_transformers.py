"""Train with the trainers of Sentence Transformers by a plan: import them from ``upshift.sentence_transformers``.

Every trainer of Sentence Transformers has a class of the same name here. It is the library's own class with
``upshift.Trainer`` behind it, so the library tokenizes the texts, computes the loss and writes its files.
"""

from __future__ import annotations

from typing import Any

from upshift.tuning.library_trainers import LibraryTrainers

COMMON_TRAINERS = ("CrossEncoderTrainer", "SentenceTransformerTrainer", "SparseEncoderTrainer")  # others are found by name, too
__all__ = sorted(COMMON_TRAINERS)
_TRAINERS = LibraryTrainers(library="sentence_transformers", extra="sentence-transformers", module=__name__)


def __getattr__(name: str) -> Any:
    return _TRAINERS.planned(name)


def __dir__() -> list[str]:
    return _TRAINERS.names()
