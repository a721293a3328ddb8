"""Run functions of transformers as they are, except for one global name.

Define the base class of the mix-ins of ``upshift.Trainer``: transformers.Trainer for type checkers, ``object`` at run time.

At run time each mix-in stands before transformers' class, one of two, in the bases of ``upshift.Trainer`` or
``Seq2SeqTrainer``.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any


def with_global(function: Callable[..., Any], name: str, value: Any) -> Callable[..., Any]:
    """Return a copy of the function that reads another value for one global of its module. The module stays as it is.

    A copy of the function's text would age with every version of transformers. A change of the module would reach other
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
