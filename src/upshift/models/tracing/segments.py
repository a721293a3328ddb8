"""Run one forward and backward of the cut model on fake tensors and book every operator on its segment.

The tensors are fake CPU tensors: nothing is allocated, and fused attention keeps its flash-like memory (on ``meta`` it
would be decomposed). Ignored: scratch inside kernels, measured below 1.1 % of the peak.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import PreTrainedModel

from upshift.internals.torch_names import BUFFERS, CHILDREN, FAKE_TENSOR_MODE, PARAMETERS, is_fake, tree_leaves
from upshift.internals.transformers_names import GROUPED_PRODUCT, PACKED_ROWS
from upshift.models.adapter import base_of, complete_model
from upshift.models.build import (
    LayerStack,
    build_model,
    building,
    check_depth,
    choose_class,
    cut_stacks,
    sample_inputs,
)
from upshift.models.ops.activation_checkpointing import recompute_layers
from upshift.models.ops.block_attention import set_attention
from upshift.models.ops.chunked_loss import chunked_head
from upshift.models.profile import LOSS_CHUNK_TOKENS, Granularity, Variant
from upshift.models.quantized import copy_scales
from upshift.models.source import ModelSource
from upshift.models.tensor_parallel_plan import keep_slice
from upshift.models.tracing.compiled import Call
from upshift.models.tracing.op_counter import Interval, LiveTracker
from upshift.models.tracing.polynomials import Measurement
from upshift.models.tracing.symbolic_sizes import Counted, OfPrimes


class Tracer:
    """A holder of one fake model per parameter dtype, which measures passes of it."""

    def __init__(self, source: ModelSource) -> None:
        self.source = source
        self.fake = FAKE_TENSOR_MODE.get()()
        self.config = source.hf_config
        self.model_class, self.objective = choose_class(self.config, source.reference)
        check_depth(self.config, source.reference)
        self.stacks: list[LayerStack] = []
        self._models: dict[tuple[torch.dtype, int], nn.Module] = {}

    def whole(self, dtype: torch.dtype) -> nn.Module:
        """Return the model with every layer, on the meta device, with adapter and frozen parameters.

        peft cannot be put on fake tensors."""
        if self.source.adapter is not None and self.source.base_dtype == "bfloat16":
            dtype = torch.bfloat16
        config = self.source.hf_config
        if hasattr(config, "use_cache"):
            config.use_cache = False
        if self.objective == "sequence-classification" and config.problem_type is None:
            # What models set themselves when they first see labels of classes; DeBERTa looks at their values until then.
            config.problem_type = "regression" if config.num_labels == 1 else "single_label_classification"
        with building(repr(self.source.reference)), torch.device("meta"):
            return complete_model(build_model(config, self.model_class, dtype=dtype), self.source)

    def model(self, dtype: torch.dtype, ranks: int = 1) -> nn.Module:
        """Return the cut model in ``dtype``, on fake CPU tensors.

        With several ``ranks``, return one rank's part. It is built once."""
        key = (dtype, ranks)
        if key not in self._models:
            model = self.whole(dtype)
            stacks = cut_stacks(model)
            if ranks == 1:
                self.stacks = stacks
            else:
                keep_slice(base_of(model), ranks)
            with self.fake:
                _leave_meta(model)
            self._models[key] = model
        return self._models[key]

    @property
    def base(self) -> PreTrainedModel:
        """Return the transformers model inside the cut one."""
        return base_of(self.model(torch.float32))

    def measure(
        self,
        variant: Variant,
        *,
        batch: int,
        sequence: int,
        recompute: Granularity | None = None,
        chunked: bool = False,
        ranks: int = 1,
        sizes: Counted | OfPrimes | None = None,
    ) -> Measurement:
        """Run forward and backward twice: gradients are born, then accumulated.

        ``chunked``: measure gaps alone, as the loss is in one; of each stack only the first layer runs, if that is possible."""
        dtype = torch.bfloat16 if variant.precision == "bf16-pure" else torch.float32
        model = self.model(dtype, ranks)
        set_attention(base_of(model), variant.attention)
        recompute_layers(model, None if recompute else 0, recompute or "full")
        head = chunked_head(base_of(model), chunk_tokens=LOSS_CHUNK_TOKENS) if chunked else nullcontext()
        layers = first_layers(model, self.stacks) if chunked else nullcontext()
        with fake_masks(masked=variant.masked), self.fake, head, layers, LiveTracker(sizes) as tracker:
            tracker.adopt((list(model.parameters()), list(model.buffers())))
            inputs = sample_inputs(base_of(model), self.objective, batch=batch, sequence=sequence, masked=variant.masked)
            with segment_borders(model, self.stacks, tracker) as borders:
                passes = []
                watched = [
                    parameter.register_post_accumulate_grad_hook(tracker.gradient_is_whole)
                    for parameter in model.parameters()
                    if parameter.requires_grad
                ]
                for _ in range(2):
                    borders.start("forward")
                    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=variant.precision == "bf16"):
                        loss = model(**inputs).loss
                        tracker.release()
                    borders.start("backward")
                    (loss * 0.5).backward()
                    del loss
                    tracker.border(None)
                    passes.append(tracker.intervals)
                    tracker.forget()
                    while watched:
                        watched.pop().remove()
            model.zero_grad(set_to_none=True)
        return _collect(passes)

    def layer_calls(self, variant: Variant, *, batch: int, sequence: int, ranks: int) -> list[list[tuple[nn.Module, Call]]]:
        """Return every kept layer of every stack, and how the model calls it.

        The tensors are fake ones of this tracer's mode."""
        model = self.model(torch.bfloat16 if variant.precision == "bf16-pure" else torch.float32, ranks)
        set_attention(base_of(model), variant.attention)
        recompute_layers(model, 0)
        stacks = [list(model.get_submodule(stack.path).children()) for stack in self.stacks]
        calls: dict[nn.Module, Call] = {}

        def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls[layer] = (args, kwargs)

        handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layers in stacks for layer in layers]
        with fake_masks(masked=variant.masked), self.fake:
            inputs = sample_inputs(base_of(model), self.objective, batch=batch, sequence=sequence, masked=variant.masked)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=variant.precision == "bf16"):
                model(**inputs)
        for handle in handles:
            handle.remove()
        return [[(layer, calls[layer]) for layer in layers] for layers in stacks]


def _leave_meta(model: nn.Module) -> None:
    """Replace tensors on the meta device by new CPU tensors of the same layout, and weights that a class makes on the CPU by old
    constructors wherever it is built. Shared ones stay shared."""
    moved: dict[int, torch.Tensor] = {}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in moved:
            fresh = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            is_parameter = isinstance(tensor, nn.Parameter)
            moved[id(tensor)] = nn.Parameter(fresh, requires_grad=tensor.requires_grad) if is_parameter else fresh
            if hasattr(tensor, "quant_state"):
                copy_scales(tensor, moved[id(tensor)], move)
        return moved[id(tensor)]

    for module in model.modules():
        for tensors in (PARAMETERS.of(module), BUFFERS.of(module), vars(module)):
            for name, tensor in tensors.items():
                if isinstance(tensor, torch.Tensor) and (tensor.is_meta or tensors is not vars(module) and not is_fake(tensor)):
                    tensors[name] = move(tensor)


def _collect(passes: list[list[tuple[str, Interval]]]) -> Measurement:
    """Merge intervals of one name: a gap may be entered more than once."""
    merged: list[dict[str, Interval]] = []
    for intervals in passes:
        by_name: dict[str, Interval] = {}
        for name, interval in intervals:
            if name in by_name:
                _append(by_name[name], interval)
            else:
                by_name[name] = interval
        merged.append(by_name)
    first, second = merged
    forward = {name: interval for name, interval in second.items() if name.startswith("forward")}
    backward = {name: interval for name, interval in first.items() if name.startswith("backward")}
    accumulating = {name: interval for name, interval in second.items() if name.startswith("backward")}
    return Measurement(forward=forward, backward=backward, accumulating=accumulating)


def _append(first: Interval, second: Interval) -> None:
    """Continue ``first`` with ``second``. Bytes that another segment left in between count in neither."""
    shift = first.left - second.entered
    first.operators += second.operators
    first.live += [live + shift for live in second.live]
    first.without += [live + shift - first.born for live in second.without]
    first.moments += [(elements, live + shift - first.born) for elements, live in second.moments]
    first.left = second.left + shift
    for field in (
        "born",
        "released",
        "matmul_flops",
        "attention_flops",
        "repeated_flops",
        "moved_bytes",
        "matmul_bytes",
        "num_kernels",
    ):
        setattr(first, field, getattr(first, field) + getattr(second, field))


class SegmentBorders:
    """Hooks on the layers that tell the tracker which segment runs.

    Forward borders are the layers' own entry and exit. Backward borders are the moments at which the gradient of a layer's
    output is ready; recomputation runs inside its layer's backward segment.
    """

    def __init__(self, model: nn.Module, stacks: list[LayerStack], tracker: LiveTracker) -> None:
        self._tracker = tracker
        self._last_gap = len(stacks)
        self._forward = True
        self._handles: list[Any] = []
        for number, stack in enumerate(stacks):
            layers = list(model.get_submodule(stack.path).children())
            for position, layer in enumerate(layers):
                before = f"gap {number}" if position == 0 else None
                after = f"gap {number + 1}" if position == len(layers) - 1 else None
                self._watch(layer, f"layer {number} {position}", before, after)

    def start(self, phase: str) -> None:
        """Enter ``forward`` at the first gap, or ``backward`` at the last."""
        self._forward = phase == "forward"
        self._tracker.border(f"{phase} gap {0 if self._forward else self._last_gap}")

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _watch(self, layer: nn.Module, label: str, gap_before: str | None, gap_after: str | None) -> None:
        """Register the hooks of one layer. ``gap_before``: of a stack's first layer. ``gap_after``: of its last."""

        def enter(module: Any, args: Any, kwargs: Any) -> None:
            if self._forward:  # and not a recomputation
                if gap_before is not None:
                    _on_gradient(_first_tensor((args, kwargs)), lambda: self._tracker.border(f"backward {gap_before}"))
                self._tracker.border(f"forward {label}")

        def leave(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            if self._forward:
                _on_gradient(_first_tensor(output), lambda: self._tracker.border(f"backward {label}"))
                self._tracker.border(f"forward {gap_after or f'between {label}'}")

        self._handles.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
        self._handles.append(layer.register_forward_hook(leave, with_kwargs=True))


@contextmanager
def first_layers(model: nn.Module, stacks: list[LayerStack]) -> Iterator[None]:
    """Keep only the first layer of each stack, if it is trained.

    What comes behind then keeps no less for its gradients."""
    first = {stack.path: next(iter(model.get_submodule(stack.path).named_children())) for stack in stacks}
    with ExitStack() as shortened:
        if all(any(parameter.requires_grad for parameter in layer.parameters()) for _, layer in first.values()):
            for path, (name, layer) in first.items():
                shortened.enter_context(mock.patch.object(model.get_submodule(path), CHILDREN.attribute, {name: layer}))
        yield


@contextmanager
def segment_borders(model: nn.Module, stacks: list[LayerStack], tracker: LiveTracker) -> Iterator[SegmentBorders]:
    borders = SegmentBorders(model, stacks, tracker)
    try:
        yield borders
    finally:
        borders.remove()


def _first_tensor(value: Any) -> torch.Tensor | None:
    """Return the hidden states: the first floating tensor among a layer's arguments or results."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf
    return None


def _on_gradient(tensor: torch.Tensor | None, act: Callable[[], None]) -> None:
    if tensor is not None and tensor.requires_grad:
        tensor.register_hook(lambda gradient: act())


@contextmanager
def fake_masks(*, masked: bool) -> Iterator[None]:
    """Replace functions of transformers that need real values, while the context is open.

    transformers looks at position values to find packed rows. Fake tensors have none, so it is told that there are no packed
    rows. Experts take transformers' own grouped product, which allocates what PyTorch's does. It has fakes for every dtype;
    PyTorch's has them for bf16 only. A model looks for padding in its tokens only to warn of it.
    """
    rows = nullcontext() if masked else PACKED_ROWS.replaced(lambda *_: None)
    unwarned = mock.patch.object(PreTrainedModel, "warn_if_padding_and_no_attention_mask", lambda *_: None)
    with rows, unwarned, GROUPED_PRODUCT.replaced(lambda *_: False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
