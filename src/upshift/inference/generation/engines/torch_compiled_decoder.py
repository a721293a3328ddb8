"""Run transformers and PyTorch with compiled layers. Only steps are compiled, over keys and values whose places are
there before they are needed.

One compilation serves all layers that are alike, all lengths, and all numbers of rows above one. Torch compiles one
row apart. Prompts run kernel by kernel: their products are large, and hide what compiling saves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from upshift.inference.generation.engines.decoder import DecoderBuild
from upshift.inference.generation.engines.torch_decoder import TorchDecoder
from upshift.inference.torch_computing import UNLIKE, layers_to_compile


class TorchCompiledDecoder(TorchDecoder):
    extends = False

    def __init__(self, build: DecoderBuild) -> None:
        super().__init__(build)
        self._places: list[Place] | None = None  # of each layer, while a step runs
        layers = layers_to_compile(self.model)
        self._buffers = [Buffer() for _ in layers]
        for number, layer in enumerate(layers):
            compiled = torch.compile(type(layer).forward, dynamic=True)
            layer.forward = partial(self._forward, layer.forward, partial(compiled, layer), number)
        self._compile(build.setup.batch)

    def _compile(self, rows: int) -> None:
        """Compile before any text waits for it."""
        several, length = UNLIKE
        self.admit([[0] * length])
        for count in (1,) if rows == 1 else (1, several):
            self.keep([0] * count)
            self.step(np.zeros(count, dtype=np.int64))
        self.keep([])

    def step(self, tokens: np.ndarray) -> np.ndarray:
        layers = self.cache.layers
        self._places = [buffer.with_place(layer) for buffer, layer in zip(self._buffers, layers, strict=True)]
        try:
            found = super().step(tokens)
            for layer, place in zip(layers, self._places, strict=True):
                layer.keys, layer.values = place.keys, place.values
        finally:  # also when the user interrupts: a prompt that comes then is no step
            self._places = None
        return found

    def _forward(
        self, eager: Callable[..., Any], compiled: Callable[..., Any], number: int, *args: object, **kwargs: object
    ) -> Any:
        if self._places is None:
            return eager(*args, **kwargs)
        place = self._places[number]

        def own(given: object) -> object:
            return place if given is self.cache else given

        return compiled(*map(own, args), **{name: own(given) for name, given in kwargs.items()})


class Place:
    """The part of the cache that a compiled layer sees: its own keys and values [R, heads, T, width], the last of T
    not written yet. With a cache of all layers it would be compiled for each layer's number."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys, self.values = keys, values

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys[:, :, -1:] = keys
        self.values[:, :, -1:] = values
        return self.keys, self.values


class Buffer:
    """Places of a layer's keys and values, [C, R, heads, width]. Their number is a power of two, so that few steps
    copy them. A place is outermost, so that strides do not tell how many there are: a compiled layer is for its
    strides."""

    def __init__(self) -> None:
        self._whole: list[torch.Tensor] = []
        self._last: Place | None = None

    def with_place(self, layer: Any) -> Place:
        layer.is_compileable = True  # masks are then made where nothing is masked, too: one kind of call is compiled
        length = layer.keys.shape[2] + 1
        if self._last is None or layer.keys is not self._last.keys or length > len(self._whole[0]):  # rows came or went
            self._whole = [_with_room(states, 1 << (length - 1).bit_length()) for states in (layer.keys, layer.values)]
        self._last = Place(*(whole[:length].permute(1, 2, 0, 3) for whole in self._whole))
        return self._last


def _with_room(states: torch.Tensor, places: int) -> torch.Tensor:
    rows, heads, length, width = states.shape
    found = torch.empty((places, rows, heads, width), dtype=states.dtype)
    found[:length] = states.permute(2, 0, 1, 3)
    return found
