"""Pass the cache of keys and values to a model and take it from its output, under the name that the model uses.

transformers 5.24 renamed the argument and the output ``past_key_values`` to ``cache``. Code that comes with a checkpoint may use
the older name under either version, so these functions look at each model.
"""

from __future__ import annotations

import inspect
from typing import Any

from upshift.errors import RequestError

NAMES = ("cache", "past_key_values")  # the newest name first


def cache_argument(model: Any) -> str:
    """Return the name of the cache argument of ``model.forward``.

    Raises:
        RequestError: ``forward`` has no such argument.
    """
    parameters = inspect.signature(model.forward).parameters
    argument = next((name for name in NAMES if name in parameters), None)
    if argument is None:
        raise RequestError(
            f"{type(model).__name__}.forward takes no cache of keys and values (none of {', '.join(NAMES)}), which generating "
            "text token by token needs; the model has to take one"
        )
    return argument


def with_cache(model: Any, cache: Any) -> dict[str, Any]:
    """Return the arguments that make ``model`` read ``cache`` and add to it. Raise RequestError if it takes no cache."""
    return {cache_argument(model): cache, "use_cache": True}


def check_cache_filled(model: Any, cache: Any) -> None:
    """Check that ``model`` has written its prompt to ``cache``. An empty cache would give wrong text without an error.

    Raises:
        RequestError: the cache is empty.
    """
    if not cache.get_seq_length():
        raise RequestError(
            f"{type(model).__name__} kept no keys and values of its prompt, so text would be generated without it; "
            "transformers' own generate runs this model"
        )


def returned_cache(output: Any) -> Any:
    """Return the cache in a model's ``output``, or None if there is none."""
    return next((output[name] for name in NAMES if name in output.keys()), None)  # noqa: SIM118
