"""NVIDIA's management library for GPUs that are not there. The names are those of nvidia-ml-py.

PRETENDED_GPUS: the GPUs, such as h100, 2x4090 or t4,4090; a100:mig3 has three instances of MIG. PRETENDED_CUDA=13000 is the
version of CUDA that the driver serves; PRETENDED_USED_MIB the memory that other users hold on each GPU.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

NVML_DEVICE_MIG_ENABLE = NVML_FEATURE_ENABLED = 1
NVML_NVLINK_MAX_LINKS = 18
MIB = 2**20
INSTANCE_MIB = 9728


class NVMLError(Exception): ...


class Model(NamedTuple):
    name: str
    capability: tuple[int, int]
    mib: int
    pcie_generation: int
    pcie_width: int
    nvlinks: int
    nvlink_version: int


MODELS = {
    "t4": Model("Tesla T4", (7, 5), 15360, 3, 16, 0, 0),
    "v100": Model("Tesla V100-SXM2-16GB", (7, 0), 16160, 3, 16, 6, 2),
    "t1000": Model("NVIDIA T1000 8GB", (7, 5), 8192, 3, 16, 0, 0),
    "3090": Model("NVIDIA GeForce RTX 3090", (8, 6), 24576, 4, 16, 0, 0),
    "4090": Model("NVIDIA GeForce RTX 4090", (8, 9), 24564, 4, 16, 0, 0),
    "5090": Model("NVIDIA GeForce RTX 5090", (12, 0), 32607, 5, 16, 0, 0),
    "a100": Model("NVIDIA A100-SXM4-80GB", (8, 0), 81920, 4, 16, 12, 5),
    "h100": Model("NVIDIA H100 80GB HBM3", (9, 0), 81559, 5, 16, 18, 6),
    "h200": Model("NVIDIA H200", (9, 0), 143771, 5, 16, 18, 6),
    "b200": Model("NVIDIA B200", (10, 0), 183359, 5, 16, 18, 7),
}


@dataclass(frozen=True)
class Gpu:
    """A GPU, or an instance of MIG of one. ``instances``: how many the whole GPU is divided into."""

    model: Model
    number: int
    instances: int = 0
    instance: int = 0  # from 1; 0: a whole GPU

    @property
    def name(self) -> str:
        return self.model.name + (" MIG 1g.10gb" if self.instance else "")

    @property
    def capability(self) -> tuple[int, int]:
        return self.model.capability

    @property
    def mib(self) -> int:
        return INSTANCE_MIB if self.instance else self.model.mib

    @property
    def uuid(self) -> str:
        return f"{'MIG' if self.instance else 'GPU'}-{self.number:08d}-{self.instance:04d}-0000-0000-000000000000"


def all_gpus() -> list[Gpu]:
    """Return the machine's GPUs in the order of the PCI bus."""
    gpus: list[Gpu] = []
    for text in os.environ["PRETENDED_GPUS"].split(","):
        match = re.fullmatch(r"(?:(\d+)x)?(\w+?)(?::mig(\d+))?", text)
        if match is None or match[2] not in MODELS:
            raise ValueError(f"PRETENDED_GPUS={text} is none of {', '.join(MODELS)}")
        gpus += [Gpu(MODELS[match[2]], len(gpus) + number, int(match[3] or 0)) for number in range(int(match[1] or 1))]
    return gpus


def instances(gpu: Gpu) -> list[Gpu]:
    return [replace(gpu, instance=number + 1) for number in range(gpu.instances)]


def nvmlInit() -> None: ...
def nvmlShutdown() -> None: ...


def nvmlDeviceGetCount() -> int:
    return len(all_gpus())


def nvmlDeviceGetHandleByIndex(index: int) -> Gpu:
    return all_gpus()[index]


def nvmlDeviceGetMigMode(gpu: Gpu) -> tuple[int, int]:
    if gpu.capability < (8, 0) or gpu.capability[1]:
        raise NVMLError("Not Supported")
    return (1, 1) if gpu.instances else (0, 0)


def nvmlDeviceGetMaxMigDeviceCount(gpu: Gpu) -> int:
    return 7


def nvmlDeviceGetMigDeviceHandleByIndex(gpu: Gpu, index: int) -> Gpu:
    if index >= gpu.instances:
        raise NVMLError("Not Found")
    return instances(gpu)[index]


def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(gpu: Gpu) -> Gpu:
    return replace(gpu, instance=0)


def nvmlDeviceGetName(gpu: Gpu) -> str:
    return gpu.name


def nvmlDeviceGetUUID(gpu: Gpu) -> str:
    return gpu.uuid


def nvmlDeviceGetMemoryInfo(gpu: Gpu) -> Any:
    class Memory:
        total = gpu.mib * MIB
        used = int(os.environ.get("PRETENDED_USED_MIB", "500")) * MIB
        free = total - used

    return Memory()


def nvmlDeviceGetCudaComputeCapability(gpu: Gpu) -> tuple[int, int]:
    return gpu.capability


def nvmlDeviceGetMaxPcieLinkGeneration(gpu: Gpu) -> int:
    return gpu.model.pcie_generation


def nvmlDeviceGetMaxPcieLinkWidth(gpu: Gpu) -> int:
    return gpu.model.pcie_width


nvmlDeviceGetCurrPcieLinkGeneration = nvmlDeviceGetMaxPcieLinkGeneration
nvmlDeviceGetCurrPcieLinkWidth = nvmlDeviceGetMaxPcieLinkWidth


def nvmlDeviceGetNvLinkState(gpu: Gpu, link: int) -> int:
    if not gpu.model.nvlinks:
        raise NVMLError("Not Supported")
    return int(link < gpu.model.nvlinks)


def nvmlDeviceGetNvLinkVersion(gpu: Gpu, link: int) -> int:
    return gpu.model.nvlink_version


def nvmlSystemGetCudaDriverVersion() -> int:
    return int(os.environ.get("PRETENDED_CUDA", "13000"))


def nvmlSystemGetDriverVersion() -> str:
    return "580.65.06"
