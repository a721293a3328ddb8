"""Run transformers and PyTorch kernel by kernel. This is the reference of every other engine.

Run an encoder-decoder of transformers: the prompt is encoded once, the text is decoded beside it.

Run transformers and PyTorch with compiled layers. Only steps are compiled, over keys and values whose places are
there before they are needed.

One compilation serves all layers that are alike, all lengths, and all numbers of rows above one. Torch compiles one
row apart. Prompts run kernel by kernel: their products are large, and hide what compiling saves.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from upshift.inference.generation.engines.base import DecoderBuild, NoExtension, NoMixing, Padding, Prefix
from upshift.inference.generation.model import full_cache, load_model, weight_bytes
from upshift.inference.generation.prefix import Remainder, remaining_tokens
from upshift.inference.tokenizer import padded_rows
from upshift.inference.torch_settings import COMPILE_SHAPE, inference_settings, layers_to_compile
from upshift.models.generation_config import start_token
from upshift.models.kv_cache import cache_argument, check_kept


class TorchDecoder(NoMixing):
    joins = True
    extends = True

    def __init__(self, build: DecoderBuild) -> None:
        self.setup = build.setup
        self.model = self.load(build)
        self.weight_bytes = weight_bytes(build.source, self.model)
        self._takes = set(inspect.signature(self.model.forward).parameters)
        self._cache_argument = cache_argument(self.model)
        self.padding = Padding()
        self.cache = full_cache()

    def load(self, build: DecoderBuild) -> Any:
        return load_model(build.source, build.setup.precision, build.setup.device, where=build.where)

    def compute(self, tokens: Sequence[int]) -> Prefix:
        cache = full_cache()
        self._compute(remaining_tokens([tokens], 0), cache)
        return _prefix(cache, 0, len(tokens))

    def of_row(self, row: int) -> Prefix:
        return _prefix(self.cache, row, int(self.padding.mask[row].sum()))

    def admit(self, prompts: Sequence[Sequence[int]], prefix: Prefix | None = None) -> np.ndarray:
        left = remaining_tokens(prompts, prefix.length if prefix else 0)
        known = prefix.states if prefix else ()
        past = [torch.from_numpy(left.place(states)).to(self.model.device, self.model.dtype) for states in known]
        cache = full_cache(past)
        logits = self._compute(left, cache)
        if self.padding.rows:
            dropped, before, behind = self.padding.admit(left.mask)
            for layer, new in zip(self.cache.layers, cache.layers, strict=True):
                layer.keys = torch.cat([_padded(layer.keys[:, :, dropped:], before), _padded(new.keys, behind)])
                layer.values = torch.cat([_padded(layer.values[:, :, dropped:], before), _padded(new.values, behind)])
        else:
            self.padding.admit(left.mask)
            self.cache = cache
        return logits

    def step(self, tokens: np.ndarray) -> np.ndarray:
        places = self.padding.step()
        return self._run(tokens[:, None], self.padding.mask, places, self.cache)

    def extend(self, tokens: Sequence[int]) -> np.ndarray:
        places = np.concatenate([self.padding.step() for _ in tokens], axis=1)
        ids = np.array([tokens], dtype=np.int64)
        found: np.ndarray = self._run(ids, self.padding.mask, places, self.cache, last=len(tokens))[0]
        return found

    def cut(self, tokens: int) -> None:
        if tokens:
            self.padding.cut(tokens)
            for layer in self.cache.layers:
                layer.keys, layer.values = layer.keys[:, :, :-tokens], layer.values[:, :, :-tokens]

    def keep(self, rows: list[int]) -> None:
        self.padding.keep(rows)
        if rows:
            self.cache.batch_select_indices(torch.tensor(rows, device=self.model.device))
        else:
            self.cache = full_cache()

    def _compute(self, left: Remainder, cache: Any) -> np.ndarray:
        for part in left.parts():
            logits = self._run(part.ids, part.mask, part.positions, cache)
        check_kept(self.model, cache)
        return logits

    def _run(self, ids: np.ndarray, mask: np.ndarray, places: np.ndarray, cache: Any, *, last: int = 0) -> np.ndarray:
        """Return the logits [R, last, V] of the last ``last`` tokens. With 0, return those of the last one [R, V]."""
        tokens, seen, positions = (torch.from_numpy(array).to(self.model.device) for array in (ids, mask, places))
        with inference_settings(self.setup):
            logits = self._logits(tokens, seen, positions, cache, last=max(last, 1))
            return self._told(logits if last else logits[:, -1])

    def _logits(self, ids: torch.Tensor, mask: torch.Tensor, places: torch.Tensor, cache: Any, *, last: int = 1) -> torch.Tensor:
        """Return the logits of the last tokens of each row, [R, last, V]."""
        given = {
            "input_ids": ids, "attention_mask": mask, "position_ids": places,
            "logits_to_keep": last,
        }  # fmt: skip
        known = {name: value for name, value in given.items() if name in self._takes}
        found: torch.Tensor = self.model(**known, **{self._cache_argument: cache}, use_cache=True).logits
        return found[:, -last:]

    @staticmethod
    def _told(logits: torch.Tensor) -> np.ndarray:
        found: np.ndarray = logits.float().cpu().numpy()
        return found


def _prefix(cache: Any, row: int, length: int) -> Prefix:
    """``states``: keys [1, heads, T, width] and values of the first layer, then of the next."""
    whole = [states[row : row + 1, :, -length:] for layer in cache.layers for states in (layer.keys, layer.values)]
    return Prefix(length, [states.float().cpu().numpy().copy() for states in whole])


def _padded(states: torch.Tensor, places: int) -> torch.Tensor:
    """Return [R, heads, T, width] with ``places`` more places on the left."""
    return torch.nn.functional.pad(states, (0, 0, places, 0)) if places else states


class TorchSeq2Seq(NoExtension):
    """An encoder-decoder in torch. Rows are not admitted beside others: absolute positions of decoders are counted
    from the cache, the same for all rows."""

    joins = False

    def __init__(self, build: DecoderBuild) -> None:
        self.setup = build.setup
        self.model = load_model(build.source, build.setup.precision, build.setup.device, where=build.where)
        self.weight_bytes = weight_bytes(build.source, self.model)
        self._start = start_token(build.source)
        self._cache_argument = cache_argument(self.model)
        self.keep([])

    def admit(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        """Encoders, too, may count positions from the first token: padding goes to the right."""
        ids, mask = padded_rows(prompts)
        self._mask = torch.from_numpy(mask).to(self.model.device)
        with inference_settings(self.setup):
            found = self.model.get_encoder()(input_ids=torch.from_numpy(ids).to(self.model.device), attention_mask=self._mask)
        self._output, self._encoded = type(found), found.last_hidden_state
        logits = self.step(np.full(len(ids), self._start))
        check_kept(self.model, self._cache)
        return logits

    def step(self, tokens: np.ndarray) -> np.ndarray:
        with inference_settings(self.setup):
            ids = torch.from_numpy(tokens[:, None]).to(self.model.device)
            logits = self.model(
                encoder_outputs=self._output(last_hidden_state=self._encoded), attention_mask=self._mask,
                decoder_input_ids=ids, **{self._cache_argument: self._cache}, use_cache=True,
            ).logits  # fmt: skip
        found: np.ndarray = logits[:, -1].float().cpu().numpy()
        return found

    def keep(self, rows: list[int]) -> None:
        if rows:
            kept = torch.tensor(rows, device=self.model.device)
            self._encoded, self._mask = self._encoded[kept], self._mask[kept]
            self._cache.batch_select_indices(kept)
            return
        from transformers import DynamicCache, EncoderDecoderCache

        self._cache: Any = EncoderDecoderCache(DynamicCache(), DynamicCache())
        self._encoded = self._mask = torch.zeros(0)


class TorchCompiledDecoder(TorchDecoder):
    extends = False

    def __init__(self, build: DecoderBuild) -> None:
        super().__init__(build)
        self._places: list[CacheView] | None = None  # of each layer, while a step runs
        layers = layers_to_compile(self.model)
        self._buffers = [CacheBuffer() for _ in layers]
        for number, layer in enumerate(layers):
            compiled = torch.compile(type(layer).forward, dynamic=True)
            layer.forward = partial(self._forward, layer.forward, partial(compiled, layer), number)
        self._compile(build.setup.batch)

    def _compile(self, rows: int) -> None:
        """Compile before any text waits for it."""
        several, length = COMPILE_SHAPE
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


class CacheView:
    """The part of the cache that a compiled layer sees: its own keys and values [R, heads, T, width], the last of T
    not written yet. With a cache of all layers it would be compiled for each layer's number."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys, self.values = keys, values

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys[:, :, -1:] = keys
        self.values[:, :, -1:] = values
        return self.keys, self.values


class CacheBuffer:
    """Places of a layer's keys and values, [C, R, heads, width]. Their number is a power of two, so that few steps
    copy them. A place is outermost, so that strides do not tell how many there are: a compiled layer is for its
    strides."""

    def __init__(self) -> None:
        self._whole: list[torch.Tensor] = []
        self._last: CacheView | None = None

    def with_place(self, layer: Any) -> CacheView:
        layer.is_compileable = True  # masks are then made where nothing is masked, too: one kind of call is compiled
        length = layer.keys.shape[2] + 1
        if self._last is None or layer.keys is not self._last.keys or length > len(self._whole[0]):  # rows came or went
            self._whole = [_with_room(states, 1 << (length - 1).bit_length()) for states in (layer.keys, layer.values)]
        self._last = CacheView(*(whole[:length].permute(1, 2, 0, 3) for whole in self._whole))
        return self._last


def _with_room(states: torch.Tensor, places: int) -> torch.Tensor:
    rows, heads, length, width = states.shape
    found = torch.empty((places, rows, heads, width), dtype=states.dtype)
    found[:length] = states.permute(2, 0, 1, 3)
    return found
