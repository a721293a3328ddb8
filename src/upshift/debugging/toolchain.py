"""Examine the compilers and CUDA toolkits that PATH leads to: which extensions can be built with them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from upshift.debugging.finding import Finding, hint, warning
from upshift.hardware.gpu_state import Gpus

# The newest host compiler of each CUDA: CUDA Installation Guide for Linux, host compiler support policy.
NEWEST_GCC = {(11, 0): 9, (11, 1): 10, (11, 5): 11, (12, 0): 12, (12, 4): 13, (12, 8): 14, (13, 0): 15}

Ask = Callable[[list[str]], str | None]  # a command's output; None: it failed


class Compilers(NamedTuple):
    """The compilers and toolkits that PATH leads to."""

    toolkits: tuple[tuple[Path, tuple[int, int] | None], ...]  # nvcc, first in PATH first; its CUDA
    cxx: str | None
    gcc: int | None  # major version
    ninja: str | None


def find_compilers(variables: Mapping[str, str], which: Callable[[str], str | None], ask: Ask) -> Compilers:
    found: dict[Path, Path] = {}
    for folder in variables.get("PATH", "").split(":"):
        nvcc = Path(folder) / "nvcc" if folder else None
        if nvcc is not None and nvcc.is_file():
            found.setdefault(nvcc.resolve(), nvcc)  # two links to one toolkit count once
    toolkits = tuple((nvcc, _release(ask([str(nvcc), "--version"]))) for nvcc in found.values())
    cxx = next((path for name in ("g++", "c++", "clang++") if (path := which(name))), None)
    version = ask([cxx, "-dumpfullversion"]) if cxx and not cxx.endswith("clang++") else None
    major = re.match(r"\d+", version or "")
    return Compilers(toolkits, cxx, int(major.group()) if major else None, which("ninja"))


def _release(text: str | None) -> tuple[int, int] | None:
    match = re.search(r"release (\d+)\.(\d+)", text or "")
    return (int(match[1]), int(match[2])) if match else None


def examine_compilers(
    compilers: Compilers, gpus: Gpus, built: tuple[int, int] | None, versions: Mapping[str, str]
) -> Iterator[Finding]:
    if compilers.cxx is None:
        yield warning(
            "compiler",
            what="no C++ compiler: torch.compile cannot make code for the CPU",
            evidence="PATH",
            fix="sudo apt install g++, or conda install gxx_linux-64",
        )
    first = compilers.toolkits[0] if compilers.toolkits else None
    if len(compilers.toolkits) > 1:
        listed = ", ".join(f"{nvcc.parent.parent} (CUDA {dotted(release)})" for nvcc, release in compilers.toolkits)
        fitting = next(
            (
                nvcc
                for nvcc, release in compilers.toolkits
                if built is not None and release is not None and release[0] == built[0]
            ),
            None,
        )
        home = (fitting or compilers.toolkits[0][0]).parent.parent
        yield warning(
            "CUDA toolkits",
            what=f"{len(compilers.toolkits)} toolkits in PATH; extensions are built with the first",
            evidence=listed,
            fix=f"export CUDA_HOME={home} PATH={home}/bin:$PATH LD_LIBRARY_PATH={home}/lib64:$LD_LIBRARY_PATH",
        )
    if first is not None and built is not None and first[1] is not None and first[1][0] != built[0]:
        yield warning(
            "CUDA toolkit",
            what=f"nvcc is of CUDA {dotted(first[1])}, torch of {dotted(built)}: extensions refuse to build",
            evidence=str(first[0]),
            fix=f"install CUDA toolkit {dotted(built)} and put it first: export PATH=/usr/local/cuda-{dotted(built)}/bin:$PATH",
        )
    if first is not None and first[1] is not None and compilers.gcc is not None:
        newest = max((pair for pair in NEWEST_GCC.items() if pair[0] <= first[1]), default=(None, None))[1]
        if newest is not None and compilers.gcc > newest:
            yield warning(
                "compiler",
                what=f"gcc {compilers.gcc} is newer than nvcc of CUDA {dotted(first[1])} takes ({newest})",
                evidence=f"{compilers.cxx}; CUDA Installation Guide, host compilers",
                fix=f"sudo apt install g++-{newest}; export CXX=g++-{newest} NVCC_PREPEND_FLAGS='-ccbin g++-{newest}'",
            )
    yield from _extensions(compilers, gpus, versions)


def _extensions(compilers: Compilers, gpus: Gpus, versions: Mapping[str, str]) -> Iterator[Finding]:
    if gpus.states and compilers.toolkits and compilers.ninja is None:
        yield hint("compiler", what="no ninja: extensions build one file at a time", evidence="PATH", fix="pip install ninja")
    if "deepspeed" in versions:
        arch = ";".join(sorted({dotted(gpu.compute_capability) for gpu in gpus.states if gpu.compute_capability}))
        yield hint(
            "DeepSpeed",
            what="builds its operators at first use, in every node's first minutes",
            evidence=f"deepspeed {versions['deepspeed']}",
            fix=(f'TORCH_CUDA_ARCH_LIST="{arch}" ' if arch else "")
            + "DS_BUILD_CPU_ADAM=1 DS_BUILD_UTILS=1 DS_BUILD_AIO=1 pip install deepspeed "
            "--no-binary deepspeed --no-build-isolation --no-cache-dir (DS_BUILD_AIO: sudo apt install libaio-dev first)",
        )


def dotted(release: tuple[int, int] | None) -> str:
    return "unknown" if release is None else f"{release[0]}.{release[1]}"
