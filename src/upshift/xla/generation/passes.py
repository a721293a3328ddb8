"""Lower the passes that generate, for the shapes that they are used with. Each is exported once for a shape.

What differs between a decoder and an encoder-decoder ends here: both ``begin`` with prompts and take ``step`` after
step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import tensorflow as tf
import torch

from upshift.internals.torch_names import tree_leaves
from upshift.xla.exported import export
from upshift.xla.generation import states as passes

Weights = Mapping[str, Any]  # tensors by their Hugging Face names
Lowered = Callable[..., list[Any]]  # (inputs, weights) -> outputs


class Begun(NamedTuple):
    logits: Any  # [R, V] of the first token
    states: tuple[Any, ...]  # that steps change
    context: tuple[Any, ...]  # that they only read


class DecoderOnly:
    """The passes of a decoder. Prompts [R, P] are left-padded, so that all texts go on at the same place."""

    left = True

    def __init__(self, model: Any, lower: Callable[[Any], Lowered]) -> None:
        self._export = partial(_exported, lower, {})
        self._model = model

    def begin(self, weights: Weights, ids: Any, mask: Any, new: int) -> Begun:
        rows, length = ids.shape
        example = _ids(rows, length)
        prefill = self._export(passes.Prefill(self._model), (*example, _positions(rows, length)))
        positions = tf.maximum(tf.cumsum(mask, axis=1) - 1, 0)
        logits, *states = prefill([ids, mask, positions], weights)
        return Begun(logits, _room(states, new - 1), (mask,))

    def step(self, weights: Weights, tokens: Any, number: Any, states: tuple[Any, ...], context: tuple[Any, ...]) -> Any:
        """Return logits and states from ``tokens`` [R], those before the token ``number``."""
        (prompt,) = context
        rows, length = prompt.shape
        places = states[0].shape[2]
        place = length + number - 1
        after = tf.range(length, places) <= place
        mask = tf.concat([prompt, tf.repeat(tf.cast(after, tf.int64)[None], rows, axis=0)], axis=1)
        positions = tf.reduce_sum(prompt, axis=1, keepdims=True) + tf.cast(number - 1, tf.int64)
        example = (torch.ones(rows, 1, dtype=torch.long), _ids(rows, places)[1], _positions(rows, 1), torch.tensor([length]))
        step = self._export(passes.Step(self._model), (*example, _like(self._model, states)))
        inputs = [tokens[:, None], mask, positions, tf.cast(place, tf.int64)[None], *states]
        logits, *found = step(inputs, weights)
        return logits, tuple(found)


class EncoderDecoder:
    """The passes of an encoder-decoder. Prompts [R, S] are right-padded, as encoders that count positions from the
    first token need it. ``start`` is the decoder's first token."""

    left = False

    def __init__(self, model: Any, lower: Callable[[Any], Lowered], start: int) -> None:
        self._export = partial(_exported, lower, {})
        self._model, self._start = model, start

    def begin(self, weights: Weights, ids: Any, mask: Any, new: int) -> Begun:
        rows, length = ids.shape
        encode = self._export(passes.Encode(self._model), (*_ids(rows, length), torch.ones(rows, 1, dtype=torch.long)))
        first = tf.fill([rows, 1], tf.constant(self._start, tf.int64))
        logits, *states = encode([ids, mask, first], weights)
        own, encoded = states[: len(states) // 2], states[len(states) // 2 :]
        return Begun(logits, _room(own, new - 1), (mask, *encoded))

    def step(self, weights: Weights, tokens: Any, number: Any, states: tuple[Any, ...], context: tuple[Any, ...]) -> Any:
        mask, *encoded = context
        rows, length = mask.shape
        example = (torch.ones(rows, 1, dtype=torch.long), _ids(rows, length)[1], torch.tensor([1]))
        given = (*example, _like(self._model, states), _like(self._model, encoded))
        step = self._export(passes.DecodeStep(self._model), given)
        logits, *found = step([tokens[:, None], mask, tf.cast(number, tf.int64)[None], *states, *encoded], weights)
        return logits, tuple(found)


def _exported(lower: Callable[[Any], Lowered], known: dict[Any, Lowered], module: torch.nn.Module, inputs: Any) -> Lowered:
    key = type(module), tuple(tuple(leaf.shape) for leaf in tree_leaves(inputs))
    if key not in known:
        names = inspect.signature(module.forward).parameters
        known[key] = lower(export(module.eval(), dict(zip(names, inputs, strict=True))))
    return known[key]


def _ids(rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two separate tensors: torch.export takes one that is given twice for one input."""
    return torch.ones(rows, length, dtype=torch.long), torch.ones(rows, length, dtype=torch.long)


def _positions(rows: int, length: int) -> torch.Tensor:
    return torch.arange(length).repeat(rows, 1)


def _like(model: Any, states: Any) -> list[torch.Tensor]:
    return [torch.zeros(tuple(one.shape), dtype=model.dtype, device=model.device) for one in states]


def _room(states: Any, more: int) -> tuple[Any, ...]:
    """Add places for ``more`` tokens behind those that are there."""
    return tuple(tf.pad(one, [[0, 0], [0, 0], [0, more], [0, 0]]) for one in states)
