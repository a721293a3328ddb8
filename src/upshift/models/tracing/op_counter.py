# needs torch
"""Count live bytes and work, operator by operator, while a model runs on fake (or real) tensors."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from upshift.internals.torch_names import (
    AUTOGRAD_NODE,
    OPERATOR,
    SCHEMA,
    STORAGE,
    STORAGE_HOLDERS,
    TENSOR_HOLDERS,
    dispatch_mode,
    tree_leaves,
)
from upshift.models.ops.block_attention import backward_in_blocks, forward_in_blocks
from upshift.models.quantized import multiply_4bit
from upshift.models.tracing.symbolic_sizes import PlainSizes, PrimeSizes

ATEN = torch.ops.aten
DEVICE_OF = torch.ops.prim.device.default

ENGINE_HOLDERS = 4  # references to a gradient that only the engine holds, counted inside a dispatch mode

FEW_TENSORS = 16  # more than any operator reads but one that joins the parts of a batch


@dataclass(slots=True)
class Interval:
    """The live bytes at the entry of a segment and after every operator, and the work done until its exit.

    Numbers are plain numbers, or the coefficients of polynomials (see PrimeSizes)."""

    live_at_entry: Any
    operators: list[str] = field(default_factory=list)
    live: list[Any] = field(default_factory=list)
    live_at_exit: Any = 0
    released: Any = 0
    matmul_flops: Any = 0
    attention_flops: Any = 0
    repeated_flops: Any = 0  # the part of attention_flops for scores that a fused backward computes again
    moved_bytes: Any = 0
    matmul_bytes: Any = 0
    num_kernels: int = 0
    gradient_bytes: Any = 0  # bytes of the gradients that were completed
    live_without_gradients: list[Any] = field(default_factory=list)  # live bytes after every operator, less gradient_bytes
    # For each completed gradient: the elements of its parameter, and the live bytes less all gradients completed before.
    gradient_moments: list[tuple[int, Any]] = field(default_factory=list)
    traced_operators: set[str] = field(default_factory=set)  # names of Upshift's operators whose inner operators were counted


# Operators that are opaque to torch.compile but traced inside here, with their implementations. All but the last are attention.
TRACED_INSIDE: dict[str, Callable[..., Any]] = {
    "upshift::block_attention": forward_in_blocks,
    "upshift::block_attention_backward": backward_in_blocks,
    "bitsandbytes::gemm_4bit": multiply_4bit,
}

# Operators of fused attention.
ATTENTION_FORWARD = {
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
}
ATTENTION_BACKWARD = {f"{name}_backward" for name in ATTENTION_FORWARD}
# Operators of a layer's experts, and how often each multiplies by every weight.
GROUPED_PASSES = {"transformers::grouped_mm_fallback": 1, "transformers::grouped_mm_fallback_backward": 2}


def _attention_flops(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int] | None:
    """Return the FLOPs of a fused attention operator, and the part of them that repeats the forward pass.

    Causal attention counts as half. Return None for any other operator."""
    name = function.name()
    repeated = 0
    if name in ATTENTION_FORWARD:
        flops = sum(_attention_products(*args[:3]))
        causal = argument_of(function, "is_causal", args, kwargs)
    elif name in ATTENTION_BACKWARD:
        scores, weighted_sum = _attention_products(*args[1:4])
        repeated = scores
        flops = 2 * (scores + weighted_sum) + repeated
        causal = argument_of(function, "is_causal", args, kwargs)
    else:
        return None
    divisor = 2 if causal else 1
    return int(flops // divisor), int(repeated // divisor)


def _attention_products(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[int, int]:
    """Return the FLOPs of query x key and of scores x value, of [batch, heads, length, size] each.

    Keys and values may have fewer heads than queries, each for a group of query heads. torch 2.11's formulas refuse that."""
    batch, heads, num_queries, key_size = query.shape
    num_pairs = batch * heads * num_queries * key.shape[2]
    return 2 * num_pairs * key_size, 2 * num_pairs * value.shape[3]


def _grouped_flops(function: Any, args: tuple[Any, ...]) -> int | None:
    """Return the FLOPs of the grouped products of a layer's experts, or None for any other operator.

    The products are [S, K] x [E, K, N] by groups of rows."""
    passes = GROUPED_PASSES.get(function.name())
    if passes is None:
        return None
    rows, weight = args[:2]
    return int(2 * passes * rows.shape[0] * weight.shape[-2] * weight.shape[-1])


def _reused_gradient_storage(function: Any, args: tuple[Any, ...]) -> int | None:
    """Return the key of the storage that autograd's engine would reuse to sum two gradients, or None.

    The engine adds in place onto the earlier gradient if nothing else holds it or its storage. It never does so while a
    dispatch mode is active (torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace), so a traced run allocates a new
    tensor. Gradients are disabled in the engine and enabled in recomputation, which tells the two apart.
    """
    if function is not ATEN.add.Tensor or torch.is_grad_enabled() or AUTOGRAD_NODE.get()() is None:
        return None
    earlier = args[0]
    if not earlier.is_contiguous() or TENSOR_HOLDERS.of(earlier)() != ENGINE_HOLDERS:
        return None
    storage = earlier.untyped_storage()
    has_one_owner = STORAGE_HOLDERS.get()(STORAGE.of(storage)) == 2  # the gradient and the local ``storage`` hold it
    return int(STORAGE.of(storage)) if has_one_owner else None


def argument_of(function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return an operator's argument by its name in the schema, or None if it has no such argument."""
    for position, argument in enumerate(SCHEMA.of(function).arguments):
        if argument.name == name:
            return kwargs.get(name, args[position] if position < len(args) else argument.default_value)
    return None


def _append_tensors(tensors: list[torch.Tensor], values: Iterable[Any]) -> None:
    """Append the tensors among an operator's arguments. These are tensors, numbers, and lists of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            _append_tensors(tensors, value)


class LiveTracker:
    """A dispatch mode that counts the bytes of all referenced storages that operators returned while it was active.

    ``border(name)`` closes the current interval and opens the named one. A name may be opened again for a second pass.
    ``release()`` closes the current interval. Until the next border, freed bytes count as released by the interval that
    allocated them: autocast drops its copies of all layers' weights at once when it ends.
    """

    def __init__(self, sizes: PlainSizes | PrimeSizes | None = None) -> None:
        self._mode = dispatch_mode(self._handle)
        self.sizes: Any = sizes or PlainSizes()
        self.live_bytes: Any = self.sizes.zero
        self.intervals: list[tuple[str, Interval]] = []
        self._storages: dict[int, Any] = {}
        self._owners: dict[int, Interval | None] = {}
        self._watches: dict[int, weakref.ref[Any]] = {}
        self._current: Interval | None = None
        self._releasing = False

    def border(self, name: str | None) -> None:
        if self._current is not None:
            self._current.live_at_exit = self.live_bytes
        self._current = None
        self._releasing = False
        if name is not None:
            self._current = Interval(live_at_entry=self.live_bytes)
            self.intervals.append((name, self._current))

    def release(self) -> None:
        self.border(None)
        self._releasing = True

    def forget(self) -> None:
        self.border(None)
        self.intervals = []

    def adopt(self, tensors: Any) -> None:
        """Count tensors that existed before the tracker was active."""
        for leaf in tree_leaves(tensors):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf)

    def gradient_complete(self, parameter: torch.Tensor) -> None:
        """Record that ``parameter.grad`` is complete. Call it from a post-accumulate hook."""
        interval = self._current
        if interval is not None and parameter.grad is not None:
            interval.gradient_moments.append((parameter.numel(), self.live_bytes - interval.gradient_bytes))
            interval.gradient_bytes = interval.gradient_bytes + self.sizes.storage(parameter.grad)

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = STORAGE.of(storage)
        if key not in self._storages:
            size = self._storages[key] = self.sizes.storage(tensor)
            self._owners[key] = self._current
            self.live_bytes = self.live_bytes + size
            self._watches[key] = weakref.ref(storage, lambda _: self._remove(key))

    def _remove(self, key: int) -> None:
        size = self._storages.pop(key, 0)
        owner = self._owners.pop(key, None)
        self._watches.pop(key, None)
        self.live_bytes = self.live_bytes - size
        if self._releasing and owner is not None:
            owner.released = owner.released + size

    def __enter__(self) -> LiveTracker:
        self._mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)

    def _handle(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function is DEVICE_OF:  # a short cut for two of three calls, which ask for a fake tensor's device
            return args[0].fake_device
        implementation = TRACED_INSIDE.get(function.name())
        if implementation is multiply_4bit:
            with self:
                return multiply_4bit(*args, **kwargs)
        if implementation is not None:
            return self._run_attention(function, implementation, args, kwargs)
        reused = _reused_gradient_storage(function, args)
        result = function(*args, **kwargs)
        leaves = [result] if isinstance(result, torch.Tensor) else tree_leaves(result)
        outputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        for leaf in outputs:
            self._add(leaf)
        if reused is not None:
            self._remove(reused)
        if self._current is not None:
            self._record(self._current, function, args, kwargs, result, outputs)
        return result

    def _run_attention(self, function: Any, implementation: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run block attention operator by operator.

        Its temporary memory counts as live, and its matrix products count as attention."""
        current = self._current or Interval(live_at_entry=self.live_bytes)
        matmul_flops_before = current.matmul_flops
        moved_bytes_before = current.moved_bytes
        with self:
            result = implementation(*args, **kwargs)
        current.attention_flops = current.attention_flops + current.matmul_flops - matmul_flops_before
        current.matmul_bytes = current.matmul_bytes + current.moved_bytes - moved_bytes_before
        current.matmul_flops = matmul_flops_before
        current.moved_bytes = moved_bytes_before
        current.traced_operators.add(function.name())
        return result

    def _record(
        self, interval: Interval, function: Any, args: Any, kwargs: Any, result: Any, outputs: list[torch.Tensor]
    ) -> None:
        interval.operators.append(function.name())
        interval.live.append(self.live_bytes)
        interval.live_without_gradients.append(self.live_bytes - interval.gradient_bytes)
        if function.is_view or not outputs:
            return
        interval.num_kernels += 1
        touched = list(outputs)
        _append_tensors(touched, args)
        _append_tensors(touched, kwargs.values())
        num_bytes = self._total_bytes(touched)
        number = self.sizes.number
        attention = _attention_flops(function, args, kwargs)
        if attention is not None:
            interval.attention_flops = interval.attention_flops + number(attention[0])
            interval.repeated_flops = interval.repeated_flops + number(attention[1])
            interval.matmul_bytes = interval.matmul_bytes + num_bytes
        elif (grouped := _grouped_flops(function, args)) is not None:
            interval.matmul_flops = interval.matmul_flops + number(grouped)
            interval.matmul_bytes = interval.matmul_bytes + num_bytes
        elif OPERATOR.of(function) in flop_registry:
            flops = int(flop_registry[OPERATOR.of(function)](*args, **kwargs, out_val=result))
            interval.matmul_flops = interval.matmul_flops + number(flops)
            interval.matmul_bytes = interval.matmul_bytes + num_bytes
        elif function is not ATEN.empty.memory_format:
            interval.moved_bytes = interval.moved_bytes + num_bytes

    def _total_bytes(self, tensors: list[torch.Tensor]) -> Any:
        """Return the bytes of tensors that a kernel reads.

        Many equal tensors count as one with a further dimension: they are the parts of a batch, and their number shows it."""
        if len(tensors) <= FEW_TENSORS:
            return sum(self.sizes.elements(*_read_sizes(tensor)) for tensor in tensors)
        counts = Counter(_read_sizes(tensor) for tensor in tensors)
        return sum(self.sizes.elements((number, *sizes), size) for (sizes, size), number in counts.items())


def _read_sizes(tensor: torch.Tensor) -> tuple[tuple[int, ...], int]:
    """Return the dimensions of a tensor that a kernel reads, and the bytes of an element. An expanded dimension is read once."""
    strides = tensor.stride()
    if 0 not in strides:
        return tuple(tensor.shape), tensor.element_size()
    return tuple(size for size, stride in zip(tensor.shape, strides, strict=True) if stride), tensor.element_size()
