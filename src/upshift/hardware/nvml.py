"""Find GPUs by NVML: what the driver reports, and the table's figures where the full product name is known.

Without a driver there is no GPU, which is not an error. A GPU cut into MIG instances counts as its first instance, whose peak is
unknown, because a CUDA process can use one instance only.

Read the present state of GPUs from NVML: heat, power, clocks, links, errors, who holds memory. None: the driver does not say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from upshift.hardware.catalog.nvidia import NVIDIA_GPUS, NVML_NAMES
from upshift.hardware.spec import Gpu
from upshift.units import GIGA
from upshift.value import Value

# One link, one direction, by NVML's nvmlNvlinkVersion_t (1: 1.0, 2: 2.0, 3: 2.2, 4: 3.0, 5: 3.1, 6: 4.0, 7: 5.0);
# NVIDIA NVLink and NVSwitch product page.
NVLINK_BYTES_PER_SECOND = {1: 20 * GIGA, **dict.fromkeys((2, 3, 4, 5, 6), 25 * GIGA), 7: 50 * GIGA}


def find_gpus(nvml: Any, visible_devices: str | None) -> tuple[tuple[Gpu, ...], str]:
    """Return the usable GPUs in PCI order, and how they are known. `nvml` is the pynvml module, None if not installed."""
    if nvml is None:
        return (), "none: nvidia-ml-py is not installed"
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return (), f"none: NVML says {error}"
    try:
        return tuple(_gpu(nvml, handle) for handle in usable_handles(nvml, visible_devices)), "NVML"
    except nvml.NVMLError as error:
        return (), f"none: NVML says {error}"
    finally:
        nvml.nvmlShutdown()


def newest_cuda(nvml: Any) -> tuple[int, int] | None:
    """Return the newest CUDA that the driver serves. ``nvml``: initialised."""
    version = ask(nvml, "nvmlSystemGetCudaDriverVersion")
    return None if version is None else (version // 1000, version % 1000 // 10)


def usable_handles(nvml: Any, visible_devices: str | None) -> list[Any]:
    whole, instances = _handles(nvml)
    if visible_devices is None:
        return whole or instances[:1]
    return _select(nvml, whole, instances, visible_devices)


def _handles(nvml: Any) -> tuple[list[Any], list[Any]]:
    """Return the GPUs that are not cut, and the MIG instances of the others."""
    whole = []
    instances = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        mode = ask(nvml, "nvmlDeviceGetMigMode", handle)
        if mode is None or mode[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            whole.append(handle)
            continue
        for position in range(ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
            instance = ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, position)
            if instance is not None:
                instances.append(instance)
    return whole, instances


def _select(nvml: Any, whole: Sequence[Any], instances: Sequence[Any], visible_devices: str) -> list[Any]:
    """Return the handles that CUDA_VISIBLE_DEVICES selects, as in the CUDA C Programming Guide and the MIG User Guide.

    Entries are indices or beginnings of UUIDs. A bad entry ends the list. A process can use one MIG instance, and nothing beside
    it.
    """
    numbered = whole or instances[:1]
    selected = list[Any]()
    for entry in (part.strip() for part in visible_devices.split(",")):
        if entry.isdigit() and int(entry) < len(numbered):
            selected.append(numbered[int(entry)])
            continue
        named = [h for h in (*whole, *instances) if entry and not entry.isdigit() and _uuid(nvml, h).startswith(entry)]
        if len(named) != 1:
            break
        if named[0] in instances:
            return selected or named
        selected += named
    return selected


def _gpu(nvml: Any, handle: Any) -> Gpu:
    name = plain(nvml.nvmlDeviceGetName(handle))
    memory = ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
    key = NVML_NAMES.get(name)
    links, link_rate = _nvlink(nvml, handle)
    return Gpu(
        name=name,
        table_key=key,
        memory_bytes=None if memory is None else memory.total,
        free_memory_bytes=None if memory is None else memory.free,
        compute_capability=_capability(nvml, handle),
        pcie_generation=ask(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", handle) or None,
        pcie_width=ask(nvml, "nvmlDeviceGetMaxPcieLinkWidth", handle) or None,
        nvlink_links=links,
        nvlink_bytes_per_second=None if link_rate is None or not links else links * link_rate,
        tdp_watts=None if key is None else NVIDIA_GPUS[key].gpu.tdp_watts,
        peak=None if key is None else NVIDIA_GPUS[key].gpu.peak,
    )


def _capability(nvml: Any, handle: Any) -> tuple[int, int] | None:
    """Return CUDA's compute capability. Some drivers tell it of a whole GPU alone, and not of its MIG instances."""
    found = ask(nvml, "nvmlDeviceGetCudaComputeCapability", handle)
    if found is None:
        parent = ask(nvml, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
        found = None if parent is None else ask(nvml, "nvmlDeviceGetCudaComputeCapability", parent)
    return None if found is None else (int(found[0]), int(found[1]))


def _nvlink(nvml: Any, handle: Any) -> tuple[int, int | None]:
    """Return the number of active links, and the rate of one in one direction."""
    active = [
        link
        for link in range(nvml.NVML_NVLINK_MAX_LINKS)
        if ask(nvml, "nvmlDeviceGetNvLinkState", handle, link) == nvml.NVML_FEATURE_ENABLED
    ]
    version = ask(nvml, "nvmlDeviceGetNvLinkVersion", handle, active[0]) if active else None
    return len(active), NVLINK_BYTES_PER_SECOND.get(version or 0)


def _uuid(nvml: Any, handle: Any) -> str:
    return plain(ask(nvml, "nvmlDeviceGetUUID", handle) or "")


def ask(nvml: Any, question: str, *arguments: Any) -> Any:
    """Return the answer, None where this GPU, driver or version of pynvml does not know it."""
    try:
        return getattr(nvml, question)(*arguments) if hasattr(nvml, question) else None
    except nvml.NVMLError:
        return None


def plain(text: str | bytes) -> str:
    return text.decode() if isinstance(text, bytes) else text  # nvidia-ml-py before 11.5 returns bytes


P2P_NVLINK = 2  # NVML_P2P_CAPS_INDEX_NVLINK
# NVML_TEMPERATURE_THRESHOLD_SLOWDOWN, NVML_TEMPERATURE_GPU
TEMPERATURE_SLOWDOWN = 1
TEMPERATURE_GPU = 0
CLOCK_SM = 1
MILLI = 1e-3


class Holder(Value):
    """A process that holds memory of a GPU."""

    pid: int
    bytes: int | None  # None: the driver hides it, as inside containers


class GpuState(Value):
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
    max_pcie_generation: int | None = None  # of card and slot together
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
    """The connection of two GPUs. ``level``: NVML's nvmlGpuTopologyLevel_t (10 a switch ... 50 across CPU sockets)."""

    one: int
    other: int
    level: int | None
    nvlink: bool | None


class Gpus(Value):
    """The GPUs of this machine. ``origin``: how they are known, or why there are none."""

    states: tuple[GpuState, ...] = ()
    pairs: tuple[GpuPair, ...] = ()
    origin: str
    driver: str | None = None
    driver_cuda: tuple[int, int] | None = None  # the newest CUDA it serves


def read_gpus(nvml: Any, visible_devices: str | None) -> Gpus:
    """Return the state of all GPUs. ``nvml`` is the pynvml module, None if not installed."""
    if nvml is None:
        return Gpus(origin="none: nvidia-ml-py is not installed")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Gpus(origin=f"none: NVML says {error}")
    try:
        handles = usable_handles(nvml, visible_devices)
        states = tuple(_state(nvml, handle, index) for index, handle in enumerate(handles))
        numbers = range(len(handles))
        pairs = [_pair(nvml, handles, one, other) for one in numbers for other in numbers if one < other]
        return Gpus(
            states=states, pairs=tuple(pairs), origin="NVML", driver=plain(ask(nvml, "nvmlSystemGetDriverVersion") or "") or None,
            driver_cuda=newest_cuda(nvml),
        )  # fmt: skip
    except nvml.NVMLError as error:
        return Gpus(origin=f"none: NVML says {error}")
    finally:
        nvml.nvmlShutdown()


def _state(nvml: Any, handle: Any, index: int) -> GpuState:
    def get(question: str, *arguments: Any) -> Any:
        return ask(nvml, f"nvmlDeviceGet{question}", handle, *arguments)

    name = plain(nvml.nvmlDeviceGetName(handle))
    memory, utilization, limits, ecc = (
        get(q) for q in ("MemoryInfo", "UtilizationRates", "PowerManagementLimitConstraints", "EccMode")
    )
    links = [get("NvLinkState", link) for link in range(nvml.NVML_NVLINK_MAX_LINKS)]
    rows = get("RemappedRows")
    bus = getattr(get("PciInfo"), "busId", None)
    reasons = get("CurrentClocksEventReasons")
    return GpuState(
        index=index, name=name, table_key=NVML_NAMES.get(name), bus=None if bus is None else plain(bus),
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
        holders=tuple(Holder(pid=p.pid, bytes=p.usedGpuMemory) for p in get("ComputeRunningProcesses") or ()),
        persistence=_flag(get("PersistenceMode")), compute_mode=get("ComputeMode"),
    )  # fmt: skip


def _retired(get: Any) -> int | None:
    """Return the number of retired pages by both causes: repeated single-bit errors, and double-bit ones."""
    lists = [get("RetiredPages", cause) for cause in (0, 1)]
    return None if None in lists else sum(len(pages) for pages in lists)


def _pair(nvml: Any, handles: list[Any], one: int, other: int) -> GpuPair:
    status = ask(nvml, "nvmlDeviceGetP2PStatus", handles[one], handles[other], P2P_NVLINK)
    level = ask(nvml, "nvmlDeviceGetTopologyCommonAncestor", handles[one], handles[other])
    return GpuPair(one=one, other=other, level=level, nvlink=None if status is None else status == 0)


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts * MILLI


def _flag(value: int | None) -> bool | None:
    return None if value is None else bool(value)
