"""Define the base class of the mix-ins of ``upshift.Trainer``: transformers.Trainer for type checkers, ``object`` at run time.

At run time each mix-in stands before transformers' class, one of two, in the bases of ``upshift.Trainer`` or
``Seq2SeqTrainer``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import Trainer as LibraryTrainer
else:
    LibraryTrainer = object

__all__ = ["LibraryTrainer"]
