"""Measure this machine's GPUs. The probe runs this module in processes of its own, so that its own process never uses CUDA.

A process that has used CUDA keeps memory of the GPU, and its forks cannot use one. ``rates`` measures the first GPU, and
``exchanges`` how fast all GPUs exchange tensors by NCCL; each of its ranks is a process. A process prints one JSON line: what it
measured, and under ``failures`` the message of each measurement that failed, by its name.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Any

from upshift.hardware.exchange_probe import measure_exchanges
from upshift.hardware.probe import dispatch_seconds, matrix_rate, median_seconds, triad_rate
from upshift.hardware.spec import TRITON_CAPABILITY
from upshift.parent_process import take_stdout
from upshift.settings import read_nccl_paths
from upshift.units import MIB

if TYPE_CHECKING:
    import torch

SIDES = (8192, 4096, 2048, 1024, 512)  # sides of the square matrices; the largest that fits the memory and the time
BYTES_PER_ELEMENT = 20  # three matrices in fp32, and two before they are converted
STREAM_BYTES = 1024 * MIB  # of one array
SMALL_STREAM_BYTES = 64 * MIB
PINNED_BYTES = 256 * MIB
EXCHANGED_BYTES = 64 * MIB
PRODUCTS = (("fp32", "float32"), ("fp32_medium", "float32"), ("bf16", "bfloat16"), ("fp16", "float16"))
NUM_MEASUREMENTS = 6


def measure_rates(limit_seconds: float, unsupported: list[str]) -> dict[str, Any]:
    """Return the rates of the first GPU. A measurement that fails, such as one for which memory is missing, is None."""
    import torch

    seconds_each = limit_seconds / NUM_MEASUREMENTS
    failures: dict[str, str] = {}
    rates: dict[str, float | None] = {}
    for name, dtype in PRODUCTS:
        torch.set_float32_matmul_precision("medium" if name == "fp32_medium" else "highest")
        if name in unsupported:
            rates[name] = None
        else:
            rates[name] = _try(failures, name, partial(_product_rate, getattr(torch, dtype), seconds_each))
    rates["memory_bytes_per_second"] = _try(failures, "memory", lambda: _stream_rate(seconds_each))
    torch.cuda.empty_cache()
    return {
        "gpu": rates,
        "gpu_compiler": triton_compiles(torch.cuda.get_device_capability()),
        "gpu_dispatch_seconds": _try(failures, "dispatch", lambda: dispatch_seconds("cuda")),
        "host_to_device_bytes_per_second": _try(failures, "copies from the host", lambda: _copy_rate(seconds_each)),
        "failures": failures,
    }


def triton_compiles(capability: tuple[int, int]) -> bool:
    """Return whether Triton is installed, runs on the GPU, and finds the C compiler and the header that its launcher needs."""
    has_compiler = any(which(name) for name in ("cc", "gcc", "clang"))
    has_header = (Path(sysconfig.get_path("include")) / "Python.h").is_file()
    return find_spec("triton") is not None and capability >= TRITON_CAPABILITY and has_compiler and has_header


def _try(failures: dict[str, str], name: str, measure: Callable[[], float]) -> float | None:
    """Return what ``measure`` returns. If it fails, add its message to ``failures`` and return None."""
    try:
        return measure()
    except RuntimeError as error:  # torch raises this type for all errors of a GPU, out of memory included
        failures[name] = _first_line(error)
        return None


def _first_line(error: RuntimeError) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _product_rate(dtype: torch.dtype, limit_seconds: float) -> float:
    """Return the FLOP/s of the largest product that fits into half of the free memory and, four times, into the time."""
    import torch

    free_bytes = torch.cuda.mem_get_info()[0]
    sides = [side for side in SIDES if side * side * BYTES_PER_ELEMENT <= free_bytes / 2]
    smallest = SIDES[-1]
    small_rate = matrix_rate("cuda", dtype, (smallest, smallest, smallest), limit_seconds=limit_seconds / 4)
    for side in sides:
        if 4 * 2 * side**3 / small_rate <= limit_seconds:
            return matrix_rate("cuda", dtype, (side, side, side), limit_seconds=limit_seconds / 2)
    return small_rate


def _stream_rate(limit_seconds: float) -> float:
    import torch

    largest = min(STREAM_BYTES, torch.cuda.mem_get_info()[0] // 8)
    small = min(SMALL_STREAM_BYTES, largest)
    small_rate = triad_rate("cuda", small, limit_seconds=limit_seconds / 4)
    if 4 * 3 * largest / small_rate > limit_seconds:
        return small_rate
    return triad_rate("cuda", largest, limit_seconds=limit_seconds / 2)


def _copy_rate(limit_seconds: float) -> float:
    import torch

    num_bytes = min(PINNED_BYTES, torch.cuda.mem_get_info()[0] // 2)
    pinned = torch.ones(num_bytes, dtype=torch.uint8).pin_memory()
    target = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    return num_bytes / median_seconds(lambda: target.copy_(pinned), repeats=5, limit_seconds=limit_seconds)


def exchange_path(ranks: int) -> str:
    """Return in words how NCCL moves bytes between the GPUs: peer to peer, or through the host's memory."""
    nccl = read_nccl_paths()
    if nccl.peers_are_off or not are_peers(ranks):
        return "through the host"
    return f"at NCCL_P2P_LEVEL={nccl.p2p_level}" if nccl.p2p_level else "peer to peer"


def are_peers(ranks: int) -> bool:
    """Return whether every GPU can read the memory of every other one. If not, NCCL copies through the host's memory."""
    import torch

    pairs = [(reader, owner) for reader in range(ranks) for owner in range(ranks) if reader != owner]
    return all(torch.cuda.can_device_access_peer(reader, owner) for reader, owner in pairs)


def measure_rank(rank: int, ranks: int, port: int) -> dict[str, Any]:
    """Return the exchanges and their path on the first rank. The other ranks only take part."""
    import torch

    try:
        torch.cuda.set_device(rank)
        exchanges = measure_exchanges("nccl", "cuda", rank=rank, ranks=ranks, port=port, large_bytes=EXCHANGED_BYTES)
        return {"exchanges": exchanges, "path": exchange_path(ranks), "failures": {}} if rank == 0 else {"failures": {}}
    except RuntimeError as error:  # errors of NCCL and of the store are of this type, too
        return {"failures": {"exchanges": _first_line(error)}}


def main(arguments: list[str]) -> None:
    """Write one JSON line to standard output. End with 1 if a rank of the exchanges failed."""
    stdout = take_stdout()
    is_rank = arguments[0] == "exchanges"
    if is_rank:
        rank, ranks, port = map(int, arguments[1:])
        answer = measure_rank(rank, ranks, port)
    else:
        answer = measure_rates(float(arguments[1]), arguments[2:])
    stdout.write(json.dumps(answer) + "\n")
    stdout.flush()
    if is_rank and answer["failures"]:
        os._exit(1)  # the interpreter's end would wait for NCCL, and so for the ranks that wait for this one


if __name__ == "__main__":
    main(sys.argv[1:])
