"""Give a model the cache of its keys and values, and take it from what the model returns, by the names that the model has for it.

transformers 5.24 renamed the argument and the output ``past_key_values`` to ``cache``. Code that comes with a checkpoint may have
the older name under either version, so each model is asked.
"""

from __future__ import annotations

import inspect
from typing import Any

from upshift.errors import RequestError

NAMES = ("cache", "past_key_values")  # the newest name first


def cache_argument(model: Any) -> str:
    """Return the name of the argument of ``model.forward`` that takes the cache.

    Raises:
        RequestError: ``forward`` has no such argument.
    """
    names = inspect.signature(model.forward).parameters
    found = next((name for name in NAMES if name in names), None)
    if found is None:
        raise RequestError(
            f"{type(model).__name__}.forward takes no cache of keys and values (none of {', '.join(NAMES)}), which generating "
            "text token by token needs; the model has to take one"
        )
    return found


def with_cache(model: Any, cache: Any) -> dict[str, Any]:
    """Return the arguments with which ``model`` reads ``cache`` and adds to it. Raise RequestError if it takes none."""
    return {cache_argument(model): cache, "use_cache": True}


def check_kept(model: Any, cache: Any) -> None:
    """Check that ``model`` has written the tokens of its prompt to ``cache``. Without them each next token is computed as if it
    were the first one, with no error.

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
