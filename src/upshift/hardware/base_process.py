"""Run as a script by the probe: the memory of a process that imported torch and transformers, and does compiling work.

Prints one JSON line: {"resident_bytes", "compiler"}. A process of its own, because that is what a trial is; and free of
upshift's other modules, so that it runs wherever this interpreter does.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path


def resident_bytes(num_threads: int) -> int:
    """RSS after the imports and one matrix product in fp32 and bf16 (the math libraries allocate at first use)."""
    import torch
    import transformers

    _ = transformers.AutoModelForCausalLM  # transformers imports on first access
    torch.set_num_threads(num_threads)
    for dtype in (torch.float32, torch.bfloat16):
        ones = torch.ones(64, 64, dtype=dtype)
        ones @ ones
    return int(importlib.import_module("psutil").Process().memory_info().rss)


def compiler_works() -> bool:
    """Whether the C++ compiler that torch inductor picks accepts the headers that its CPU kernels include."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        compiler = get_cpp_compiler()
    except InvalidCxxCompiler:
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


if __name__ == "__main__":
    resident = resident_bytes(int(sys.argv[1]))
    sys.stdout.write(json.dumps({"resident_bytes": resident, "compiler": compiler_works()}) + "\n")
