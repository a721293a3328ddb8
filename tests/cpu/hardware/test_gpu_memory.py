"""What a GPU's process holds and how it says that memory ran out: words and counters of CUDA, on a machine without it."""

from __future__ import annotations

import pytest
import torch

from upshift.planning.cost.process_memory import outside_allocator
from upshift.planning.plan import Plan
from upshift.training.held_memory import held_bytes, held_peak_bytes, reset_held_peak
from upshift.training.out_of_memory import is_out_of_memory
from upshift.training.rank_processes import lost_connection
from upshift.units import GIB


@pytest.mark.parametrize(
    ("words", "ran_out"),
    [
        ("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", True),
        ("NCCL error in: ncclUtils.hpp:318, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'", True),
        ("NCCL error in: NCCLUtils.cpp:94, unhandled cuda error\nLast error:\nCuda failure 'out of memory'", True),
        ("HIP error: out of memory", True),
        ("HIP failure 'out of memory'", True),
        ("CUDA driver error: out of memory", True),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", True),
        ("cuFFT error: CUFFT_ALLOC_FAILED", True),
        ("CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparseCreate(handle)`", True),
        ("Triton Error [CUDA]: out of memory", True),
        ('NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":1154', True),
        ("CUDA error: an illegal memory access was encountered", False),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`", False),
        ("Cuda failure 700 'an illegal memory access was encountered'", False),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR", False),
        ("CUDA driver error: invalid argument", False),
    ],
)
@pytest.mark.parametrize("kind", ["RuntimeError", "AcceleratorError", "DistBackendError"])
def test_words_of_memory_that_ran_out(words: str, ran_out: bool, kind: str) -> None:
    accelerator = getattr(torch, "AcceleratorError", RuntimeError)
    kinds = {"AcceleratorError": accelerator, "DistBackendError": torch.distributed.DistBackendError}
    error = kinds.get(kind, RuntimeError)(words)
    assert is_out_of_memory(error) is ran_out
    wrapped = RuntimeError("a stage failed")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped) is ran_out
    assert not (ran_out and lost_connection(wrapped)), "the other ranks would hear of a lost connection, and not of memory"


def test_a_connection_that_breaks_is_no_lack_of_memory() -> None:
    assert lost_connection(torch.distributed.DistBackendError("NCCL communicator was aborted on rank 1"))


def test_held_on_a_gpu_is_this_process_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the host's memory nor what other processes hold of the device counts."""
    plan = Plan(device="cuda", host="h", model="m", sequence_length=8, per_device_train_batch_size=1)
    reserved = {"now": 2 * GIB, "peak": 3 * GIB}
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda: int(reserved["now"]))
    monkeypatch.setattr("torch.cuda.max_memory_reserved", lambda: int(reserved["peak"]))
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda: reserved.update(peak=reserved["now"]))
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (0, 80 * GIB))  # another user has the rest
    outside = round(outside_allocator(plan))
    assert (held_bytes(plan), held_peak_bytes(plan)) == (2 * GIB + outside, 3 * GIB + outside)
    reset_held_peak(plan)
    assert held_peak_bytes(plan) == 2 * GIB + outside
