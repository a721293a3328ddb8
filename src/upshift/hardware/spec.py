"""Define Host, the planner's description of a machine, and its parts, as frozen values with JSON in and out.

None means unknown. Sizes are bytes, rates are per second, and matrix rates are FLOP/s (OP/s for int8) without sparsity.
`Host.origin` gives the source of each field, by its dotted name. If the GPUs of a node differ, all of them are in `mixed_gpus`.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from upshift.value import Value

Precision = Literal["fp32", "fp32_medium", "bf16", "fp16", "fp8", "int8"]
Isa = Literal[
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "avx512_vnni",
    "avx_vnni",
    "amx_bf16",
    "amx_fp16",
    "amx_int8",
    "neon",
    "neon_fp16",
    "neon_dotprod",
    "neon_bf16",
    "neon_i8mm",
    "sve",
    "sve2",
]
Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
Exchange = Literal[Collective, "send"]
Backend = Literal["cuda", "rocm", "hpu", "xla", "mps"]  # PyTorch's backend for an accelerator
Device = Literal["cpu", "cuda", "hpu", "xla", "mps"]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Bytes = CountOrZero
Rate = Annotated[float, Field(gt=0)]
Seconds = Annotated[float, Field(ge=0)]

# The first compute capability with matrix instructions for a precision: CUDA C Programming Guide, "Compute Capabilities".
MIN_COMPUTE_CAPABILITY: dict[Precision, tuple[int, int]] = {
    "fp32": (0, 0),
    "fp32_medium": (8, 0),
    "bf16": (8, 0),
    "fp16": (7, 0),
    "fp8": (8, 9),
    "int8": (7, 2),
}
CPU_INSTRUCTIONS: dict[Precision, tuple[Isa, ...]] = {
    "bf16": ("avx512_bf16", "amx_bf16", "neon_bf16"),
    "fp16": ("avx512_fp16", "amx_fp16", "neon_fp16"),
    "int8": ("avx512_vnni", "avx_vnni", "amx_int8", "neon_dotprod", "neon_i8mm"),
}
TRITON_CAPABILITY = (7, 0)  # the first that Triton compiles for (its README, "Compatibility")
# "HIP (ROCm) semantics" in PyTorch's documentation: ROCm GPUs keep the name cuda.
TORCH_DEVICE: dict[Backend, Device] = {"cuda": "cuda", "rocm": "cuda", "hpu": "hpu", "xla": "xla", "mps": "mps"}
FINGERPRINT_MEMORY_STEP = 2**28  # bytes; kernels and drivers report totals that differ by a few MiB
LESS_POWER = ("Laptop", "Max-Q", "Mobile")  # in the names of cards for laptops
# FP16 on tensor cores over FP32, by compute capability, of the architectures of which some cards accumulate at half of the rate
# (the whitepapers that catalog/nvidia_rtx.py names). HALF: the range of a share that counts as a half; A10G's datasheet has 0.56.
TENSOR_SHARES = {(7, 5): 8.0, (8, 6): 4.0, (8, 9): 4.0, (12, 0): 4.0, (12, 1): 4.0}
HALF = (0.4, 0.6)
NOT_PROBED: tuple[Precision, ...] = ("fp8", "int8")


class Rates(Value):
    """Hold dense matrix rates by precision, in FLOP/s, and the memory bandwidth: datasheet peaks, or measured rates.

    fp32_medium is fp32 with `torch.set_float32_matmul_precision("medium")`: TF32 on GPUs of compute capability 8.0 or later.
    """

    fp32: Rate | None = None
    fp32_medium: Rate | None = None
    bf16: Rate | None = None
    fp16: Rate | None = None
    fp8: Rate | None = None
    int8: Rate | None = None
    memory_bytes_per_second: Rate | None = None

    def matrix(self, precision: Precision) -> float | None:
        """Return the FLOP/s in this precision, None if unknown."""
        rate: float | None = getattr(self, precision)
        return rate

    def filled(self, peak: Rates | None) -> Rates:
        """Return measured rates with estimates for fp8 and int8, which no probe measures.

        An estimate is the datasheet's peak times the share of its peak that bf16 reaches, or fp16 if bf16 is unknown."""
        if peak is None:
            return self
        if self.bf16 and peak.bf16:
            share = self.bf16 / peak.bf16
        elif self.fp16 and peak.fp16:
            share = self.fp16 / peak.fp16
        else:
            return self
        missing = {name: peak.matrix(name) for name in NOT_PROBED if self.matrix(name) is None}
        return self.changed(**{name: share * rate for name, rate in missing.items() if rate is not None})


class Cpu(Value):
    """Describe the processors of a node. Cache sizes are totals over the node.

    `peak`: rates from the datasheet of a described CPU; None for a detected CPU, which the probe measures.
    """

    model_name: str | None
    architecture: str | None  # x86_64, aarch64
    physical_cores: Count | None
    usable_cores: Count  # distinct physical cores in this process's affinity, bounded by the cgroup quota
    numa_nodes: Count | None
    l2_total_bytes: Bytes | None
    l3_total_bytes: Bytes | None
    isa: tuple[Isa, ...] | None
    memory_bytes: Bytes | None  # the smaller of RAM and cgroup limit
    free_memory_bytes: Bytes | None  # free now; bounded by the cgroup limit, too
    peak: Rates | None = None  # the peak of all cores together

    def supports(self, precision: Precision) -> bool | None:
        """Return whether the cores have matrix instructions for this precision. If not, torch emulates it slowly."""
        if precision == "fp32":
            return True
        if precision == "fp8":
            return False
        if precision == "fp32_medium":
            return True if self.architecture == "x86_64" else None
        return None if self.isa is None else any(name in self.isa for name in CPU_INSTRUCTIONS[precision])


class Gpu(Value):
    """Describe a GPU or another accelerator. `peak`: datasheet figures; None for a product that is not in the catalog."""

    name: str
    backend: Backend = "cuda"
    table_key: str | None = None
    memory_bytes: Bytes | None
    free_memory_bytes: Bytes | None = None
    shares_host_memory: bool = False  # its memory is the CPU's, so that moving something to the host frees nothing
    compute_capability: tuple[int, int] | None = None  # CUDA's
    pcie_generation: Count | None = None
    pcie_width: Count | None = None  # lanes
    nvlink_links: CountOrZero | None = None  # active links; 0: the GPU is known to have none
    nvlink_bytes_per_second: Rate | None = None  # per direction, all links of this GPU together
    tdp_watts: Rate | None = None  # thermal design power, or the vendor's figure for the board's sustained limit
    peak: Rates | None = None

    @property
    def is_geforce(self) -> bool:
        """Return whether it is a GeForce card. These do not read each other's memory over PCIe (NVIDIA/nccl#1309)."""
        return "GeForce" in self.name

    @property
    def is_desktop_geforce(self) -> bool:
        """Return whether it is a GeForce card at a desktop's power."""
        return self.is_geforce and not any(word in self.name for word in LESS_POWER)

    @property
    def halves_tensor_cores(self) -> bool:
        """Return whether the tensor cores accumulate in FP32 at half of their rate, as on GeForce cards, A10G, L20 and L40.

        The datasheet's rates tell: FP16 over FP32 is half of what the tensor cores of the architecture reach. Without both rates
        the name tells.
        """
        whole = TENSOR_SHARES.get(self.compute_capability or (0, 0))
        if whole is None:
            return False
        if self.peak is None or self.peak.fp16 is None or self.peak.fp32 is None:
            return self.is_geforce
        return HALF[0] < self.peak.fp16 / self.peak.fp32 / whole < HALF[1]

    def supports(self, precision: Precision) -> bool | None:
        """Return whether the GPU has matrix instructions for this precision.

        On CUDA the compute capability decides; elsewhere, whether the catalog has a rate for it. All support fp32.
        """
        if precision == "fp32":
            return True
        if self.backend != "cuda":
            return None if self.peak is None else self.peak.matrix(precision) is not None
        if self.compute_capability is None:
            return None
        return self.compute_capability >= MIN_COMPUTE_CAPABILITY[precision]

    def identity(self) -> dict[str, Any]:
        """Return the fields that identify the product: no free memory and no catalog figures. The name implies the backend."""
        fields = self.model_dump(exclude={"backend", "table_key", "free_memory_bytes", "shares_host_memory", "tdp_watts", "peak"})
        return fields | {"memory_bytes": _coarse(self.memory_bytes)}


class Link(Value):
    """Describe a connection as one device sees it: bytes per second in one direction.

    Between nodes it is all ports of a node together.
    """

    name: str
    bytes_per_second: Rate
    num_ports: Annotated[float, Field(gt=0)] | None = None  # of a node; None: unknown, and planned as one for each device
    latency_seconds: Seconds | None = None
    measured: bool = False  # False: the specified rate, an upper bound (PCIe peers often reach far less)


class Measured(Value):
    """Hold the probe's measurements on this machine, with torch. They are medians; None means not measured."""

    torch_version: str
    transformers_version: str | None
    num_threads: Count
    cpu: Rates
    gpu: Rates | None = None
    dispatch_seconds: Seconds  # one eager torch operation on one element, CPU
    gpu_dispatch_seconds: Seconds | None = None  # the host's time to queue one kernel
    host_to_device_bytes_per_second: Rate | None = None  # from pinned memory
    first_touch_seconds_per_byte: Seconds | None  # page faults of a fresh large tensor, beyond the write itself
    exchanges: dict[Exchange, Link] = {}  # gloo between two processes: latency, and bytes of the full tensor per second
    gpu_exchanges: dict[Exchange, Link] = {}  # NCCL between gpu_exchange_ranks GPUs of one host, as above
    gpu_exchange_ranks: Count | None = None
    base_resident_bytes: Bytes | None  # RSS of a process that imported torch and transformers and multiplied once
    gpu_compiler: bool | None = None  # whether Triton, which compiles for GPUs, has all that it needs
    compiler: bool | None  # whether the C++ compiler and the headers that torch.compile needs on the CPU work
    probe_seconds: Seconds
    failed: tuple[str, ...] = ()  # measurements that failed and may succeed later: a cache keeps such a result for minutes only
    core_share: float | None = None  # share of the cores' time that the probe got; other programs had the rest


class Host(Value):
    """Describe a machine, or several equal machines, that exist here or are to be rented."""

    name: str
    num_nodes: Count = 1
    cpu: Cpu | None = None
    gpus_per_node: CountOrZero = 0
    gpu: Gpu | None = None  # all GPUs are equal to it; its free memory is the smallest of theirs
    mixed_gpus: tuple[Gpu, ...] = ()  # all GPUs of a node, only if they differ
    intra_node: Link | None = None  # between the GPUs of a node
    inter_node: Link | None = None  # per node, between nodes
    host_to_device: Link | None = None
    disk_bytes_per_second: Rate | None = None  # the disk from which a model's weights are read, if it was measured
    measured: Measured | None = None
    origin: dict[str, str] = {}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.cpu is None and self.gpus_per_node == 0:
            raise ValueError("a host needs a cpu or gpus")
        if self.mixed_gpus and (self.gpu is not None or len(self.mixed_gpus) != self.gpus_per_node):
            raise ValueError("mixed_gpus holds all gpus_per_node GPUs of a node, and gpu is then null")
        if not self.mixed_gpus and (self.gpu is None) != (self.gpus_per_node == 0):
            raise ValueError("gpu is given if and only if gpus_per_node is above 0")
        return self

    @property
    def device(self) -> Device:
        """Return torch's name for the devices that compute. A ROCm build of PyTorch calls its devices cuda."""
        gpu = self.gpu or next(iter(self.mixed_gpus), None)
        return "cpu" if gpu is None else TORCH_DEVICE[gpu.backend]

    @property
    def num_devices(self) -> int:
        """Return the number of GPUs of all nodes. Without GPUs each node counts as one device."""
        return self.num_nodes * max(1, self.gpus_per_node)

    def ranks_per_node(self, num_processes: int) -> int:
        """Return the number of ranks on each node, for a job of ``num_processes`` processes.

        There is one rank for each GPU. Without GPUs the processes are divided evenly among the nodes.
        """
        return self.gpus_per_node or max(num_processes // self.num_nodes, 1)

    def one_device(self) -> Host:
        """Return the same machine with a single GPU, the first one, for jobs that use no more."""
        if self.num_devices == 1 and not self.mixed_gpus:
            return self
        gpu = self.gpu or next(iter(self.mixed_gpus), None)
        return self.changed(
            num_nodes=1, gpus_per_node=min(self.gpus_per_node, 1), gpu=gpu, mixed_gpus=(), intra_node=None, inter_node=None
        )

    def cpu_alone(self) -> Host:
        """Return a single machine without GPUs, for jobs that compute on the CPU."""
        return self.changed(
            num_nodes=1, gpus_per_node=0, gpu=None, mixed_gpus=(), intra_node=None, inter_node=None, host_to_device=None
        )

    def supports(self, precision: Precision) -> bool | None:
        """Return whether all devices that compute have matrix instructions for this precision; None if unknown."""
        devices: list[Gpu | Cpu | None] = [*self.mixed_gpus] or [self.gpu or self.cpu]
        answers = {device.supports(precision) for device in devices if device is not None}
        if False in answers:
            return False
        return None if None in answers else True

    @property
    def has_pcie_peers(self) -> bool:
        """Return whether the GPUs of a node are joined by PCIe."""
        return self.intra_node is not None and "PCIe" in self.intra_node.name

    @property
    def measured_gpu(self) -> Rates | None:
        """Return the probed GPU's rates, with estimates for fp8 and int8 from the datasheet."""
        if self.measured is None or self.measured.gpu is None:
            return None
        return self.measured.gpu.filled(self.gpu.peak if self.gpu is not None else None)

    @property
    def medium_is_bf16(self) -> bool:
        """Return whether torch's ``medium`` precision of fp32 products computes in bf16, as on CPUs with AMX, and not in fp32."""
        isa = self.cpu.isa if self.cpu is not None and self.device == "cpu" else None
        return isa is not None and "amx_bf16" in isa

    @property
    def fingerprint(self) -> str:
        """Return a short stable hash that identifies the hardware. Name, free memory, peaks and measurements do not count."""
        cpu = None if self.cpu is None else self.cpu.model_dump(exclude={"free_memory_bytes", "peak"})
        if cpu is not None:
            cpu["memory_bytes"] = _coarse(cpu["memory_bytes"])
        gpus = self.mixed_gpus or ((self.gpu,) if self.gpu else ())
        links = (self.intra_node, self.inter_node, self.host_to_device)
        identity = {
            "num_nodes": self.num_nodes,
            "cpu": cpu,
            "gpus_per_node": self.gpus_per_node,
            "gpus": [gpu.identity() for gpu in gpus],
            "links": [None if link is None else link.model_dump(exclude={"num_ports"}) for link in links],
        }
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def stated_memory(device: Cpu | Gpu | None) -> int | None:
    """Return the free bytes, or all bytes if the free bytes are unknown, or None if both are unknown."""
    if device is None:
        return None
    return device.memory_bytes if device.free_memory_bytes is None else device.free_memory_bytes


def _coarse(num_bytes: int | None) -> int | None:
    return None if num_bytes is None else round(num_bytes / FINGERPRINT_MEMORY_STEP)
