"""Define the passes of a model that generation consists of, with keys and values as plain inputs and outputs.

The first pass takes the prompts and returns the keys and values of their positions. A step takes one token of each row and the
keys and values of all positions that there will be, writes those of its token, and returns all. Shapes never change, so one
compiled program serves every step. transformers' own mask says what each token may attend to, sliding windows included.

``DecoderOnly`` and ``EncoderDecoder`` have the same interface: ``prefill`` with the prompts, then ``step`` after ``step``. Each
pass is exported and lowered once for each shape.
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
from upshift.xla.model_export import export

States = tuple[torch.Tensor, ...]  # keys and values of the first layer, then of the next; each [rows, heads, positions, size]


class SinglePassStates(DynamicLayer):
    """Hold the keys and values of a single pass."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.keys = key_states
        self.values = value_states
        self.is_initialized = True
        return key_states, value_states


class AllStates(CacheLayerMixin):
    """Hold the keys and values of all positions. A pass writes its own from ``position`` on."""

    is_compileable = True
    is_sliding = False
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, position: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys = keys
        self.values = values
        self.position = position
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise NotImplementedError("keys and values are given from the start")

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.keys = self.keys.index_copy(2, self.position, key_states)
        self.values = self.values.index_copy(2, self.position, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_seq_length(self) -> Any:
        return self.position[0]

    def get_max_length(self) -> int:
        return self.keys.shape[2]


def states_of(cache: Cache) -> States:
    """Return the keys and values of a cache."""
    layers: list[Any] = cache.layers  # their common class does not declare keys
    return tuple(states for layer in layers for states in (layer.keys, layer.values))


def _first_cache() -> Cache:
    return Cache(layer_class_to_replicate=SinglePassStates)


def _cache_at(states: Sequence[torch.Tensor], position: torch.Tensor) -> Cache:
    pairs = zip(states[0::2], states[1::2], strict=True)
    return Cache(layers=[AllStates(keys, values, position) for keys, values in pairs])


def _encoded_cache(states: Sequence[torch.Tensor]) -> Cache:
    layers: list[Any] = []
    for keys, values in zip(states[0::2], states[1::2], strict=True):
        layer = SinglePassStates()  # type: ignore[no-untyped-call]
        layer.update(keys, values)
        layers.append(layer)
    return Cache(layers=layers)


class Pass(torch.nn.Module):
    """Call a model with those optional inputs that its ``forward`` accepts."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self._takes = frozenset(inspect.signature(model.forward).parameters)

    def run(self, *, cache: Cache | EncoderDecoderCache, **inputs: Any) -> torch.Tensor:
        """Return the logits [R, V] of the last token of each row. ``inputs``: the model's inputs, by its own names."""
        optional = {"logits_to_keep": 1, "position_ids": inputs.pop("position_ids", None)}
        accepted = {name: value for name, value in optional.items() if name in self._takes and value is not None}
        logits: torch.Tensor = self.model(**inputs, **accepted, **with_cache(self.model, cache)).logits
        return logits[:, -1]


class Prefill(Pass):
    """Compute logits and the states of P positions from left-padded prompts [R, P]."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> States:
        cache = _first_cache()
        logits = self.run(input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache)
        return logits, *states_of(cache)


class Step(Pass):
    """Compute logits and states of one token [R, 1] at ``position`` [1] of T. ``mask`` [R, T] is 1 where there are tokens."""

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, position: torch.Tensor, states: list[torch.Tensor]
    ) -> States:
        cache = _cache_at(states, position)
        logits = self.run(input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache)
        return logits, *states_of(cache)


class Encode(Pass):
    """Encode right-padded prompts [R, S] and decode the first token [R, 1].

    Return the logits, the decoder's states of one position, and the encoder's states, which no later pass computes again."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, first: torch.Tensor) -> States:
        cache = EncoderDecoderCache(_first_cache(), _first_cache())
        logits = self.run(input_ids=ids, attention_mask=mask, decoder_input_ids=first, cache=cache)
        return logits, *states_of(cache.self_attention_cache), *states_of(cache.cross_attention_cache)


class DecodeStep(Pass):
    """Compute logits and states of one token [R, 1] of a decoder at ``position``, from its encoder's states."""

    def forward(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        position: torch.Tensor,
        states: list[torch.Tensor],
        encoded: list[torch.Tensor],
    ) -> States:
        decoder_cache = _cache_at(states, position)
        cache = EncoderDecoderCache(decoder_cache, _encoded_cache(encoded))
        stand_in = encoded[0][:, 0, :, :1]  # [R, S, 1] in place of the encoder's output: only the shape is read
        encoder_outputs = BaseModelOutput(last_hidden_state=stand_in)
        logits = self.run(encoder_outputs=encoder_outputs, attention_mask=mask, decoder_input_ids=ids, cache=cache)
        return logits, *states_of(decoder_cache)


Weights = Mapping[str, Any]  # tensors by their Hugging Face names
Lowered = Callable[..., list[Any]]  # (inputs, weights) -> outputs


class Prefilled(NamedTuple):
    """Hold the results of the first pass."""

    logits: Any  # [R, V], for the first new token
    states: tuple[Any, ...]  # steps change them
    context: tuple[Any, ...]  # steps only read it


class DecoderOnly:
    """Run a decoder. Prompts [R, P] are padded on the left, so that all texts continue at the same position."""

    pads_left = True

    def __init__(self, model: Any, lower: Callable[[Any], Lowered]) -> None:
        self._export = partial(_export_once, lower, {})
        self._model = model

    def prefill(self, weights: Weights, ids: Any, mask: Any, max_new_tokens: int) -> Prefilled:
        rows, length = ids.shape
        example = _ids(rows, length)
        prefill = self._export(Prefill(self._model), (*example, _positions(rows, length)))
        positions = tf.maximum(tf.cumsum(mask, axis=1) - 1, 0)
        logits, *states = prefill([ids, mask, positions], weights)
        return Prefilled(logits, _add_positions(states, max_new_tokens - 1), (mask,))

    def step(self, weights: Weights, tokens: Any, number: Any, states: tuple[Any, ...], context: tuple[Any, ...]) -> Any:
        """Return the logits of the token ``number``, and the new states. ``tokens`` [R] are the tokens before it."""
        (prompt,) = context
        rows, length = prompt.shape
        num_positions = states[0].shape[2]
        position = length + number - 1
        is_written = tf.range(length, num_positions) <= position
        mask = tf.concat([prompt, tf.repeat(tf.cast(is_written, tf.int64)[None], rows, axis=0)], axis=1)
        positions = tf.reduce_sum(prompt, axis=1, keepdims=True) + tf.cast(number - 1, tf.int64)
        example = (
            torch.ones(rows, 1, dtype=torch.long),
            _ids(rows, num_positions)[1],
            _positions(rows, 1),
            torch.tensor([length]),
        )
        step = self._export(Step(self._model), (*example, _example_states(self._model, states)))
        inputs = [tokens[:, None], mask, positions, tf.cast(position, tf.int64)[None], *states]
        logits, *new_states = step(inputs, weights)
        return logits, tuple(new_states)


class EncoderDecoder:
    """Run an encoder-decoder. Prompts [R, S] are padded on the right, because encoders count positions from the first token.

    ``start``: the decoder's first token."""

    pads_left = False

    def __init__(self, model: Any, lower: Callable[[Any], Lowered], start: int) -> None:
        self._export = partial(_export_once, lower, {})
        self._model = model
        self._start = start

    def prefill(self, weights: Weights, ids: Any, mask: Any, max_new_tokens: int) -> Prefilled:
        rows, length = ids.shape
        encode = self._export(Encode(self._model), (*_ids(rows, length), torch.ones(rows, 1, dtype=torch.long)))
        first = tf.fill([rows, 1], tf.constant(self._start, tf.int64))
        logits, *states = encode([ids, mask, first], weights)
        decoder_states = states[: len(states) // 2]
        encoded = states[len(states) // 2 :]
        return Prefilled(logits, _add_positions(decoder_states, max_new_tokens - 1), (mask, *encoded))

    def step(self, weights: Weights, tokens: Any, number: Any, states: tuple[Any, ...], context: tuple[Any, ...]) -> Any:
        """Return the logits of the token ``number``, and the new states. ``tokens`` [R] are the tokens before it."""
        mask, *encoded = context
        rows, length = mask.shape
        example = (torch.ones(rows, 1, dtype=torch.long), _ids(rows, length)[1], torch.tensor([1]))
        inputs = (*example, _example_states(self._model, states), _example_states(self._model, encoded))
        step = self._export(DecodeStep(self._model), inputs)
        logits, *new_states = step([tokens[:, None], mask, tf.cast(number, tf.int64)[None], *states, *encoded], weights)
        return logits, tuple(new_states)


def _export_once(lower: Callable[[Any], Lowered], exported: dict[Any, Lowered], module: torch.nn.Module, inputs: Any) -> Lowered:
    key = type(module), tuple(tuple(leaf.shape) for leaf in tree_leaves(inputs))
    if key not in exported:
        names = inspect.signature(module.forward).parameters
        exported[key] = lower(export(module.eval(), dict(zip(names, inputs, strict=True))))
    return exported[key]


def _ids(rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return example ids and an example mask. They are two tensors, because torch.export merges inputs that are the same one."""
    return torch.ones(rows, length, dtype=torch.long), torch.ones(rows, length, dtype=torch.long)


def _positions(rows: int, length: int) -> torch.Tensor:
    return torch.arange(length).repeat(rows, 1)


def _example_states(model: Any, states: Any) -> list[torch.Tensor]:
    return [torch.zeros(tuple(state.shape), dtype=model.dtype, device=model.device) for state in states]


def _add_positions(states: Any, count: int) -> tuple[Any, ...]:
    """Add ``count`` empty positions at the end of each state."""
    return tuple(tf.pad(state, [[0, 0], [0, 0], [0, count], [0, 0]]) for state in states)
