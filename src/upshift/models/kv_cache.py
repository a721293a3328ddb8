"""Pass a cache to a model, take it from its output under the name that the model uses, and hold rows in it.

A cache holds keys and values of all tokens, or states of a fixed size, as recurrent layers and convolutions have, or both.
transformers 5.24 renamed the argument and the output ``past_key_values`` to ``cache``, and models without attention call it
``cache_params``. Code that comes with a checkpoint may use an older name under either version, so these functions look at each
model.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from upshift.errors import RequestError
from upshift.models.config import heads_of

NAMES = ("cache", "past_key_values", "cache_params")  # the newest name first
ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}  # with keys and values alone
TOKEN_STATES = (("keys", 2), ("values", 2), ("indexer_keys", 1))  # a layer's tensors, and the dimension of their tokens
FIXED_STATES = ("conv_states", "recurrent_states")  # a layer's tensors by their number


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
    layers = getattr(cache, "self_attention_cache", cache).layers  # beside an encoder there are two caches
    if not any(True for layer in layers for _ in layer_tensors(layer)):
        raise RequestError(
            f"{type(model).__name__} kept no keys and values of its prompt, so text would be generated without it; "
            "transformers' own generate runs this model"
        )


def returned_cache(output: Any) -> Any:
    """Return the cache in a model's ``output``, or None if there is none."""
    return next((output[name] for name in NAMES if name in output.keys()), None)  # noqa: SIM118


def has_states(config: Any) -> bool:
    """Return whether a config declares layers whose state is not keys and values alone, or says no number of heads."""
    text_config = config.get_text_config(decoder=True)
    other_layers = set(getattr(text_config, "layer_types", None) or ()) - ATTENTION_LAYERS
    return bool(other_layers) or heads_of(text_config) is None


def states_cache(config: Any) -> Any | None:
    """Return an empty cache for the states of a model's layers, or None if rows cannot be added to one of their kinds.

    A layer with a window keeps the keys and values of all tokens. Its mask hides them."""
    try:
        from transformers.cache_utils import (
            DynamicCache,
            DynamicIndexedLayer,
            DynamicLayer,
            DynamicSlidingWindowLayer,
            LinearAttentionAndFullAttentionLayer,
            LinearAttentionAndSlidingWindowAttentionLayer,
            LinearAttentionLayer,
        )

        cache = DynamicCache(config=config.get_text_config(decoder=True))
    except (ImportError, KeyError, AttributeError, TypeError):  # an older transformers, or a kind of layer without a cache
        return None
    layers: list[Any] = []
    for layer in cache.layers:
        if type(layer) is DynamicSlidingWindowLayer:
            layer = DynamicLayer()
        elif type(layer) is LinearAttentionAndSlidingWindowAttentionLayer:
            layer = LinearAttentionAndFullAttentionLayer(number_of_states=layer.number_of_states)
        layers.append(layer)
    cache.layers = layers
    joined = (DynamicLayer, DynamicIndexedLayer, LinearAttentionLayer, LinearAttentionAndFullAttentionLayer)
    return cache if all(type(layer) in joined for layer in layers) else None


def layer_tensors(layer: Any) -> Iterator[Any]:
    """Yield the tensors that a layer of a cache holds, without counts of tokens."""
    import torch

    for value in vars(layer).values():
        for tensor in value.values() if isinstance(value, dict) else (value,):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.numel():
                yield tensor


def mask_of_pass(cache: Any, mask: Any, tokens: int) -> Any:
    """Return the part of a mask [R, T] that a pass of ``tokens`` tokens of each row takes.

    A model without attention has no use for the mask of earlier tokens, and multiplies the whole mask with the pass's tokens."""
    keeps_tokens = any(hasattr(layer, "keys") for layer in cache.layers)
    return mask if keeps_tokens else mask[:, -tokens:]


def join_rows(present: Any, new: Any, *, dropped: int, present_padding: int, new_padding: int) -> None:
    """Add the rows of a cache after those of another one with the same layers.

    Args:
        present: the cache that gets the rows.
        new: the cache that has them.
        dropped: positions on the left to remove from the present rows.
        present_padding: positions to add on the left of the present rows.
        new_padding: positions to add on the left of the new rows.
    """
    import torch

    for layer, other in zip(present.layers, new.layers, strict=True):
        for name, dimension in TOKEN_STATES:
            states = getattr(layer, name, None)
            if states is not None and states.numel():
                remaining = states.narrow(dimension, dropped, states.shape[dimension] - dropped)
                padded = _pad_left(remaining, dimension, present_padding)
                setattr(layer, name, torch.cat([padded, _pad_left(getattr(other, name), dimension, new_padding)]))
        for name in FIXED_STATES:
            fixed = getattr(layer, name, {})
            for number, state in fixed.items():
                if state is not None:
                    fixed[number] = torch.cat([state, getattr(other, name)[number]])


def _pad_left(states: Any, dimension: int, positions: int) -> Any:
    """Return states with ``positions`` more zeros on the left of a dimension."""
    import torch

    widths = [0, 0] * (states.ndim - 1 - dimension) + [positions, 0]
    return torch.nn.functional.pad(states, widths) if positions else states


def select_rows(cache: Any, rows: Any) -> None:
    """Keep only the rows of a cache with these indices, in this order."""
    cache.reorder_cache(rows)
