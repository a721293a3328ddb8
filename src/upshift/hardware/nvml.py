"""Find GPUs and read their present state with NVML.

``find_gpus`` returns what the planner needs, with the catalog's figures if the product is in it, or estimates. Without a driver
there is no GPU, which is not an error. A GPU divided into MIG instances counts as its first instance, because a CUDA process can
use only one of them. ``read_gpus`` returns heat, power, clocks, links, errors and the processes that hold memory.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import combinations
from typing import Any

from upshift.hardware.catalog.nvidia import NVIDIA_GPUS, key_by_nvml
from upshift.hardware.spec import Gpu, Rates
from upshift.units import GIGA
from upshift.value import Value

# Rate of one link in one direction, by NVML's nvmlNvlinkVersion_t (1: 1.0, 2: 2.0, 3: 2.2, 4: 3.0, 5: 3.1, 6: 4.0, 7: 5.0).
# Source: NVIDIA NVLink and NVSwitch product page.
NVLINK_BYTES_PER_SECOND = {1: 20 * GIGA, **dict.fromkeys((2, 3, 4, 5, 6), 25 * GIGA), 7: 50 * GIGA}


def find_gpus(nvml: Any, visible_devices: str | None) -> tuple[tuple[Gpu, ...], str]:
    """Return the usable GPUs in PCI order, and the source. `nvml`: the module pynvml, or None if it is not installed."""
    if nvml is None:
        return (), "none: nvidia-ml-py is not installed"
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return (), f"none: NVML says {error}"
    try:
        handles = usable_handles(nvml, visible_devices)
        if not handles and visible_devices is not None and not hides_all_gpus(visible_devices):
            num_gpus = len(usable_handles(nvml, None))
            return (), describe_wrong_choice(visible_devices, num_gpus) if num_gpus else "NVML"
        return tuple(_gpu(nvml, handle) for handle in handles), "NVML"
    except nvml.NVMLError as error:
        return (), f"none: NVML says {error}"
    finally:
        nvml.nvmlShutdown()


def visible_gpus(nvml: Any, visible_devices: str | None) -> dict[str, Gpu]:
    """Return the GPUs that this process may use, by their UUIDs, which are the same in all processes. None if NVML fails."""
    if nvml is None:
        return {}
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return {}
    try:
        handles = usable_handles(nvml, visible_devices)
        return {_uuid(nvml, handle): _gpu(nvml, handle) for handle in handles}
    except nvml.NVMLError:
        return {}
    finally:
        nvml.nvmlShutdown()


def newest_cuda(nvml: Any) -> tuple[int, int] | None:
    """Return the newest CUDA release that the driver supports. ``nvml`` must be initialised."""
    version = query(nvml, "nvmlSystemGetCudaDriverVersion")
    return None if version is None else (version // 1000, version % 1000 // 10)


def usable_handles(nvml: Any, visible_devices: str | None) -> list[Any]:
    """Return NVML's handles of the GPUs that this process may use."""
    gpus, instances = _handles(nvml)
    if visible_devices is None:
        return gpus or instances[:1]
    return _select(nvml, gpus, instances, visible_devices)


def _handles(nvml: Any) -> tuple[list[Any], list[Any]]:
    """Return the handles of undivided GPUs, and those of the MIG instances of the other GPUs."""
    gpus = []
    instances = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        mode = query(nvml, "nvmlDeviceGetMigMode", handle)
        if mode is None or mode[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            gpus.append(handle)
            continue
        for position in range(query(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
            instance = query(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, position)
            if instance is not None:
                instances.append(instance)
    return gpus, instances


def _select(nvml: Any, gpus: Sequence[Any], instances: Sequence[Any], visible_devices: str) -> list[Any]:
    """Return the handles that CUDA_VISIBLE_DEVICES selects, as torch reads it (torch.cuda._parse_visible_devices).

    Entries are numbers, or the beginnings of UUIDs if the first one is. CUDA ignores what follows a number. A wrong entry ends
    the list, and a repeated one empties it. A process can use one MIG instance and no other device besides.
    """
    selected = list[Any]()
    is_by_uuid = visible_devices.startswith(("GPU-", "MIG-"))
    for entry in visible_devices.split(","):
        handle = _by_uuid(nvml, [*gpus, *instances], entry.strip()) if is_by_uuid else _by_number(gpus or instances[:1], entry)
        if handle is None:
            break
        if handle in selected:
            return []
        if handle in instances:
            return selected or [handle]
        selected.append(handle)
    return selected


def _by_uuid(nvml: Any, handles: Sequence[Any], entry: str) -> Any:
    """Return the one handle whose UUID begins with the entry, or None."""
    named = [handle for handle in handles if entry.startswith(("GPU-", "MIG-")) and _uuid(nvml, handle).startswith(entry)]
    return named[0] if len(named) == 1 else None


def _by_number(handles: Sequence[Any], entry: str) -> Any:
    """Return the handle whose number begins the entry, or None."""
    number = re.match(r"\s*\+?([0-9]+)", entry)
    return handles[int(number[1])] if number is not None and int(number[1]) < len(handles) else None


def hides_all_gpus(visible_devices: str) -> bool:
    """Return whether CUDA_VISIBLE_DEVICES hides all GPUs on purpose. Slurm sets NoDevFiles for a job that asked for no GPU."""
    return visible_devices.strip().lower() in ("", "-1", "none", "void", "nodevfiles")


WRONG_CHOICE = "CUDA_VISIBLE_DEVICES="


def describe_wrong_choice(visible_devices: str, num_gpus: int) -> str:
    """Return what is wrong with a value that names no GPU of this machine, and what to set."""
    numbers = f"different numbers from 0 to {num_gpus - 1}, such as 0,1," if num_gpus > 1 else "0,"
    return (
        f"{WRONG_CHOICE}{visible_devices!r} shows no GPU, and this machine has {num_gpus}; set it to {numbers} to the beginnings "
        "of UUIDs (nvidia-smi -L), or to nothing for the CPU"
    )


def _gpu(nvml: Any, handle: Any) -> Gpu:
    name = as_text(nvml.nvmlDeviceGetName(handle))
    memory = query(nvml, "nvmlDeviceGetMemoryInfo", handle)
    key = key_by_nvml(name, None if memory is None else memory.total)
    links, link_rate = _nvlink(nvml, handle)
    capability = _capability(nvml, handle)
    return Gpu(
        name=name,
        table_key=key,
        memory_bytes=None if memory is None else memory.total,
        free_memory_bytes=None if memory is None else memory.free,
        compute_capability=capability,
        pcie_generation=query(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", handle) or None,
        pcie_width=query(nvml, "nvmlDeviceGetMaxPcieLinkWidth", handle) or None,
        nvlink_links=links,
        nvlink_bytes_per_second=None if link_rate is None or not links else links * link_rate,
        tdp_watts=None if key is None else NVIDIA_GPUS[key].gpu.tdp_watts,
        peak=_estimated_peak(nvml, handle, name, capability) if key is None else NVIDIA_GPUS[key].gpu.peak,
    )


# Operations of the tensor cores per cycle and CUDA core, over those in FP32, by the first capability that has them: fp32_medium,
# bf16, fp16, fp8, int8. Source: the rows of catalog/nvidia.py and catalog/rtx.py. GeForce cards accumulate in FP32 at half of it.
TENSOR_SHARES: dict[tuple[int, int], tuple[float | None, float | None, float | None, float | None, float | None]] = {
    (12, 0): (2, 4, 4, 8, 8), (11, 0): (15, 30, 30, 60, 60), (10, 3): (15, 30, 30, 60, 2), (10, 0): (15, 30, 30, 60, 60),
    (9, 0): (7, 15, 15, 30, 30), (8, 9): (2, 4, 4, 8, 8), (8, 6): (2, 4, 4, None, 8), (8, 0): (8, 16, 16, None, 32),
    (7, 5): (None, None, 8, None, 16), (7, 0): (None, None, 8, None, None),
    (0, 0): (None, None, None, None, None),
}  # fmt: skip
TURING_WITH_TENSOR_CORES = re.compile(r"\bRTX\b|\bT4G?\b")  # NVIDIA calls no other Turing card so
CLOCK_MEMORY = 2  # NVML_CLOCK_MEM
BITS_PER_CYCLE = 2  # of a memory pin: NVML's clock is half of the data rate
MEGA = 10**6


def _estimated_peak(nvml: Any, handle: Any, name: str, capability: tuple[int, int] | None) -> Rates | None:
    """Return rates of a GPU that is not in the catalog, from its cores, clocks and capability. None if the driver hides them.

    They are those at the highest clocks, which the GPU seldom keeps. The probe measures what it reaches."""
    cores = query(nvml, "nvmlDeviceGetNumGpuCores", handle)
    clock = query(nvml, "nvmlDeviceGetMaxClockInfo", handle, CLOCK_SM)
    memory_clock = query(nvml, "nvmlDeviceGetMaxClockInfo", handle, CLOCK_MEMORY)
    bus_bits = query(nvml, "nvmlDeviceGetMemoryBusWidth", handle)
    if not cores or not clock or capability is None or query(nvml, "nvmlDeviceIsMigDeviceHandle", handle):
        return None  # the driver reports the whole GPU's cores for a MIG instance
    fp32 = 2.0 * cores * clock * MEGA
    shares = next(shares for first, shares in TENSOR_SHARES.items() if capability >= first)
    halved = 2 if "GeForce" in name and capability >= (7, 5) else 1
    if capability == (7, 5) and not TURING_WITH_TENSOR_CORES.search(name):  # GTX 16 series, T1000: fp16 at twice the rate
        shares = (None, None, 2, None, None)
        halved = 1
    medium, bf16, fp16, fp8, int8 = (None if share is None else fp32 * share / halved for share in shares)
    return Rates(
        fp32=fp32, fp32_medium=medium, bf16=bf16, fp16=fp16, fp8=fp8, int8=None if int8 is None else int8 * halved,
        memory_bytes_per_second=BITS_PER_CYCLE * memory_clock * MEGA * bus_bits / 8 if memory_clock and bus_bits else None,
    )  # fmt: skip


def _capability(nvml: Any, handle: Any) -> tuple[int, int] | None:
    """Return CUDA's compute capability. Some drivers report it for the GPU only and not for its MIG instances."""
    capability = query(nvml, "nvmlDeviceGetCudaComputeCapability", handle)
    if capability is None:
        parent = query(nvml, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
        capability = None if parent is None else query(nvml, "nvmlDeviceGetCudaComputeCapability", parent)
    return None if capability is None else (int(capability[0]), int(capability[1]))


def _nvlink(nvml: Any, handle: Any) -> tuple[int, int | None]:
    """Return the number of active links, and the rate of one link in one direction (None: unknown)."""
    active = [
        link
        for link in range(nvml.NVML_NVLINK_MAX_LINKS)
        if query(nvml, "nvmlDeviceGetNvLinkState", handle, link) == nvml.NVML_FEATURE_ENABLED
    ]
    version = query(nvml, "nvmlDeviceGetNvLinkVersion", handle, active[0]) if active else None
    return len(active), NVLINK_BYTES_PER_SECOND.get(version or 0)


def _uuid(nvml: Any, handle: Any) -> str:
    return as_text(query(nvml, "nvmlDeviceGetUUID", handle) or "")


def query(nvml: Any, question: str, *arguments: Any) -> Any:
    """Call a function of NVML. Return None if this GPU, driver or version of pynvml does not support it."""
    try:
        return getattr(nvml, question)(*arguments) if hasattr(nvml, question) else None
    except nvml.NVMLError:
        return None


def as_text(text: str | bytes) -> str:
    return text.decode() if isinstance(text, bytes) else text  # nvidia-ml-py before 11.5 returns bytes


P2P_NVLINK = 2  # NVML_P2P_CAPS_INDEX_NVLINK
TEMPERATURE_SLOWDOWN = 1  # NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
TEMPERATURE_GPU = 0  # NVML_TEMPERATURE_GPU
CLOCK_SM = 1  # NVML_CLOCK_SM
MILLI = 1e-3


class Holder(Value):
    """Describe a process that holds memory of a GPU."""

    pid: int
    bytes: int | None  # None: the driver hides it, as inside containers


class GpuState(Value):
    """Hold the present state of a GPU. None: the driver does not report it."""

    index: int
    name: str
    table_key: str | None = None
    bus: str | None = None  # 00000000:3B:00.0
    compute_capability: tuple[int, int] | None = None
    temperature: int | None = None  # degrees Celsius
    slowdown_temperature: int | None = None
    throttle_reasons: int | None = None  # bits of nvmlClocksThrottleReasons
    utilization: int | None = None  # percent
    performance_state: int | None = None  # P0 is full speed
    clock_mhz: int | None = None
    max_clock_mhz: int | None = None
    watts: float | None = None
    limit_watts: float | None = None
    default_limit_watts: float | None = None
    min_limit_watts: float | None = None
    pcie_generation: int | None = None
    max_pcie_generation: int | None = None  # the highest that both the card and the slot have
    pcie_width: int | None = None
    max_pcie_width: int | None = None
    nvlink_links: int | None = None  # active
    nvlink_states: int | None = None  # links that NVML knows, active or not
    ecc: bool | None = None
    ecc_uncorrected: int | None = None  # since the driver was loaded
    retired_pages: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    memory_bytes: int | None = None
    used_bytes: int | None = None
    holders: tuple[Holder, ...] = ()
    persistence: bool | None = None
    compute_mode: int | None = None


class GpuPair(Value):
    """Describe how two GPUs are connected. ``level``: NVML's nvmlGpuTopologyLevel_t (10: one switch ... 50: across sockets)."""

    one: int
    other: int
    level: int | None
    nvlink: bool | None


class Gpus(Value):
    """Hold the GPUs of this machine. ``origin``: the source, or why there are none."""

    states: tuple[GpuState, ...] = ()
    pairs: tuple[GpuPair, ...] = ()
    origin: str
    driver: str | None = None
    driver_cuda: tuple[int, int] | None = None  # the newest CUDA release that the driver supports


def read_gpus(nvml: Any, visible_devices: str | None) -> Gpus:
    """Return the state of all GPUs. ``nvml``: the module pynvml, or None if it is not installed."""
    if nvml is None:
        return Gpus(origin="none: nvidia-ml-py is not installed")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Gpus(origin=f"none: NVML says {error}")
    try:
        handles = usable_handles(nvml, visible_devices)
        states = tuple(_state(nvml, handle, index) for index, handle in enumerate(handles))
        pairs = tuple(_pair(nvml, handles, first, second) for first, second in combinations(range(len(handles)), 2))
        driver = as_text(query(nvml, "nvmlSystemGetDriverVersion") or "") or None
        return Gpus(states=states, pairs=pairs, origin="NVML", driver=driver, driver_cuda=newest_cuda(nvml))
    except nvml.NVMLError as error:
        return Gpus(origin=f"none: NVML says {error}")
    finally:
        nvml.nvmlShutdown()


def _state(nvml: Any, handle: Any, index: int) -> GpuState:
    def get(question: str, *arguments: Any) -> Any:
        return query(nvml, f"nvmlDeviceGet{question}", handle, *arguments)

    name = as_text(nvml.nvmlDeviceGetName(handle))
    memory = get("MemoryInfo")
    utilization = get("UtilizationRates")
    limits = get("PowerManagementLimitConstraints")
    ecc = get("EccMode")
    links = [get("NvLinkState", link) for link in range(nvml.NVML_NVLINK_MAX_LINKS)]
    rows = get("RemappedRows")
    bus = getattr(get("PciInfo"), "busId", None)
    reasons = get("CurrentClocksEventReasons")
    key = key_by_nvml(name, None if memory is None else memory.total)
    return GpuState(
        index=index, name=name, table_key=key, bus=None if bus is None else as_text(bus),
        compute_capability=get("CudaComputeCapability"),
        temperature=get("Temperature", TEMPERATURE_GPU), slowdown_temperature=get("TemperatureThreshold", TEMPERATURE_SLOWDOWN),
        throttle_reasons=get("CurrentClocksThrottleReasons") if reasons is None else reasons,  # drivers before 535
        utilization=None if utilization is None else utilization.gpu, performance_state=get("PerformanceState"),
        clock_mhz=get("ClockInfo", CLOCK_SM), max_clock_mhz=get("MaxClockInfo", CLOCK_SM),
        watts=_watts(get("PowerUsage")), limit_watts=_watts(get("EnforcedPowerLimit")),
        default_limit_watts=_watts(get("PowerManagementDefaultLimit")),
        min_limit_watts=None if limits is None else _watts(limits[0]),
        pcie_generation=get("CurrPcieLinkGeneration"), max_pcie_generation=get("MaxPcieLinkGeneration"),
        pcie_width=get("CurrPcieLinkWidth"), max_pcie_width=get("MaxPcieLinkWidth"),
        nvlink_links=sum(state == nvml.NVML_FEATURE_ENABLED for state in links),
        nvlink_states=sum(state is not None for state in links),
        ecc=None if ecc is None else bool(ecc[0]), ecc_uncorrected=get("TotalEccErrors", 1, 0),
        retired_pages=_retired(get),
        remap_pending=None if rows is None else bool(rows[2]), remap_failed=None if rows is None else bool(rows[3]),
        memory_bytes=None if memory is None else memory.total, used_bytes=None if memory is None else memory.used,
        holders=_holders(get),
        persistence=_flag(get("PersistenceMode")), compute_mode=get("ComputeMode"),
    )  # fmt: skip


def _holders(get: Any) -> tuple[Holder, ...]:
    processes = get("ComputeRunningProcesses") or ()
    return tuple(Holder(pid=process.pid, bytes=process.usedGpuMemory) for process in processes)


def _retired(get: Any) -> int | None:
    """Return the number of retired pages, for both causes: repeated single-bit errors, and double-bit errors."""
    pages_by_cause = [get("RetiredPages", cause) for cause in (0, 1)]
    return None if None in pages_by_cause else sum(len(pages) for pages in pages_by_cause)


def _pair(nvml: Any, handles: list[Any], first: int, second: int) -> GpuPair:
    status = query(nvml, "nvmlDeviceGetP2PStatus", handles[first], handles[second], P2P_NVLINK)
    level = query(nvml, "nvmlDeviceGetTopologyCommonAncestor", handles[first], handles[second])
    return GpuPair(one=first, other=second, level=level, nvlink=None if status is None else status == 0)


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts * MILLI


def _flag(value: int | None) -> bool | None:
    return None if value is None else bool(value)
