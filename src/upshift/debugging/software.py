"""Find libraries, compilers, CUDA toolkits and settings that do not work together. No heavy library is imported."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from upshift.debugging.finding import Finding, error, hint, ok, warning
from upshift.hardware.nvml import WRONG_CHOICE, Gpus, hides_all_gpus
from upshift.hardware.torch_build import DRIVERS, lacks_cuda, needs_newer_driver
from upshift.versions import install_command, installed_version, installed_versions, requirements_of

# The newest gcc that each CUDA release supports: CUDA Installation Guide for Linux, host compiler support policy.
NEWEST_GCC = {(11, 0): 9, (11, 1): 10, (11, 5): 11, (12, 0): 12, (12, 4): 13, (12, 8): 14, (13, 0): 15}

Ask = Callable[[list[str]], str | None]  # returns the output of a command, or None if the command fails


class Compilers(NamedTuple):
    """Hold the compilers and CUDA toolkits in PATH."""

    toolkits: tuple[tuple[Path, tuple[int, int] | None], ...]  # nvcc and its CUDA release, in the order of PATH
    cxx: str | None
    gcc: int | None  # major version
    ninja: str | None


def find_compilers(variables: Mapping[str, str], which: Callable[[str], str | None], ask: Ask) -> Compilers:
    """Find compilers and CUDA toolkits. ``which`` and ``ask`` find and run a program."""
    toolkit_paths: dict[Path, Path] = {}
    for folder in variables.get("PATH", "").split(":"):
        nvcc = Path(folder) / "nvcc" if folder else None
        if nvcc is not None and nvcc.is_file():
            toolkit_paths.setdefault(nvcc.resolve(), nvcc)  # several links to a toolkit count once
    toolkits = tuple((nvcc, _release(ask([str(nvcc), "--version"]))) for nvcc in toolkit_paths.values())
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
        matching = [nvcc for nvcc, release in compilers.toolkits if built and release and release[0] == built[0]]
        home = (matching[0] if matching else compilers.toolkits[0][0]).parent.parent
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
    """Return a release as text: 12.8."""
    return "unknown" if release is None else f"{release[0]}.{release[1]}"


LIBRARIES = (  # their declared requirements are compared with what is installed
    "torch",
    "transformers",
    "accelerate",
    "tokenizers",
    "safetensors",
    "numpy",
    "torchao",
    "peft",
    "bitsandbytes",
    "datasets",
    "deepspeed",
    "vllm",
    "flash-attn",
    "torchvision",
    "torchaudio",
    "onnxruntime",
    "onnx",
    "openvino",
    "nncf",
    "ctranslate2",
    "triton",
)
EXTRAS = {  # libraries that plans and races use if they are installed: their purpose, and the extra's name
    "torchao": ("8-bit and 4-bit optimizers, fp8", "quant"),
    "peft": ("adapters", "peft"),
    "accelerate": ("upshift.Trainer", "trainer"),
    "datasets": ("saved datasets and Parquet", "data"),
    "openvino": ("the OpenVINO engine", "openvino"),
    "onnxruntime": ("the ONNX Runtime engine", "onnx"),
    "ctranslate2": ("the CTranslate2 engine", "ctranslate2"),
    "llama-cpp-python": ("the llama.cpp engine", "llamacpp"),
    "bitsandbytes": ("weights in 4 bits while an adapter is trained", "bitsandbytes"),
}
ALLOCATORS = ("jemalloc", "tcmalloc")
LIBRARY_FOLDERS = ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib", "usr/local/lib")


def examine_requirements(
    requirements: Mapping[str, list[str]] | None = None, versions: Mapping[str, str] | None = None
) -> Iterator[Finding]:
    """Yield an error for each declared requirement of an installed library that is not met."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    versions = installed_versions(LIBRARIES) if versions is None else versions
    requirements = {name: requirements_of(name) for name in versions} if requirements is None else requirements
    broken = False
    for name, lines in requirements.items():
        for line in lines:
            needed = Requirement(line)
            if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
                continue
            installed = versions.get(canonicalize_name(needed.name)) or installed_version(needed.name)
            if installed is None or not needed.specifier.contains(installed, prereleases=True):
                broken = True
                yield error(
                    name,
                    what=f"{name} {versions[name]} needs {needed.name}{needed.specifier}",
                    evidence=f"{needed.name} {installed or 'is not installed'}",
                    fix=f"pip install '{needed.name}{needed.specifier}', or another {name}",
                )
    if not broken:
        names = [name for name in ("torch", "transformers", "tokenizers", "numpy") if name in versions]
        shown = ", ".join(f"{name} {versions[name]}" for name in names)
        yield ok("libraries", what="versions go together", evidence=shown)


def examine_cuda(gpus: Gpus, built: tuple[int, int] | None, is_known: bool, variables: Mapping[str, str]) -> Iterator[Finding]:
    """Compare torch with the driver, and find variables that hide GPUs. ``built``, ``is_known``: the results of
    ``torch_cuda``."""
    if not gpus.states:
        return
    if lacks_cuda(built, is_known):
        yield error(
            "torch",
            what="a GPU is here, and this torch is built without CUDA",
            evidence=gpus.states[0].name,
            fix="pip uninstall -y torch && pip install torch, from an index whose wheels have CUDA",
        )
    if built is not None and gpus.driver_cuda is not None and needs_newer_driver(built, gpus.driver_cuda):
        package = f"nvidia-driver-{DRIVERS.get(built[0], 'NNN')}"
        yield error(
            "driver",
            what=f"torch is built for CUDA {dotted(built)}, the driver serves {dotted(gpus.driver_cuda)}",
            evidence=f"driver {gpus.driver} (NVML)",
            fix=f"sudo apt install {package}, or newer; or install a torch for CUDA {gpus.driver_cuda[0]}",
        )
    hidden = variables.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hides_all_gpus(hidden):
        yield warning(
            "CUDA_VISIBLE_DEVICES",
            what=f"is {hidden!r}: no GPU is seen",
            evidence=f"{len(gpus.states)} GPUs by NVML",
            fix="unset CUDA_VISIBLE_DEVICES",
        )
    if variables.get("NVIDIA_TF32_OVERRIDE") == "0":
        yield warning(
            "NVIDIA_TF32_OVERRIDE",
            what="is 0: NVIDIA's libraries never multiply in TF32, and precision=tf32 is as slow as fp32",
            evidence="environment",
            fix="unset NVIDIA_TF32_OVERRIDE",
        )
    arch = variables.get("TORCH_CUDA_ARCH_LIST")
    capabilities = sorted({gpu.compute_capability for gpu in gpus.states if gpu.compute_capability})
    needed = [dotted(capability) for capability in capabilities]
    if arch is not None and not all(_is_built_for(arch, capability) for capability in capabilities):
        yield error(
            "TORCH_CUDA_ARCH_LIST",
            what=f"is {arch!r}: extensions built with it do not run on all GPUs here",
            evidence=f"compute capabilities {', '.join(needed)}",
            fix=f'export TORCH_CUDA_ARCH_LIST="{";".join(needed)}"',
        )


def examine_chosen_gpus(origin: str) -> Iterator[Finding]:
    """Find a value of CUDA_VISIBLE_DEVICES that shows no GPU by mistake. ``origin``: where the host's GPUs come from."""
    if origin.startswith(WRONG_CHOICE):
        problem, _, fix = origin.partition("; ")
        yield error("GPUs", what=problem, evidence="environment, against NVML", fix=fix)


def _is_built_for(arch_list: str, capability: tuple[int, int]) -> bool:
    """Return whether an extension that was built with this TORCH_CUDA_ARCH_LIST runs on a GPU of this capability.

    Machine code runs on the same major version from its minor version on; that of 9.0a runs on 9.0 alone. +PTX is compiled on any
    later GPU. An entry that is a name, such as Hopper, counts as built.
    Source: CUDA C++ Programming Guide, "Application Compatibility" and "Architecture-Specific Features".
    """
    for entry in filter(None, re.split(r"[;, ]+", arch_list)):
        built = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", entry)
        if built is None:
            return True
        version = (int(built[1]), int(built[2]))
        if version == capability:
            return True
        is_earlier = version < capability and built[3] != "a"
        if is_earlier and (version[0] == capability[0] or built[4] is not None):
            return True
    return False


def examine_threads(variables: Mapping[str, str], *, usable_cores: int, local_ranks: int) -> Iterator[Finding]:
    """Compare the threads that OpenMP and MKL will start with the usable cores."""
    share = max(1, usable_cores // local_ranks)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        text = variables.get(name, "")
        if text and not text.isdigit():
            yield warning(
                name, what=f"is {text!r}, not a number of threads", evidence="environment", fix=f"export {name}={share}"
            )
        elif text and int(text) * local_ranks > usable_cores:
            ranks = f" x {local_ranks} ranks" if local_ranks > 1 else ""
            yield warning(
                name,
                what=f"asks for more threads than there are cores: {text}{ranks} on {usable_cores}",
                evidence="environment; cores by affinity and cgroup",
                fix=f"export {name}={share}",
            )
        elif text and int(text) * local_ranks * 2 <= usable_cores:
            yield hint(
                name,
                what=f"leaves cores idle: {text} of {usable_cores}",
                evidence="environment; Upshift sets its own threads, other programs follow it",
                fix=f"export {name}={share}, or unset {name}",
            )


def examine_switches(variables: Mapping[str, str]) -> Iterator[Finding]:
    """Find settings that slow every run, such as switches left on after debugging."""
    for name, effect in (
        ("CUDA_LAUNCH_BLOCKING", "every kernel is waited for"),
        ("NCCL_P2P_DISABLE", "GPUs exchange through host memory"),
        ("NCCL_SHM_DISABLE", "ranks of one host exchange through the network"),
        ("NCCL_IB_DISABLE", "InfiniBand is not used"),
        ("TORCH_SHOW_CPP_STACKTRACES", "every raised error reads symbols"),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "every tensor is allocated anew"),
    ):
        if variables.get(name, "0") not in ("", "0"):
            yield warning(name, what=f"is set: {effect}", evidence=f"{name}={variables[name]}", fix=f"unset {name}")
    for folder in variables.get("LD_LIBRARY_PATH", "").split(":"):
        if not folder:
            continue
        files = Path(folder).glob("lib*.so*")
        shadowing = sorted(file.name for file in files if re.match(r"lib(nccl|cudnn|cublas)\.so", file.name))
        if shadowing:
            yield warning(
                "LD_LIBRARY_PATH",
                what=f"{shadowing[0]} of {folder} is loaded instead of the one that torch brings",
                evidence="LD_LIBRARY_PATH comes before the libraries of pip's wheels",
                fix="unset LD_LIBRARY_PATH",
            )


def examine_allocators(variables: Mapping[str, str], root: Path) -> Iterator[Finding]:
    preload = variables.get("LD_PRELOAD", "")
    if any(name in preload for name in ALLOCATORS):
        yield ok("allocator", what="a faster one than the system's is preloaded", evidence=f"LD_PRELOAD={preload}")
        return
    files: list[Path] = []
    for name in ALLOCATORS:
        for folder in LIBRARY_FOLDERS:
            files += sorted((root / folder).glob(f"lib{name}*.so*"))
    install = "" if files else "sudo apt install libjemalloc2; "
    path = f"/{files[0].relative_to(root)}" if files else "$(ldconfig -p | grep -o '/.*libjemalloc.so.2')"
    yield hint(
        "allocator",
        what="the system's: jemalloc or tcmalloc can be faster where many tensors come and go on the CPU",
        evidence="installed, not used" if files else "neither is installed",
        cause="not measured here: time your own job with and without",
        fix=f"{install}export LD_PRELOAD={path}",
    )


def examine_extras(versions: Mapping[str, str] | None = None) -> Iterator[Finding]:
    installed = installed_versions(EXTRAS) if versions is None else versions
    missing = {library: purpose for library, purpose in EXTRAS.items() if library not in installed}
    if missing:
        yield hint(
            "extras",
            what=f"not installed, so no plan can use: {', '.join(f'{name} ({purpose[0]})' for name, purpose in missing.items())}",
            evidence="importlib.metadata",
            fix=install_command(*sorted({extra for _, extra in missing.values()})),
        )
