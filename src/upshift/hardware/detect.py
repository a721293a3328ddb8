"""Detect this machine without torch: the CPU from /proc and /sys, limits from control groups, GPUs from NVML.

On systems without these files (macOS, Windows) psutil provides some facts, and the others are None.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from upshift.hardware.catalog.interconnect import gpu_link, pcie_link
from upshift.hardware.catalog.nvidia import NVIDIA_GPUS
from upshift.hardware.cgroup import CgroupLimits, read_limits, read_text
from upshift.hardware.host_memory import read_host_memory
from upshift.hardware.nvml import find_gpus
from upshift.hardware.spec import Cpu, Gpu, Host, Isa
from upshift.settings import read_settings
from upshift.units import KIB, MIB

ARCHITECTURES = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}
# Flags of /proc/cpuinfo, by architecture, because "bf16" and others have another meaning on each.
ISA_FLAGS: dict[str, dict[str, Isa]] = {
    "x86_64": {
        "avx2": "avx2", "avx512f": "avx512f", "avx512_bf16": "avx512_bf16", "avx512_fp16": "avx512_fp16",
        "avx512_vnni": "avx512_vnni", "avx_vnni": "avx_vnni",
        "amx_bf16": "amx_bf16", "amx_fp16": "amx_fp16", "amx_int8": "amx_int8",
    },
    "aarch64": {
        "asimd": "neon", "asimdhp": "neon_fp16", "asimddp": "neon_dotprod", "bf16": "neon_bf16", "i8mm": "neon_i8mm",
        "sve": "sve", "sve2": "sve2",
    },
}  # fmt: skip
AMD_UNUSED = "none that Upshift uses: it trains and serves on NVIDIA's GPUs, and AMD's are planned for with --on only"
FIND_NVML = object()
FROM_ENVIRONMENT = object()


def detect(
    root: Path = Path("/"),
    *,
    nvml: Any = FIND_NVML,
    affinity: Collection[int] | None = None,
    visible_devices: Any = FROM_ENVIRONMENT,
) -> Host:
    """Return the machine that this process runs on. Missing facts are None, and `origin` says why.

    `root` (the folder with proc and sys), `nvml` (a module like pynvml, or None) and `affinity` (CPU numbers) are for tests.
    `visible_devices` replaces the value of CUDA_VISIBLE_DEVICES; None shows every GPU.
    """
    if visible_devices is FROM_ENVIRONMENT:
        visible_devices = read_settings().cuda_visible_devices
    limits = read_limits(root)
    cpu, cpu_origin = _cpu(root, affinity, limits)
    gpus, gpu_origin = find_gpus(find_nvml() if nvml is FIND_NVML else nvml, visible_devices)
    if not gpus:
        gpu_origin = _unused_amd(root) or gpu_origin
    shares_memory = any(_shares_memory(gpu) and gpu.memory_bytes is None for gpu in gpus)
    gpus = tuple(_with_shared_memory(gpu, cpu) if _shares_memory(gpu) else gpu for gpu in gpus)
    is_uniform = len({str(gpu.identity()) for gpu in gpus}) == 1
    gpu = _with_least_free_memory(gpus) if is_uniform else None
    link = gpu_link(gpu) if gpu is not None and len(gpus) > 1 else None
    origin = cpu_origin | {"gpu": gpu_origin}
    if gpu is not None:
        unknown = f"{gpu.name!r} is not in the table"
        if gpu.table_key:
            source = f"table: {NVIDIA_GPUS[gpu.table_key].source}"
        elif gpu.peak is not None:
            source = f"estimated: {unknown}; NVML's cores, clocks and bus at the highest clocks"
        else:
            source = f"unknown: {unknown}"
        origin |= {"gpu.peak": source, "host_to_device": "NVML and PCI Express base specification"}
        if shares_memory:
            origin |= {
                "gpu.memory_bytes": f"{'table' if gpu.table_key else cpu_origin['cpu.memory_bytes']}: shared with the CPU",
                "gpu.free_memory_bytes": f"{cpu_origin['cpu.free_memory_bytes']}: shared with the CPU",
            }
    return Host(
        name="this machine",
        cpu=cpu,
        gpus_per_node=len(gpus),
        gpu=gpu,
        mixed_gpus=() if is_uniform else gpus,
        intra_node=link,
        host_to_device=None if gpu is None else pcie_link(gpu),
        origin=origin | ({"intra_node": "NVML and the link's specification"} if link else {}),
    )


def _unused_amd(root: Path) -> str | None:
    """Return a remark about AMD's GPUs, which ROCm's kernel driver lists: Upshift does not use them. None if there are none."""
    nodes = (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")
    is_gpu = [re.search(r"^simd_count [1-9]", read_text(properties), re.MULTILINE) is not None for properties in nodes]
    if not any(is_gpu):
        return None
    return f"{AMD_UNUSED}: {sum(is_gpu)} here"


def find_nvml() -> Any:
    """Return the module pynvml, or None if it is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def _shares_memory(gpu: Gpu) -> bool:
    """Return whether a GPU uses the CPU's memory (NVIDIA GB10, Jetson). NVML reports none for a GPU that is not in the table."""
    return NVIDIA_GPUS[gpu.table_key].gpu.shares_host_memory if gpu.table_key else gpu.memory_bytes is None


def _with_shared_memory(gpu: Gpu, cpu: Cpu) -> Gpu:
    """Return the GPU marked as sharing the CPU's memory, with the CPU's figures where NVML has none."""
    gpu = gpu.changed(shares_host_memory=True)
    if gpu.memory_bytes is not None:
        return gpu
    listed = NVIDIA_GPUS[gpu.table_key].gpu.memory_bytes if gpu.table_key else None
    memory_bytes = listed or cpu.memory_bytes
    return gpu.changed(memory_bytes=memory_bytes, free_memory_bytes=cpu.free_memory_bytes)


def _with_least_free_memory(gpus: tuple[Gpu, ...]) -> Gpu:
    free = [gpu.free_memory_bytes for gpu in gpus if gpu.free_memory_bytes is not None]
    return gpus[0].changed(free_memory_bytes=min(free) if len(free) == len(gpus) else None)


def _cpu(root: Path, affinity: Collection[int] | None, limits: CgroupLimits) -> tuple[Cpu, dict[str, str]]:
    info = _cpuinfo(root)
    architecture = ARCHITECTURES.get(platform.machine().lower())
    cores = _core_of_cpu(root)
    total, available, memory_origin = read_host_memory(root)
    usable, usable_origin = _usable_cores(cores, affinity, limits)
    flags = info.get("flags") or info.get("Features")
    isa = None if flags is None or architecture is None else _isa(architecture, set(flags.split()))
    cpu = Cpu(
        model_name=info.get("model name"),
        architecture=architecture,
        physical_cores=len(set(cores.values())) or _psutil_cores(),
        usable_cores=usable,
        numa_nodes=_numa_nodes(root),
        l2_total_bytes=_cache_bytes(root, level=2),
        l3_total_bytes=_cache_bytes(root, level=3),
        isa=isa,
        memory_bytes=_bounded(total, limits.memory_bytes),
        free_memory_bytes=_bounded(available, limits.free_memory_bytes),
    )
    limited = limits.memory_bytes is not None and limits.memory_bytes < total
    origin = {
        "cpu.model_name": "/proc/cpuinfo",
        "cpu.isa": "/proc/cpuinfo",
        "cpu.physical_cores": "/sys/devices/system/cpu" if cores else "psutil",
        "cpu.usable_cores": usable_origin,
        "cpu.numa_nodes": "/sys/devices/system/node",
        "cpu.l2_total_bytes": "/sys/devices/system/cpu",
        "cpu.l3_total_bytes": "/sys/devices/system/cpu",
        "cpu.memory_bytes": "cgroup limit" if limited else memory_origin,
        "cpu.free_memory_bytes": f"{memory_origin}, bounded by cgroups",
        "cpu.peak": "none: the probe measures this machine",
    }
    return cpu, origin


def _bounded(value: int, limit: int | None) -> int:
    return value if limit is None else min(value, limit)


def _usable_cores(cores: dict[int, tuple[str, str]], affinity: Collection[int] | None, limits: CgroupLimits) -> tuple[int, str]:
    allowed = set(affinity) if affinity is not None else _affinity()
    if allowed is None:
        usable = _psutil_cores() or 1
        origin = "psutil"
    else:
        # Hardware threads of one core share its matrix units, so they count once.
        usable = len({cores.get(cpu, (str(cpu), "")) for cpu in allowed}) or 1
        origin = "affinity of this process"
    if limits.cores is not None and limits.cores < usable:
        return max(1, int(limits.cores)), f"cgroup quota of {limits.cores:g} cores"
    return usable, origin


def _affinity() -> set[int] | None:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


def _psutil_cores() -> int | None:
    psutil: Any = importlib.import_module("psutil")
    cores: int | None = psutil.cpu_count(logical=False) or psutil.cpu_count()
    return cores


def _cpuinfo(root: Path) -> dict[str, str]:
    """Return the fields of the first processor in /proc/cpuinfo."""
    block = read_text(root / "proc/cpuinfo").split("\n\n")[0]
    pairs = (line.partition(":") for line in block.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _isa(architecture: str, flags: set[str]) -> tuple[Isa, ...]:
    return tuple(name for flag, name in ISA_FLAGS[architecture].items() if flag in flags)


def _core_of_cpu(root: Path) -> dict[int, tuple[str, str]]:
    """Return (package, core) of each online CPU number."""
    cores = {}
    for folder in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/topology"):
        package = read_text(folder / "physical_package_id")
        core = read_text(folder / "core_id")
        if core:
            cores[int(folder.parent.name[3:])] = (package, core)
    return cores


def _numa_nodes(root: Path) -> int | None:
    """Return the number of nodes that have CPUs. Nodes with memory only (CXL, a GPU's memory) cannot run anything."""
    lists = (root / "sys/devices/system/node").glob("node[0-9]*/cpulist")
    return sum(bool(read_text(path)) for path in lists) or None


def _cache_bytes(root: Path, *, level: int) -> int | None:
    """Return the total size of the caches of a level. The files list each cache once for every CPU that shares it."""
    instances = {}
    for folder in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cache/index[0-9]*"):
        size = read_text(folder / "size")
        unit = {"K": KIB, "M": MIB}.get(size[-1:])
        if unit and size[:-1].isdigit() and read_text(folder / "level") == str(level):
            instances[read_text(folder / "shared_cpu_list")] = int(size[:-1]) * unit
    return sum(instances.values()) or None
