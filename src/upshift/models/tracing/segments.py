# needs torch
"""Run one forward and backward pass of the cut model on fake tensors, and count every operator in its segment.

The tensors are fake CPU tensors. Nothing is allocated, and fused attention keeps its memory as in flash attention; on ``meta``
torch would decompose it. Scratch memory inside kernels is ignored: it was measured below 1.1 % of the peak.
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

from upshift.internals.torch_names import BUFFERS, CHILDREN, PARAMETERS, is_fake, tree_leaves
from upshift.internals.transformers_names import GROUPED_PRODUCT, PACKED_ROWS
from upshift.models.adapter import adapter_beside_images, base_of, complete_model
from upshift.models.build import (
    LayerStack,
    build_model,
    check_depth,
    choose_class,
    cut_stacks,
    explain_build_errors,
    name_padding,
    sample_inputs,
)
from upshift.models.ops.activation_checkpointing import recompute_layers
from upshift.models.ops.block_attention import set_attention
from upshift.models.ops.chunked_loss import chunked_head
from upshift.models.profile import LOSS_CHUNK_TOKENS, Granularity, Objective, Variant
from upshift.models.quantized import copy_scales
from upshift.models.source import ModelSource
from upshift.models.tensor_parallel_plan import keep_slice
from upshift.models.tracing.compiled import Call
from upshift.models.tracing.fast_fake_mode import fake_mode
from upshift.models.tracing.images import choose_image_class, image_inputs, known_values, runs_each_image
from upshift.models.tracing.mixtures import all_tokens_to_one_expert
from upshift.models.tracing.op_counter import Interval, LiveTracker
from upshift.models.tracing.polynomials import Measurement
from upshift.models.tracing.random_draws import KEEPS_LAYERS, lone_draws
from upshift.models.tracing.symbolic_sizes import PlainSizes, PrimeSizes


class Tracer:
    """Build one fake model for each parameter dtype, and measure passes of it."""

    def __init__(self, source: ModelSource) -> None:
        self.source = source
        self.fake = fake_mode()
        self.config = source.hf_config
        self.model_class, self.objective = self._choose_class()
        check_depth(self.config, source.reference)
        self.stacks: list[LayerStack] = []
        self._models: dict[tuple[torch.dtype, int], nn.Module] = {}
        self._whole_models: dict[torch.dtype, nn.Module] = {}

    def _choose_class(self) -> tuple[type[PreTrainedModel], Objective]:
        if self.source.images_per_row:
            return choose_image_class(self.config, self.source.reference), "causal-lm"
        return choose_class(self.config, self.source.reference)

    @contextmanager
    def running(self, *, masked: bool) -> Iterator[None]:
        """Answer what model code asks of fake tensors, while the context is open."""
        values = known_values() if self.source.images_per_row else nullcontext()
        with fake_masks(masked=masked), values, self.fake:
            yield

    def inputs(self, model: nn.Module, *, batch: int, sequence: int, masked: bool) -> dict[str, Any]:
        """Return the inputs of one training step. With images in the rows, the tower runs now."""
        sizes: Any = {"batch": batch, "sequence": sequence, "masked": masked}
        if self.source.images_per_row:
            return image_inputs(base_of(model), **sizes, images=self.source.images_per_row)
        return sample_inputs(base_of(model), self.objective, **sizes)

    @property
    def runs_each_image(self) -> bool:
        """Return whether the tower runs operators for each image, so that large batches take long."""
        return self.source.images_per_row > 0 and runs_each_image(self.config, self.model_class)

    def full_model(self, dtype: torch.dtype) -> nn.Module:
        """Return the model with every layer, its adapter and its frozen parameters, on the meta device.

        peft does not work on fake tensors."""
        dtype = self._dtype_of_weights(dtype)
        config = self.source.hf_config
        if hasattr(config, "use_cache"):
            config.use_cache = False
        if self.objective == "sequence-classification" and config.problem_type is None:
            # Models set this themselves when they first see class labels. Until then DeBERTa reads the labels' values.
            config.problem_type = "regression" if config.num_labels == 1 else "single_label_classification"
        with explain_build_errors(repr(self.source.reference)), torch.device("meta"):
            model = build_model(config, self.model_class, dtype=dtype)
            if self.objective == "sequence-classification":
                name_padding(model.config)
            return complete_model(model, adapter_beside_images(self.source, model) if self.source.images_per_row else self.source)

    def whole_model(self, dtype: torch.dtype) -> nn.Module:
        """Return the full model of this dtype, which is built once. It is there to be counted: do not change it."""
        dtype = self._dtype_of_weights(dtype)
        if dtype not in self._whole_models:
            self._whole_models[dtype] = self.full_model(dtype)
        return self._whole_models[dtype]

    def _dtype_of_weights(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which the weights are stored for a step that asks for ``dtype``."""
        return torch.bfloat16 if self.source.adapter is not None and self.source.base_dtype == "bfloat16" else dtype

    def model(self, dtype: torch.dtype, ranks: int = 1) -> nn.Module:
        """Return the cut model in ``dtype``, on fake CPU tensors. It is built once.

        With several ``ranks``, return the part of one rank."""
        key = (dtype, ranks)
        if key not in self._models:
            model = self.full_model(dtype)
            stacks = cut_stacks(model)
            if ranks == 1:
                self.stacks = stacks
            else:
                keep_slice(base_of(model), ranks)
            with self.fake:
                materialize_on_cpu(model)
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
        sizes: PlainSizes | PrimeSizes | None = None,
    ) -> Measurement:
        """Run forward and backward twice: the first backward pass creates the gradients, the second adds to them.

        ``chunked``: measure the gaps only, because the loss is in one of them. Only the first layer of each stack runs, if
        possible."""
        dtype = torch.bfloat16 if variant.precision == "bf16-pure" else torch.float32
        model = self.model(dtype, ranks)
        set_attention(base_of(model), variant.attention)
        recompute_layers(model, None if recompute else 0, recompute or "full")
        head_context = chunked_head(base_of(model), chunk_tokens=LOSS_CHUNK_TOKENS) if chunked else nullcontext()
        layers_context = only_first_layers(model, self.stacks) if chunked else nullcontext()
        point: Any = {"batch": batch, "sequence": sequence, "masked": variant.masked}
        with self.running(masked=variant.masked), head_context, layers_context, LiveTracker(sizes) as tracker:
            tracker.adopt((list(model.parameters()), list(model.buffers())))
            texts = None if self.source.images_per_row else self.inputs(model, **point)
            with segment_borders(model, self.stacks, tracker) as borders:
                passes = []
                gradient_hooks = [
                    parameter.register_post_accumulate_grad_hook(tracker.gradient_complete)
                    for parameter in model.parameters()
                    if parameter.requires_grad
                ]
                for _ in range(2):
                    borders.start("forward")
                    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=variant.precision == "bf16"):
                        inputs = texts if texts is not None else self.inputs(model, **point)
                        loss = model(**inputs).loss
                        del inputs
                        tracker.release()
                    borders.start("backward")
                    (loss * 0.5).backward()
                    del loss
                    tracker.border(None)
                    passes.append(tracker.intervals)
                    tracker.forget()
                    while gradient_hooks:
                        gradient_hooks.pop().remove()
            model.zero_grad(set_to_none=True)
        return _collect(passes)

    def layer_calls(self, variant: Variant, *, batch: int, sequence: int, ranks: int) -> list[list[tuple[nn.Module, Call]]]:
        """Return every layer of the cut model's stacks with the arguments that the model calls it with.

        The arguments are fake tensors of this tracer's mode."""
        model = self.model(torch.bfloat16 if variant.precision == "bf16-pure" else torch.float32, ranks)
        set_attention(base_of(model), variant.attention)
        recompute_layers(model, 0)
        stacks = [list(model.get_submodule(stack.path).children()) for stack in self.stacks]
        calls: dict[nn.Module, Call] = {}

        def record_call(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls[layer] = (args, kwargs)

        handles = [layer.register_forward_pre_hook(record_call, with_kwargs=True) for layers in stacks for layer in layers]
        with self.running(masked=variant.masked), torch.autocast("cpu", torch.bfloat16, enabled=variant.precision == "bf16"):
            model(**self.inputs(model, batch=batch, sequence=sequence, masked=variant.masked))
        for handle in handles:
            handle.remove()
        return [[(layer, calls[layer]) for layer in layers] for layers in stacks]


def materialize_on_cpu(model: nn.Module) -> None:
    """Replace tensors on the meta device by new CPU tensors of the same layout. Shared tensors stay shared.

    Also replace real CPU tensors: old constructors of some classes create weights on the CPU, whatever the default device is."""
    replacements: dict[int, torch.Tensor] = {}

    def replace_tensor(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in replacements:
            replacement = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            is_parameter = isinstance(tensor, nn.Parameter)
            replacements[id(tensor)] = (
                nn.Parameter(replacement, requires_grad=tensor.requires_grad) if is_parameter else replacement
            )
            if hasattr(tensor, "quant_state"):
                copy_scales(tensor, replacements[id(tensor)], replace_tensor)
        return replacements[id(tensor)]

    for module in model.modules():
        for tensors in (PARAMETERS.of(module), BUFFERS.of(module), vars(module)):
            for name, tensor in tensors.items():
                if isinstance(tensor, torch.Tensor) and (tensor.is_meta or tensors is not vars(module) and not is_fake(tensor)):
                    tensors[name] = replace_tensor(tensor)


def _collect(passes: list[list[tuple[str, Interval]]]) -> Measurement:
    """Merge the intervals of each name, because a gap may be entered more than once."""
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
    """Append ``second`` to ``first``. Bytes that another segment left between the two count in neither."""
    shift = first.live_at_exit - second.live_at_entry
    first.operators += second.operators
    first.live += [live + shift for live in second.live]
    first.live_without_gradients += [live + shift - first.gradient_bytes for live in second.live_without_gradients]
    first.gradient_moments += [(elements, live + shift - first.gradient_bytes) for elements, live in second.gradient_moments]
    first.live_at_exit = second.live_at_exit + shift
    for field in (
        "gradient_bytes",
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

    In the forward pass a segment begins and ends where a layer does. In the backward pass a layer's segment begins when the
    gradient of its output is ready, so recomputation counts in the layer's backward segment.
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
        """Register the hooks of one layer. Only a stack's first layer has ``gap_before``, and only its last ``gap_after``."""

        def on_enter(module: Any, args: Any, kwargs: Any) -> None:
            if self._forward:  # false in a recomputation
                if gap_before is not None:
                    _on_gradient(_first_tensor((args, kwargs)), lambda: self._tracker.border(f"backward {gap_before}"))
                self._tracker.border(f"forward {label}")

        def on_exit(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            if self._forward:
                _on_gradient(_first_tensor(output), lambda: self._tracker.border(f"backward {label}"))
                self._tracker.border(f"forward {gap_after or f'between {label}'}")

        self._handles.append(layer.register_forward_pre_hook(on_enter, with_kwargs=True))
        self._handles.append(layer.register_forward_hook(on_exit, with_kwargs=True))


@contextmanager
def only_first_layers(model: nn.Module, stacks: list[LayerStack]) -> Iterator[None]:
    """Keep only the first layer of each stack while the context is open, if that layer is trained.

    A trained layer makes the segments behind it save as much for their gradients as all layers do."""
    first_layers = {stack.path: next(iter(model.get_submodule(stack.path).named_children())) for stack in stacks}
    with ExitStack() as patches:
        if all(any(parameter.requires_grad for parameter in layer.parameters()) for _, layer in first_layers.values()):
            for path, (name, layer) in first_layers.items():
                patches.enter_context(mock.patch.object(model.get_submodule(path), CHILDREN.attribute, {name: layer}))
        yield


@contextmanager
def segment_borders(model: nn.Module, stacks: list[LayerStack], tracker: LiveTracker) -> Iterator[SegmentBorders]:
    """Hook the layers of ``model`` while the context is open."""
    borders = SegmentBorders(model, stacks, tracker)
    try:
        yield borders
    finally:
        borders.remove()


def _first_tensor(value: Any) -> torch.Tensor | None:
    """Return the hidden states: the first floating-point tensor among a layer's arguments or results."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf
    return None


def _on_gradient(tensor: torch.Tensor | None, action: Callable[[], None]) -> None:
    if tensor is not None and tensor.requires_grad:
        tensor.register_hook(lambda gradient: action())


@contextmanager
def fake_masks(*, masked: bool) -> Iterator[None]:
    """Replace functions of transformers that need real values, while the context is open.

    transformers reads position values to find packed rows. Fake tensors have no values, so the replacement finds no packed
    rows. Experts use transformers' grouped product in place of PyTorch's: both allocate the same, but PyTorch's runs on fake
    tensors in bf16 only. The search for padding tokens only serves a warning, and is left out.
    """
    packed_rows = nullcontext() if masked else PACKED_ROWS.replaced(lambda *_: None)
    no_padding_warning = mock.patch.object(PreTrainedModel, "warn_if_padding_and_no_attention_mask", lambda *_: None)
    grouped_product = GROUPED_PRODUCT.replaced(lambda *_: False)
    draws = lone_draws(KEEPS_LAYERS)
    routing = all_tokens_to_one_expert()
    with packed_rows, no_padding_warning, grouped_product, draws, routing, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
