"""Tell an error for want of memory from an error of a model's code."""

from __future__ import annotations

# DefaultCPUAllocator of torch, oneDNN, and CUDA's allocator
SHORTAGE_TEXTS = ("can't allocate memory", "cannot allocate memory", "not enough memory", "out of memory")


def raise_if_out_of_memory(error: Exception) -> None:
    """Raise MemoryError if the error is for want of memory. Such an error says nothing about the model."""
    text = str(error).lower()
    if isinstance(error, MemoryError) or isinstance(error, RuntimeError) and any(part in text for part in SHORTAGE_TEXTS):
        raise MemoryError(str(error)) from error
