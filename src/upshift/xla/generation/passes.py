"""Lower the passes that generate, for the shapes that they are used with. Each is exported once for a shape.

What differs between a decoder and an encoder-decoder ends here: both ``begin`` with prompts and take ``step`` after
step.

The passes of a transformers model that generation is made of, with keys and values as plain inputs and outputs.

A pass that begins takes the prompts and gives the keys and values of their places alone. A step takes one token of each row and
keys and values of all places that there will be, writes its own at one place, and gives them back: shapes never change, so one
compiled program serves every step. What each token may attend to is transformers' own mask, sliding windows included.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import tensorflow as tf
import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from upshift.internals.torch_names import tree_leaves
from upshift.models.kv_cache import with_cache
from upshift.xla.skeleton import export

States = tuple[torch.Tensor, ...]  # keys and values of the first layer, then of the next; [R, H, T, D] each


class FirstStates(DynamicLayer):
    """A cache with the states of one pass alone."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.keys = key_states
        self.values = value_states
        self.is_initialized = True
        return key_states, value_states


class PlacedStates(CacheLayerMixin):
    """Keys and values of all places. A pass writes its own from ``place`` on."""

    is_compileable = True
    is_sliding = False
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, place: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys = keys
        self.values = values
        self.place = place
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise NotImplementedError("keys and values are given from the start")

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.keys = self.keys.index_copy(2, self.place, key_states)
        self.values = self.values.index_copy(2, self.place, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_seq_length(self) -> Any:
        return self.place[0]

    def get_max_length(self) -> int:
        return self.keys.shape[2]


def states_of(cache: Cache) -> States:
    layers: list[Any] = cache.layers  # their common class has no keys
    return tuple(states for layer in layers for states in (layer.keys, layer.values))


def _first_cache() -> Cache:
    return Cache(layer_class_to_replicate=FirstStates)


def _placed_cache(states: Sequence[torch.Tensor], place: torch.Tensor) -> Cache:
    pairs = zip(states[0::2], states[1::2], strict=True)
    return Cache(layers=[PlacedStates(keys, values, place) for keys, values in pairs])


def _encoded_cache(states: Sequence[torch.Tensor]) -> Cache:
    layers: list[Any] = []
    for keys, values in zip(states[0::2], states[1::2], strict=True):
        layer = FirstStates()  # type: ignore[no-untyped-call]
        layer.update(keys, values)
        layers.append(layer)
    return Cache(layers=layers)


class Pass(torch.nn.Module):
    """A pass of a model whose ``forward`` takes some of the optional inputs."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self._takes = frozenset(inspect.signature(model.forward).parameters)

    def run(self, *, cache: Cache | EncoderDecoderCache, **given: Any) -> torch.Tensor:
        """Return the logits [R, V] of the last token of each row."""
        more = {"logits_to_keep": 1, "position_ids": given.pop("position_ids", None)}
        known = {name: value for name, value in more.items() if name in self._takes and value is not None}
        logits: torch.Tensor = self.model(**given, **known, **with_cache(self.model, cache)).logits
        return logits[:, -1]


class Prefill(Pass):
    """A pass from left-padded prompts [R, P] to logits and states of P places."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> States:
        cache = _first_cache()
        logits = self.run(input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache)
        return logits, *states_of(cache)


class Step(Pass):
    """A pass of one token [R, 1] at ``place`` [1] among T, to logits and states. ``mask`` [R, T] says which places
    are tokens."""

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, place: torch.Tensor, states: list[torch.Tensor]
    ) -> States:
        cache = _placed_cache(states, place)
        logits = self.run(input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache)
        return logits, *states_of(cache)


class Encode(Pass):
    """A pass from right-padded prompts [R, S] and the decoder's first token [R, 1] to logits, the decoder's states of
    one place, and the encoder's states that it attends to, none of which is computed again."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, first: torch.Tensor) -> States:
        cache = EncoderDecoderCache(_first_cache(), _first_cache())
        given = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": first}
        logits = self.run(**given, cache=cache)
        return logits, *states_of(cache.self_attention_cache), *states_of(cache.cross_attention_cache)


class DecodeStep(Pass):
    """A pass of one token [R, 1] of a decoder at ``place`` beside its encoder's states."""

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor, place: torch.Tensor, states: list[torch.Tensor], encoded: list[torch.Tensor]
    ) -> States:
        own = _placed_cache(states, place)
        cache = EncoderDecoderCache(own, _encoded_cache(encoded))
        sized = encoded[0][:, 0, :, :1]  # [R, S, 1] in place of the encoder's output, of which only the shape is read
        given = {"encoder_outputs": BaseModelOutput(last_hidden_state=sized), "attention_mask": mask, "decoder_input_ids": ids}
        return self.run(**given, cache=cache), *states_of(own)


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
        prefill = self._export(Prefill(self._model), (*example, _positions(rows, length)))
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
        step = self._export(Step(self._model), (*example, _like(self._model, states)))
        inputs = [tokens[:, None], mask, positions, tf.cast(place, tf.int64)[None], *states]
        logits, *found = step(inputs, weights)
        return logits, tuple(found)


class EncoderDecoder:
    """The passes of an encoder-decoder. Prompts [R, S] are right-padded, as encoders that count positions from the
    first token need it. ``start`` is the decoder's first token."""

    left = False

    def __init__(self, model: Any, lower: Callable[[Any], Lowered], start: int) -> None:
        self._export = partial(_exported, lower, {})
        self._model = model
        self._start = start

    def begin(self, weights: Weights, ids: Any, mask: Any, new: int) -> Begun:
        rows, length = ids.shape
        encode = self._export(Encode(self._model), (*_ids(rows, length), torch.ones(rows, 1, dtype=torch.long)))
        first = tf.fill([rows, 1], tf.constant(self._start, tf.int64))
        logits, *states = encode([ids, mask, first], weights)
        own = states[: len(states) // 2]
        encoded = states[len(states) // 2 :]
        return Begun(logits, _room(own, new - 1), (mask, *encoded))

    def step(self, weights: Weights, tokens: Any, number: Any, states: tuple[Any, ...], context: tuple[Any, ...]) -> Any:
        mask, *encoded = context
        rows, length = mask.shape
        example = (torch.ones(rows, 1, dtype=torch.long), _ids(rows, length)[1], torch.tensor([1]))
        given = (*example, _like(self._model, states), _like(self._model, encoded))
        step = self._export(DecodeStep(self._model), given)
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
