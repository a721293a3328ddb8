"""Run a function of transformers with one other global name, tell the script's own methods, and define the mix-ins' base class.

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


def is_own(trainer: Any, method: str, library_class: type) -> bool:
    """Return whether a method of a Trainer is the script's own code: of its class, or set on the object."""
    function = getattr(trainer, method)
    return getattr(function, "__func__", function) is not getattr(library_class, method)


if TYPE_CHECKING:
    from transformers import Trainer as LibraryTrainer
else:
    LibraryTrainer = object

__all__ = ["LibraryTrainer"]
