"""Measure, in a process that the probe runs, what a process with torch and transformers needs and how fast gloo exchanges.

The process measures its memory after importing torch and transformers, whether compiling works, and how fast gloo exchanges
tensors with another process. It prints one JSON line: {"resident_bytes", "compiler", "exchanges": {operation: [seconds of a
small one, bytes per second]}}. It is a process of its own, because a trial is one, too.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from upshift.errors import MissingInternal
from upshift.internals.torch_names import CPP_COMPILER, NO_COMPILER
from upshift.parent_process import end_with

SMALL_BYTES = 2**10
LARGE_BYTES = 2**23
TIMES = 5
PATIENCE = timedelta(seconds=120)  # how long one process waits for the other


def resident_bytes(num_threads: int) -> int:
    """Return the RSS after the imports and one matrix product in fp32 and bf16 (the math libraries allocate at first use)."""
    import torch
    import transformers

    _ = transformers.AutoModelForCausalLM  # transformers imports on first access
    torch.set_num_threads(num_threads)
    for dtype in (torch.float32, torch.bfloat16):
        ones = torch.ones(64, 64, dtype=dtype)
        ones @ ones
    return int(importlib.import_module("psutil").Process().memory_info().rss)


def compiler_works() -> bool:
    """Return whether the C++ compiler that torch inductor picks accepts the headers that its CPU kernels include."""

    try:
        find = CPP_COMPILER.get()
        no_compiler = NO_COMPILER.get()
    except MissingInternal:  # then torch's helper for extensions, which takes the same variables
        from torch.utils.cpp_extension import get_cxx_compiler as find

        no_compiler = RuntimeError
    try:
        compiler = find()
    except no_compiler:
        return False
    if sys.platform == "win32":
        return True  # get_cpp_compiler ran it; cl has other flags than below
    # On macOS OpenMP's header comes from wherever libomp is, which inductor searches itself.
    openmp = "" if sys.platform == "darwin" else "#include <omp.h>\n"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text(f"#include <Python.h>\n#include <cmath>\n{openmp}int main() {{ return 0; }}\n")
        include = sysconfig.get_path("include")
        command = [compiler, "-std=c++17", "-fsyntax-only", f"-I{include}", str(source)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def other_process(port: int) -> int | None:
    """Fork the process that tensors are exchanged with, before torch has threads. Return its id; None where that cannot be."""
    import torch.distributed as dist

    if not hasattr(os, "fork") or not dist.is_available() or not dist.is_gloo_available():
        return None
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            end_with(parent)
            exchanges(1, port)
        finally:
            os._exit(0)
    return child


def exchanges(rank: int, port: int) -> dict[str, tuple[float, float]]:
    """Return for each operation the seconds for a small tensor and the bytes of a large one per second; medians. Empty without
    gloo."""
    import torch.distributed as dist

    try:
        # Under torchrun an address means the agent's store, and nobody would listen at this one.
        store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, timeout=PATIENCE)
        dist.init_process_group("gloo", store=store, timeout=PATIENCE, rank=rank, world_size=2)
        small, large = (_exchange_seconds(rank, size) for size in (SMALL_BYTES, LARGE_BYTES))
        dist.barrier()
        dist.destroy_process_group()
    except RuntimeError:  # torch raises this type for errors of a process group
        return {}
    return {name: (small[name], LARGE_BYTES / large[name]) for name in small}


def _exchange_seconds(rank: int, num_bytes: int) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    whole = torch.zeros(num_bytes // 4)
    other = torch.zeros(num_bytes // 4)
    half = torch.zeros(num_bytes // 8)
    operations: dict[str, Callable[[], object]] = {
        "all_gather": lambda: dist.all_gather_into_tensor(whole, half),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(half, whole), "all_reduce": lambda: dist.all_reduce(whole),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "send": lambda: dist.recv(whole, 0) if rank else dist.send(whole, 1),
    }  # fmt: skip
    found = {}
    for name, operation in operations.items():
        samples = []
        for _ in range(TIMES + 1):
            dist.barrier()
            start = time.perf_counter()
            operation()
            samples.append(time.perf_counter() - start)
        found[name] = statistics.median(samples[1:])
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    port = _free_port()
    child = other_process(port)
    alone = {"resident_bytes": resident_bytes(int(sys.argv[1])), "compiler": compiler_works()}
    together = {"exchanges": {} if child is None else exchanges(0, port)}
    if child is not None:
        os.waitpid(child, 0)
    sys.stdout.write(json.dumps(alone | together) + "\n")
