"""Build the pretended GPU's library once for a version of torch, and name the environment in which a process has the device."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch

DEVICE = Path(__file__).parent / "device"
ROOT = Path(__file__).parents[2]
BUILD_SECONDS = 900.0

Run = Callable[..., subprocess.CompletedProcess[str]]


def missing() -> str | None:
    """Return why the library cannot be built here, if it cannot."""
    if shutil.which("g++") is None:
        return "the pretended GPU is built by g++, which is not installed"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        return "the pretended GPU is built with Python.h, which is not installed"
    return None


def library() -> Path:
    """Return the built library. It is kept in build/, one for each torch, Python and source."""
    source = DEVICE / "pretended_cuda.cpp"
    sources = source.read_bytes() + (DEVICE / "pretended_nccl.h").read_bytes()
    key = f"{torch.__version__}-{sysconfig.get_config_var('SOABI')}-{hashlib.sha256(sources).hexdigest()[:16]}"
    path = ROOT / "build" / "pretended_gpu" / f"{key}.so"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        _build(source, path)
    return path


def _build(source: Path, path: Path) -> None:
    torch_folder = Path(torch.__file__).parent
    partial = path.with_suffix(f".{os.getpid()}.so")
    command = [
        "g++", "-O0", "-std=c++20", "-fPIC", "-shared", str(source), "-o", str(partial),
        "-DTORCH_EXTENSION_NAME=pretended_cuda_ext", "-D_GLIBCXX_USE_CXX11_ABI=1",
        f"-I{torch_folder}/include", f"-I{torch_folder}/include/torch/csrc/api/include",
        f"-I{sysconfig.get_paths()['include']}", f"-L{torch_folder}/lib", "-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python",
        f"-Wl,-rpath,{torch_folder}/lib",
    ]  # fmt: skip
    built = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
    assert built.returncode == 0, built.stderr[-3000:]
    partial.replace(path)


def environment(gpus: str, **more: str) -> dict[str, str]:
    """Return the environment of a process that has these GPUs, such as 2xh100."""
    ours = (DEVICE, ROOT / "src", ROOT / "tests" / "cpu" / "helpers")
    paths = [*map(str, ours), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ, "PRETENDED_GPUS": gpus, "PRETENDED_GPU_LIBRARY": str(library()), "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1", **more,
    }  # fmt: skip
