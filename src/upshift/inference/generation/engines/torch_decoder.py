"""Run transformers in PyTorch: kernel by kernel, as the reference of every other engine, divided among several devices, for
recurrent states, for encoder-decoders, or with compiled layers."""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from upshift.inference.engine_errors import PromptsFailed, computing
from upshift.inference.generation.engines.base import ComputedRows, DecoderBuild, NoExtension, NoMixing, Padding, Prefix
from upshift.inference.generation.media import other_inputs
from upshift.inference.generation.model import full_cache, load_model, on_model, weight_bytes
from upshift.inference.generation.prefix import PASS_TOKENS, remaining_tokens
from upshift.inference.tensor_parallel import load_part
from upshift.inference.tokenizer import padded_rows
from upshift.inference.torch_settings import COMPILE_SHAPE, DTYPES, inference_settings, layers_to_compile
from upshift.inference.workers.dispatcher import Job
from upshift.inference.workers.rank_group import RankGroup
from upshift.models.build import find_architecture
from upshift.models.config import stable_positions_in
from upshift.models.generation_config import start_token
from upshift.models.kv_cache import (
    cache_argument,
    check_cache_filled,
    join_rows,
    mask_of_pass,
    select_rows,
    states_cache,
)

POSITION_SHIFT = "rope_deltas"  # transformers' name
NO_INPUTS: Mapping[str, torch.Tensor] = MappingProxyType({})  # beside the tokens


def build_decoder(build: DecoderBuild) -> TorchDecoder | DividedDecoder:
    return DividedDecoder(build) if build.setup.tensor_parallel > 1 else TorchDecoder(build)


class TorchDecoder(NoMixing):
    """A causal language model of transformers, kernel by kernel."""

    joins = True
    extends = True
    chunks = True

    def __init__(self, build: DecoderBuild) -> None:
        self.setup = build.setup
        self.model = self.load(build)
        self.weight_bytes = weight_bytes(build.source, self.model)
        self._parameters = set(inspect.signature(self.model.forward).parameters)
        self._cache_argument = cache_argument(self.model)
        self._border = stable_positions_in(self.model.config.get_text_config(decoder=True))
        self.padding = Padding()
        self.cache = self.empty_cache()
        self.pass_arguments: dict[str, Any] = {}  # further arguments of the model in each pass, such as the rows' adapters

    def empty_cache(self) -> Any:
        """Return a cache without rows."""
        return full_cache()

    def load(self, build: DecoderBuild) -> Any:
        if build.model is not None:
            return build.model
        return load_model(build.source, build.setup.precision, build.setup.device, where=build.where)

    def compute(self, tokens: Sequence[int]) -> Prefix:
        return _prefix_of(self._compute_whole([tokens], None).cache, 0, len(tokens))

    def prefix_of_row(self, row: int) -> Prefix:
        return _prefix_of(self.cache, row, int(self.padding.mask[row].sum()))

    def admit(self, prompts: Sequence[Sequence[int]], prefix: Prefix | None = None) -> np.ndarray:
        return self.join_computed(self._compute_whole(prompts, prefix))

    def compute_chunks(
        self, prompts: Sequence[Sequence[int]], prefix: Prefix | None, next_width: Callable[[], int]
    ) -> Iterator[ComputedRows | None]:
        """Compute prompts in chunks. Those beyond longrope's border are one chunk, because the first of several would be rotated
        by other factors."""
        remainder = remaining_tokens(prompts, prefix.length if prefix else 0)
        prefix_states = prefix.states if prefix else ()
        past = [_to_tensor(remainder.pad_states(states)).to(self.model.device, self.model.dtype) for states in prefix_states]
        cache = full_cache(past)
        length = remainder.mask.shape[1]
        is_beyond = self._border is not None and length > self._border
        for chunk in [remainder] if is_beyond else remainder.chunks(next_width):
            logits = self._run(chunk.ids, chunk.mask, chunk.positions, cache)
            if chunk.mask.shape[1] < length:
                yield None
        check_cache_filled(self.model, cache)
        yield ComputedRows(remainder.mask, cache, logits, 0)

    def join_computed(self, computed: ComputedRows) -> np.ndarray:
        if self.padding.rows:
            dropped, present_padding, new_padding = self.padding.admit(computed.mask)
            for layer, new in zip(self.cache.layers, computed.cache.layers, strict=True):
                present_keys = _pad_left(layer.keys[:, :, dropped:], present_padding)
                present_values = _pad_left(layer.values[:, :, dropped:], present_padding)
                layer.keys = torch.cat([present_keys, _pad_left(new.keys, new_padding)])
                layer.values = torch.cat([present_values, _pad_left(new.values, new_padding)])
        else:
            self.padding.admit(computed.mask)
            self.cache = computed.cache
        return computed.logits

    def step(self, tokens: np.ndarray) -> np.ndarray:
        positions = self.padding.step()
        return self._run(tokens[:, None], self.padding.mask, positions, self.cache)

    def extend(self, tokens: Sequence[int]) -> np.ndarray:
        positions = np.concatenate([self.padding.step() for _ in tokens], axis=1)
        ids = np.array([tokens], dtype=np.int64)
        logits: np.ndarray = self._run(ids, self.padding.mask, positions, self.cache, last=len(tokens))[0]
        return logits

    def cut(self, tokens: int) -> None:
        if tokens:
            self.padding.cut(tokens)
            for layer in self.cache.layers:
                layer.keys = layer.keys[:, :, :-tokens]
                layer.values = layer.values[:, :, :-tokens]

    def keep(self, rows: list[int]) -> None:
        self.padding.keep(rows)
        if rows:
            self.cache.batch_select_indices(torch.tensor(rows, device=self.model.device))
        else:
            self.cache = self.empty_cache()

    def _compute_whole(self, prompts: Sequence[Sequence[int]], prefix: Prefix | None) -> ComputedRows:
        """Compute prompts apart from the rows, in chunks that only limit the memory of a pass."""
        with computing(PromptsFailed):
            *_, computed = self.compute_chunks(prompts, prefix, lambda: PASS_TOKENS)
        assert computed is not None, "the last chunk gives the rows"
        return computed

    def _run(
        self,
        ids: np.ndarray,
        mask: np.ndarray,
        positions: np.ndarray,
        cache: Any,
        *,
        last: int = 0,
        inputs: Mapping[str, torch.Tensor] = NO_INPUTS,
    ) -> np.ndarray:
        """Return the logits of the last ``last`` tokens, [R, last, V]. With 0, return those of the last token, [R, V].

        ``inputs`` are the model's other inputs, such as the pixels of images."""
        input_ids, attention_mask, position_ids = (
            torch.from_numpy(array).to(self.model.device) for array in (ids, mask, positions)
        )
        with inference_settings(self.setup):
            others = {name: on_model(self.model, tensor) for name, tensor in inputs.items()}
            logits = self._logits(input_ids, attention_mask, position_ids, cache, last=max(last, 1), inputs=others)
            return self._to_numpy(logits if last else logits[:, -1])

    def _logits(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor | None,
        cache: Any,
        *,
        last: int = 1,
        inputs: Mapping[str, torch.Tensor] = NO_INPUTS,
    ) -> torch.Tensor:
        """Return the logits of the last tokens of each row, [R, last, V]. Without positions, the model counts them."""
        arguments = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "logits_to_keep": last}
        accepted = {name: value for name, value in arguments.items() if name in self._parameters and value is not None}
        logits: torch.Tensor = self.model(
            **accepted, **{self._cache_argument: cache}, use_cache=True, **self.pass_arguments, **inputs
        ).logits
        return logits[:, -last:]

    @staticmethod
    def _to_numpy(logits: torch.Tensor) -> np.ndarray:
        array: np.ndarray = logits.float().cpu().numpy()
        return array


class PartDecoder(TorchDecoder):
    """The part of a causal language model that one rank computes. Its cache has the heads of this rank alone.

    Each rank keeps its own part of prefixes and of prompts that are computed in chunks, by numbers that all ranks share."""

    def __init__(self, build: DecoderBuild) -> None:
        super().__init__(build)
        self._kept: dict[int, Any] = {}
        self._width = 0  # of the next chunk

    def load(self, build: DecoderBuild) -> Any:
        model_class = find_architecture(build.source.hf_config, build.source.reference).model_class
        return load_part(build.source, model_class, DTYPES[build.setup.precision])

    def read_weight_bytes(self) -> int:
        return self.weight_bytes

    def keep_computed(self, number: int, tokens: Sequence[int]) -> int:
        """Compute a prefix and keep it. Return its length."""
        self._kept[number] = prefix = self.compute(tokens)
        return prefix.length

    def keep_prefix_of_row(self, number: int, row: int) -> int:
        """Keep the keys and values of a row. Return their length."""
        self._kept[number] = prefix = self.prefix_of_row(row)
        return prefix.length

    def admit_after(self, prompts: Sequence[Sequence[int]], prefix: Prefix | None) -> np.ndarray:
        """Add rows that begin with a prefix, whose ``states`` are its number."""
        return self.admit(prompts, self._find(prefix))

    def begin_chunks(self, number: int, prompts: Sequence[Sequence[int]], prefix: Prefix | None) -> None:
        """Prepare to compute prompts in chunks. The ``states`` of the prefix are its number."""
        self._kept[number] = self.compute_chunks(prompts, self._find(prefix), lambda: self._width)

    def compute_chunk(self, number: int, width: int) -> np.ndarray | None:
        """Compute the next chunk of these prompts. Return their logits [N, V] after the last one, and None before."""
        self._width = width
        computed = next(self._kept[number])
        if computed is None:
            return None
        self._kept[number] = computed
        logits: np.ndarray = computed.logits
        return logits

    def join_kept(self, number: int) -> None:
        """Make prompts that were computed in chunks rows."""
        self.join_computed(self._kept.pop(number))

    def forget(self, numbers: Sequence[int]) -> None:
        """Forget what is kept under these numbers, where it has not joined the rows."""
        for number in numbers:
            self._kept.pop(number, None)

    def _find(self, prefix: Prefix | None) -> Prefix | None:
        return None if prefix is None else self._kept[prefix.states]._replace(length=prefix.length)


class KeptInRanks:
    """Name what each rank keeps under a number: its part of a prefix, or of prompts that are computed in chunks."""

    def __init__(self, number: int) -> None:
        self.number = number


class DividedDecoder(NoMixing):
    """A causal language model of transformers that several ranks compute together.

    The ``states`` of a prefix and the ``cache`` of computed rows are KeptInRanks. When such an object is no longer used, the
    ranks forget its number before their next task."""

    joins = True
    extends = True
    chunks = True

    def __init__(self, build: DecoderBuild) -> None:
        part = build._replace(setup=build.setup.of_a_rank())
        job = Job(f"{PartDecoder.__module__}:{PartDecoder.__name__}", {"build": part})
        self.ranks = RankGroup(job, build.setup.tensor_parallel, build.setup.device)
        self._numbers = itertools.count()
        self._unused: deque[int] = deque()  # numbers that the ranks may forget; objects end in any thread
        self.weight_bytes: int = self._compute("read_weight_bytes")

    @property
    def pids(self) -> list[int]:
        return self.ranks.pids

    def wait(self) -> None:
        self.ranks.wait()

    def compute(self, tokens: Sequence[int]) -> Prefix:
        kept = self._keep()
        return Prefix(self._compute("keep_computed", kept.number, tokens), kept)

    def prefix_of_row(self, row: int) -> Prefix:
        kept = self._keep()
        return Prefix(self._compute("keep_prefix_of_row", kept.number, row), kept)

    def admit(self, prompts: Sequence[Sequence[int]], prefix: Prefix | None = None) -> np.ndarray:
        logits: np.ndarray = self._compute("admit_after", prompts, _numbered(prefix))
        return logits

    def compute_chunks(
        self, prompts: Sequence[Sequence[int]], prefix: Prefix | None, next_width: Callable[[], int]
    ) -> Iterator[ComputedRows | None]:
        kept = self._keep()
        self._compute("begin_chunks", kept.number, prompts, _numbered(prefix))
        while (logits := self._compute("compute_chunk", kept.number, next_width())) is None:
            yield None
        _, mask = padded_rows(prompts, left=True)
        yield ComputedRows(mask, kept, logits, 0)

    def join_computed(self, computed: ComputedRows) -> np.ndarray:
        self._compute("join_kept", computed.cache.number)
        return computed.logits

    def step(self, tokens: np.ndarray) -> np.ndarray:
        logits: np.ndarray = self._compute("step", tokens)
        return logits

    def extend(self, tokens: Sequence[int]) -> np.ndarray:
        logits: np.ndarray = self._compute("extend", tokens)
        return logits

    def cut(self, tokens: int) -> None:
        self._compute("cut", tokens)

    def keep(self, rows: list[int]) -> None:
        self._compute("keep", rows)

    def _keep(self) -> KeptInRanks:
        """Return a new object that stands for what the ranks keep."""
        kept = KeptInRanks(next(self._numbers))
        weakref.finalize(kept, self._unused.append, kept.number).atexit = False
        return kept

    def _compute(self, method: str, *arguments: Any) -> Any:
        """Return the result of a method of all ranks, after they have forgotten what is no longer used."""
        unused = [self._unused.popleft() for _ in range(len(self._unused))]
        if unused:
            self.ranks.compute("forget", unused)
        return self.ranks.compute(method, *arguments)


def _numbered(prefix: Prefix | None) -> Prefix | None:
    """Return a prefix with the number of what the ranks keep for it, which can be sent to them."""
    return None if prefix is None else prefix._replace(states=prefix.states.number)


class TorchStatesDecoder(TorchDecoder):
    """A model whose layers keep states of a fixed size, or keys and values, or both. Or one that reads images beside text.

    A state holds all tokens of its row, so no row starts from the beginning of another one, and none drops its last tokens. A
    prompt is one pass, because not every model continues a state with several tokens."""

    extends = False
    prefixes = False
    chunks = False

    def __init__(self, build: DecoderBuild) -> None:
        super().__init__(build)
        # In some models an image takes fewer positions than tokens. The part that counts them has the difference afterwards.
        self._counter = next((module for module in self.model.modules() if hasattr(module, POSITION_SHIFT)), None)
        self._shifts = np.zeros(0, dtype=np.int64)  # of the positions of each row's next tokens

    def empty_cache(self) -> Any:
        return states_cache(self.model.config)

    def admit(self, prompts: Sequence[Sequence[int]], prefix: Prefix | None = None) -> np.ndarray:
        with computing(PromptsFailed):
            computed = self.compute_apart(prompts)
        return self.join_computed(computed)

    def compute_apart(self, prompts: Sequence[Sequence[int]]) -> ComputedRows:
        remainder = remaining_tokens(prompts, 0)
        cache = self.empty_cache()
        if self._counter is not None:
            setattr(self._counter, POSITION_SHIFT, None)
        inputs = other_inputs(prompts)
        logits = self._run(remainder.ids, remainder.mask, remainder.positions, cache, inputs=inputs)
        check_cache_filled(self.model, cache)
        shift = None if self._counter is None else getattr(self._counter, POSITION_SHIFT)
        return ComputedRows(remainder.mask, cache, logits, 0 if shift is None else int(shift))

    def join_computed(self, computed: ComputedRows) -> np.ndarray:
        self._shifts = np.append(self._shifts, np.full(len(computed.mask), computed.shift))
        if self.padding.rows:
            dropped, present_padding, new_padding = self.padding.admit(computed.mask)
            join_rows(self.cache, computed.cache, dropped=dropped, present_padding=present_padding, new_padding=new_padding)
        else:
            self.padding.admit(computed.mask)
            self.cache = computed.cache
        return computed.logits

    def step(self, tokens: np.ndarray) -> np.ndarray:
        positions = self.padding.step() + self._shifts[:, None]
        return self._run(tokens[:, None], self.padding.mask, positions, self.cache)

    def keep(self, rows: list[int]) -> None:
        self.padding.keep(rows)
        self._shifts = self._shifts[rows]
        if rows:
            select_rows(self.cache, torch.tensor(rows, device=self.model.device))
        else:
            self.cache = self.empty_cache()

    def _logits(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor | None,
        cache: Any,
        *,
        last: int = 1,
        inputs: Mapping[str, torch.Tensor] = NO_INPUTS,
    ) -> torch.Tensor:
        mask = mask_of_pass(cache, mask, ids.shape[1])
        counts_positions = bool(inputs) and self._counter is not None  # the model itself counts those of a prompt with images
        return super()._logits(ids, mask, None if counts_positions else positions, cache, last=last, inputs=inputs)


def _prefix_of(cache: Any, row: int, length: int) -> Prefix:
    """Return the last ``length`` tokens of a row as a prefix.

    Its ``states`` are keys and values [1, heads, T, width] of the first layer, then of the next layers."""
    states = [states[row : row + 1, :, -length:] for layer in cache.layers for states in (layer.keys, layer.values)]
    return Prefix(length, [_to_array(tensor) for tensor in states])


def _to_array(tensor: torch.Tensor) -> np.ndarray:
    """Return a copy in memory that takes the tensor's own bytes. numpy has no bf16, so its bits become integers."""
    tensor = tensor.to("cpu", copy=True)
    array: np.ndarray = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def _to_tensor(array: np.ndarray) -> torch.Tensor:
    """Return the tensor that ``_to_array`` made an array of."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.int16 else tensor


def _pad_left(states: torch.Tensor, positions: int) -> torch.Tensor:
    """Return states [R, heads, T, width] with ``positions`` more positions on the left."""
    return torch.nn.functional.pad(states, (0, 0, positions, 0)) if positions else states


class TorchSeq2Seq(NoExtension):
    """An encoder-decoder of transformers. Each prompt is encoded once.

    Rows are not admitted beside others, because decoders with absolute positions count them from the cache, the same for
    all rows."""

    joins = False

    def __init__(self, build: DecoderBuild) -> None:
        self.setup = build.setup
        self.model = load_model(build.source, build.setup.precision, build.setup.device, where=build.where)
        self.weight_bytes = weight_bytes(build.source, self.model)
        self._start = start_token(build.source)
        self._cache_argument = cache_argument(self.model)
        self.keep([])

    def admit(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        """Add rows. Prompts are padded on the right, because encoders may count positions from the first token too."""
        ids, mask = padded_rows(prompts)
        input_ids = torch.from_numpy(ids).to(self.model.device)
        self._mask = torch.from_numpy(mask).to(self.model.device)
        with inference_settings(self.setup):
            output = self.model.get_encoder()(input_ids=input_ids, attention_mask=self._mask)
        self._output_type = type(output)
        self._encoder_states = output.last_hidden_state
        logits = self.step(np.full(len(ids), self._start))
        check_cache_filled(self.model, self._cache)
        return logits

    def step(self, tokens: np.ndarray) -> np.ndarray:
        with inference_settings(self.setup):
            logits = self.model(
                encoder_outputs=self._output_type(last_hidden_state=self._encoder_states),
                attention_mask=self._mask,
                decoder_input_ids=torch.from_numpy(tokens[:, None]).to(self.model.device),
                **{self._cache_argument: self._cache},
                use_cache=True,
            ).logits
        last_logits: np.ndarray = logits[:, -1].float().cpu().numpy()
        return last_logits

    def keep(self, rows: list[int]) -> None:
        if rows:
            indices = torch.tensor(rows, device=self.model.device)
            self._encoder_states = self._encoder_states[indices]
            self._mask = self._mask[indices]
            self._cache.batch_select_indices(indices)
            return
        from transformers import DynamicCache, EncoderDecoderCache

        self._cache: Any = EncoderDecoderCache(DynamicCache(), DynamicCache())
        self._encoder_states = torch.zeros(0)
        self._mask = torch.zeros(0)


class TorchCompiledDecoder(TorchDecoder):
    """A causal language model of transformers whose layers are compiled for steps.

    Equal layers, all lengths, and all numbers of rows above one share one compilation. A single row has a compilation of its
    own. Prompts run kernel by kernel: their matrix products are large, so compiling would save little."""

    extends = False

    def __init__(self, build: DecoderBuild) -> None:
        super().__init__(build)
        self._views: list[CacheView] | None = None  # one for each layer, while a step runs
        layers = layers_to_compile(self.model)
        self._buffers = [CacheBuffer() for _ in layers]
        for number, layer in enumerate(layers):
            compiled = torch.compile(type(layer).forward, dynamic=True)
            layer.forward = partial(self._forward_layer, layer.forward, partial(compiled, layer), number)
        self._compile(build.setup.batch)

    def _compile(self, rows: int) -> None:
        """Run steps of the shapes to compile, before any request waits for it."""
        many_rows, length = COMPILE_SHAPE
        self.admit([[0] * length])
        for count in (1,) if rows == 1 else (1, many_rows):
            self.keep([0] * count)
            self.step(np.zeros(count, dtype=np.int64))
        self.keep([])

    def step(self, tokens: np.ndarray) -> np.ndarray:
        layers = self.cache.layers
        self._views = [buffer.view_next(layer) for buffer, layer in zip(self._buffers, layers, strict=True)]
        try:
            logits = super().step(tokens)
            for layer, view in zip(layers, self._views, strict=True):
                layer.keys = view.keys
                layer.values = view.values
        finally:  # also after an interrupt: the next call may be a prompt
            self._views = None
        return logits

    def _forward_layer(
        self, eager: Callable[..., Any], compiled: Callable[..., Any], number: int, *args: object, **kwargs: object
    ) -> Any:
        """Run a layer: compiled with its view of the cache during a step, as it is otherwise."""
        if self._views is None:
            return eager(*args, **kwargs)
        view = self._views[number]

        def replace_cache(argument: object) -> object:
            return view if argument is self.cache else argument

        return compiled(*map(replace_cache, args), **{name: replace_cache(value) for name, value in kwargs.items()})


class CacheView:
    """The cache of one layer for one step: its keys and values [R, heads, T, width], whose last position is written by the
    step.

    With a cache of all layers, torch would compile a layer for each layer number."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys = keys
        self.values = values

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys[:, :, -1:] = keys
        self.values[:, :, -1:] = values
        return self.keys, self.values


class CacheBuffer:
    """Memory for a layer's keys and values, [C, R, heads, width].

    The number of positions C is a power of two, so that few steps copy them. Positions are the outermost dimension, so that
    the strides do not depend on C: a compiled layer is specialized to its strides."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []  # the keys, and the values
        self._view: CacheView | None = None

    def view_next(self, layer: Any) -> CacheView:
        """Return the view for the next step. Copy the layer's states into new buffers if they are too small, or if rows
        were added or removed since the last step."""
        layer.is_compileable = True  # transformers then makes a mask even if nothing is masked, so one call is compiled
        length = layer.keys.shape[2] + 1
        if self._view is None or layer.keys is not self._view.keys or length > len(self._buffers[0]):
            capacity = 1 << (length - 1).bit_length()
            self._buffers = [_copy_to_buffer(states, capacity) for states in (layer.keys, layer.values)]
        keys, values = (buffer[:length].permute(1, 2, 0, 3) for buffer in self._buffers)
        self._view = CacheView(keys, values)
        return self._view


def _copy_to_buffer(states: torch.Tensor, capacity: int) -> torch.Tensor:
    """Return a buffer [capacity, R, heads, width] that begins with the states [R, heads, T, width]."""
    rows, heads, length, width = states.shape
    buffer = torch.empty((capacity, rows, heads, width), dtype=states.dtype)
    buffer[:length] = states.permute(2, 0, 1, 3)
    return buffer
