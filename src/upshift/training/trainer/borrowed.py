"""Functions of transformers that run as they are, but for one name."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any


def with_global(function: Callable[..., Any], name: str, value: Any) -> Callable[..., Any]:
    """The same function, reading another value for one global of its module, which stays as it is.

    A copy of its text would age with every version of transformers; a change of the module would reach other trainers.
    """
    namespace = {**function.__globals__, name: value}
    copy = types.FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
