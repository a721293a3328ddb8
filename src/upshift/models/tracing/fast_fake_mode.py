# needs torch
"""Make fake tensors faster than torch does, with the same results.

torch keeps the result of each operator on fake tensors in a cache. A third of a trace's time goes to the cache's keys, which hold
17 facts about each tensor, and as much to the calls around the cache and to new results. Tensors of the common kind differ in
eight facts. An operator on such tensors is looked up at once, and its results are made of torch's entry. torch runs all others.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch

from upshift.errors import MissingInternal
from upshift.internals.torch_names import (
    FAKE_CACHE_ENTRY,
    FAKE_CACHE_KEY,
    FAKE_TENSOR,
    FAKE_TENSOR_MODE,
    MAKE_SUBCLASS,
    UNSAFE_VIEW,
)

MARK = "upshift"  # the first part of our keys in torch's cache
MISSING = object()  # in place of results that torch must make
PLAIN = (int, float, bool, type(None), str, torch.dtype, torch.device, torch.memory_format, torch.layout)


def fake_mode() -> Any:
    """Return a new mode for fake tensors: the fast one, or torch's if this torch has another cache."""
    torch_class = FAKE_TENSOR_MODE.get()  # raises MissingInternal, also if the fast class was made before
    return (_fast_class() or torch_class)()


@cache
def _fast_class() -> Any:
    """Return the class of the fast mode, or None if a small sum does not work in it."""
    try:
        fast_class = _make_class(FAKE_TENSOR_MODE.get(), FAKE_TENSOR.get(), FAKE_CACHE_KEY.get())
        with fast_class():
            sums = [torch.ones(2, 3) + torch.ones(3) for _ in range(3)]  # two come from the cache
    except (MissingInternal, TypeError, AttributeError):
        return None
    return fast_class if all(total.shape == (2, 3) for total in sums) else None


class _Results:
    """Make an operator's results of an entry of torch's cache."""

    def __init__(self, fake_tensor: Any) -> None:
        self._fake_tensor = fake_tensor
        self._make_subclass = MAKE_SUBCLASS.get()
        self._entry_class = FAKE_CACHE_ENTRY.get()
        self._attributes: dict[str, Any] | None = None  # the attributes of every fake CPU tensor without values

    def make(self, mode: Any, entry: Any, args: Any) -> Any:
        """Return the results that the entry describes, or MISSING if torch must make them."""
        if type(entry) is not self._entry_class:
            return MISSING
        outputs = tuple(self._output(mode, facts, args) for facts in entry.output_infos)
        if any(output is MISSING for output in outputs):
            return MISSING
        return outputs if entry.is_output_tuple else outputs[0]

    def _output(self, mode: Any, entry: Any, args: Any) -> Any:
        if entry.inplace_idx is not None:
            return args[entry.inplace_idx]
        facts = entry.metadata
        if facts is None or facts.requires_grad or facts.is_conj or facts.is_neg or facts.device.type != "cpu":
            return MISSING
        result = torch.empty_strided(facts.shape, facts.stride, dtype=facts.dtype, device="meta")
        if entry.view_idx is not None:
            result.set_(args[entry.view_idx].untyped_storage(), facts.storage_offset, facts.shape, facts.stride)
        if self._attributes is None:
            first = self._fake_tensor(mode, result, facts.device)
            self._attributes = dict(vars(first))
            return first
        output = self._make_subclass(self._fake_tensor, result, False, dispatch_device=True, device_for_backend_keys=facts.device)
        vars(output).update(self._attributes)
        return output


def _make_class(base: Any, fake_tensor: Any, key_class: Any) -> Any:
    # torch keeps no results of _unsafe_view, which each linear layer runs. On fake tensors it is a view: autograd saw it before.
    same_result = {UNSAFE_VIEW.get(): torch.ops.aten.view.default}

    class FastFakeMode(base):  # type: ignore[misc]
        """Look an operator up before torch's mode does. If a torch release changes its cache, torch's own methods run."""

        def __init__(self) -> None:
            super().__init__()
            self._results = _Results(fake_tensor)  # one for each mode, which is an attribute of its tensors

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            """Return False, because nothing is compiled in this mode. PyTorch would wrap __torch_dispatch__ in a guard."""
            return False

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            function = same_result.get(function, function)
            key = _fast_key(self, function, args, kwargs)
            if key is not None:
                results = self._results.make(self, base.cache.get(key_class(key)), args)
                if results is not MISSING:
                    return results
            return super().__torch_dispatch__(function, types, args, kwargs)

        def _cache_key(self, state: Any, function: Any, args: Any, kwargs: Any) -> Any:
            key = _fast_key(self, function, args, kwargs)
            return key_class(key) if key is not None else super()._cache_key(state, function, args, kwargs)

    return FastFakeMode


def _fast_key(mode: Any, function: Any, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
    """Return what decides an operator's results, or None if an argument is of another kind."""
    parts = [MARK, function, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
    is_view = function.is_view
    if mode.shape_env is None and all(_describe(parts, values, mode, is_view=is_view) for values in (args, kwargs.items())):
        return tuple(parts)
    return None


def _describe(parts: list[Any], values: Iterable[Any], mode: Any, *, is_view: bool) -> bool:
    """Append what decides an operator's result to ``parts``. Return whether all values are of a common kind.

    The place of a tensor in its storage decides only the results that share the storage (``is_view``). Loops over the parts of a
    tensor find the other results in the cache."""
    for value in values:
        kind = type(value)
        parts.append(kind)  # 1, 1.0 and True are equal
        if kind in PLAIN:
            parts.append(value)
        elif kind in (list, tuple):
            parts.append(len(value))
            if not _describe(parts, value, mode, is_view=is_view):
                return False
        elif isinstance(value, torch.Tensor) and _is_common(value, mode):
            fake: Any = value
            parts += (fake.shape, fake.stride(), fake.dtype, fake.fake_device, fake.requires_grad)
            if is_view:
                parts += (fake.storage_offset(), fake.untyped_storage().nbytes())
        else:
            return False
    return True


def _is_common(tensor: Any, mode: Any) -> bool:
    """Return whether a tensor is a dense fake tensor of this mode without values."""
    if getattr(tensor, "fake_mode", None) is not mode or tensor.constant is not None:
        return False
    is_dense = tensor.layout is torch.strided and not tensor.is_quantized
    return is_dense and not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference())
