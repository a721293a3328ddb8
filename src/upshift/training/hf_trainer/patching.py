"""Run a function of transformers unchanged except for one global name, and define the base class of the Trainer's mix-ins.

``LibraryTrainer`` is transformers.Trainer for type checkers and ``object`` at run time. At run time the mix-ins come before
transformers.Trainer or transformers.Seq2SeqTrainer in the bases of ``upshift.Trainer`` and ``upshift.Seq2SeqTrainer``.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any


def with_global(function: Callable[..., Any], name: str, value: Any) -> Callable[..., Any]:
    """Return a copy of the function that reads ``value`` for one global of its module. The module itself does not change.

    Copied source text would be out of date with every version of transformers, and a patched module would affect other
    trainers.
    """
    namespace = {**function.__globals__, name: value}
    copy = types.FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


if TYPE_CHECKING:
    from transformers import Trainer as LibraryTrainer
else:
    LibraryTrainer = object

__all__ = ["LibraryTrainer"]
