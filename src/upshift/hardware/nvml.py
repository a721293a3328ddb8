"""Find GPUs by NVML: what the driver reports, and the table's figures where the full product name is known.

Without a driver there is no GPU, which is not an error. A GPU cut into MIG instances counts as its first instance, whose peak is
unknown, because a CUDA process can use one instance only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from upshift.hardware.nvidia import NVIDIA_GPUS, NVML_NAMES
from upshift.hardware.spec import Gpu
from upshift.units import GIGA

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
    whole, instances = [], []
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
    numbered, selected = whole or instances[:1], list[Any]()
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
