"""Measure the fixed costs of a process with torch and transformers. The probe runs this module as a process.

It measures the memory of the process after importing torch and transformers, checks whether compiling works, and measures how
fast gloo exchanges tensors with another process. It prints one JSON line: {"resident_bytes", "compiler", "exchanges": {operation:
[seconds of a small tensor, bytes per second of a large one]}, "failures": {measurement: reason}}. A measurement that failed is
null. Exchanges are empty where there is no gloo. A trial is a process of its own, so this is one, too.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

from upshift.errors import MissingInternal
from upshift.hardware.exchange_probe import free_port, measure_exchanges
from upshift.importing import importing
from upshift.internals.torch_names import CPP_COMPILER, NO_COMPILER
from upshift.parent_process import end_with, take_stdout

LARGE_BYTES = 2**23


def measure_resident_bytes(num_threads: int) -> int:
    """Return the RSS after the imports and a matrix product in fp32 and bf16, as math libraries allocate at their first use."""
    with importing():
        import torch
        import transformers

        _ = transformers.AutoModelForCausalLM  # transformers imports on first access
    torch.set_num_threads(num_threads)
    for dtype in (torch.float32, torch.bfloat16):
        ones = torch.ones(64, 64, dtype=dtype)
        ones @ ones
    return int(importlib.import_module("psutil").Process().memory_info().rss)


def compiler_works() -> bool:
    """Return whether the C++ compiler that torch inductor chooses can compile the headers of its CPU kernels.

    Raise OSError if the compiler could not do its work, such as for lack of memory or of space on the disk."""
    try:
        find = CPP_COMPILER.get()
        no_compiler = NO_COMPILER.get()
    except MissingInternal:  # torch's helper for extensions reads the same environment variables
        from torch.utils.cpp_extension import get_cxx_compiler as find

        no_compiler = RuntimeError
    try:
        compiler = find()
    except no_compiler:
        return False
    if sys.platform == "win32":
        return True  # get_cpp_compiler has already run it, and cl has other flags than those below
    # On macOS inductor itself searches for libomp, which has OpenMP's header.
    openmp = "" if sys.platform == "darwin" else "#include <omp.h>\n"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text(f"#include <Python.h>\n#include <cmath>\n{openmp}int main() {{ return 0; }}\n")
        include = sysconfig.get_path("include")
        command = [compiler, "-std=c++17", "-fsyntax-only", f"-I{include}", str(source)]
        status = subprocess.run(command, capture_output=True, check=False).returncode
    if status < 0:  # a signal ended it, as the kernel's does when memory runs out
        raise OSError(f"{compiler} was ended by signal {-status}")
    return status == 0


def fork_exchange_partner(port: int) -> int | None:
    """Fork the process to exchange tensors with, before torch has threads. Return its id, or None if that is not possible."""
    with importing():
        import torch.distributed as dist

    if not hasattr(os, "fork") or not dist.is_available() or not dist.is_gloo_available():
        return None
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            end_with(parent)
            measure_gloo(1, port)
        except RuntimeError:  # rank 0 has one, too, and reports it
            pass
        finally:
            os._exit(0)
    return child


def measure_gloo(rank: int, port: int) -> dict[str, tuple[float, float]]:
    """Return the exchanges of gloo between two processes. Raise RuntimeError, as torch does, if gloo fails."""
    return measure_exchanges("gloo", "cpu", rank=rank, ranks=2, port=port, large_bytes=LARGE_BYTES)


def answer(measurements: dict[str, Callable[[], object]]) -> dict[str, object]:
    """Return the results by name, and None and its reason for each measurement that fails."""
    results: dict[str, object] = {}
    failures: dict[str, str] = {}
    for name, run in measurements.items():
        try:
            results[name] = run()
        except (OSError, RuntimeError) as error:
            results[name] = None
            failures[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    return results | {"failures": failures}


if __name__ == "__main__":
    stdout = take_stdout()
    port = free_port()
    child = fork_exchange_partner(port)
    measured = answer(
        {
            "resident_bytes": lambda: measure_resident_bytes(int(sys.argv[1])),
            "compiler": compiler_works,
            "exchanges": lambda: {} if child is None else measure_gloo(0, port),
        }
    )
    if child is not None:
        os.waitpid(child, 0)
    stdout.write(json.dumps(measured) + "\n")
    stdout.flush()
