# needs torch
"""Make fake tensors faster than torch does, with the same results.

torch keeps the result of each operator on fake tensors in a cache. A third of a trace's time goes to the cache's keys, which hold
17 facts about each tensor, and a tenth to new results. Tensors of the common kind differ in eight facts. Everything else gets
torch's own key.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch

from upshift.errors import MissingInternal
from upshift.internals.torch_names import FAKE_CACHE_KEY, FAKE_TENSOR, FAKE_TENSOR_MODE

MARK = "upshift"  # the first part of our keys in torch's cache
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
            sums = [torch.ones(2, 3) + torch.ones(3) for _ in range(2)]  # the second comes from the cache
    except (MissingInternal, TypeError, AttributeError):
        return None
    return fast_class if all(total.shape == (2, 3) for total in sums) else None


def _make_class(base: Any, fake_tensor: Any, key_class: Any) -> Any:
    class FastFakeMode(base):  # type: ignore[misc]
        """Override two methods of torch's mode. If a torch release renames them, torch's own methods run."""

        def _cache_key(self, state: Any, function: Any, args: Any, kwargs: Any) -> Any:
            parts = [MARK, function, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
            if self.shape_env is None and _describe(parts, args, self) and _describe(parts, kwargs.items(), self):
                return key_class(tuple(parts))
            return super()._cache_key(state, function, args, kwargs)

        def _get_output_tensor_from_cache_entry(self, state: Any, entry: Any, key: Any, function: Any, args: Any) -> Any:
            facts = entry.metadata
            is_new = facts is not None and entry.inplace_idx is None and entry.view_idx is None
            if not is_new or key.key[0] != MARK or facts.requires_grad or facts.is_conj or facts.is_neg:
                return super()._get_output_tensor_from_cache_entry(state, entry, key, function, args)
            result = torch.empty_strided(facts.shape, facts.stride, dtype=facts.dtype, device="meta")
            return fake_tensor(self, result, facts.device)

    return FastFakeMode


def _describe(parts: list[Any], values: Iterable[Any], mode: Any) -> bool:
    """Append what decides an operator's result to ``parts``. Return whether all values are of a common kind."""
    for value in values:
        kind = type(value)
        parts.append(kind)  # 1, 1.0 and True are equal
        if kind in PLAIN:
            parts.append(value)
        elif kind in (list, tuple):
            parts.append(len(value))
            if not _describe(parts, value, mode):
                return False
        elif isinstance(value, torch.Tensor) and _is_common(value, mode):
            fake: Any = value
            storage = (fake.storage_offset(), fake.untyped_storage().nbytes())
            parts += (fake.shape, fake.stride(), fake.dtype, fake.fake_device, storage, fake.requires_grad)
        else:
            return False
    return True


def _is_common(tensor: Any, mode: Any) -> bool:
    """Return whether a tensor is a dense fake tensor of this mode without values."""
    if getattr(tensor, "fake_mode", None) is not mode or tensor.constant is not None:
        return False
    is_dense = tensor.layout is torch.strided and not tensor.is_quantized
    return is_dense and not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference())
