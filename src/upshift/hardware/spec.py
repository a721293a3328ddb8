"""Define what the planner needs to know of a machine: a Host and its parts, all frozen values with JSON in and out.

Unknown is None, never a guess. Sizes are bytes, rates are per second, matrix rates are FLOP/s (OP/s for int8) without sparsity.
`Host.origin` says for each field, by its dotted name, how it is known. Several kinds of GPU in one node are kept apart in
`mixed_gpus` and never merged into one.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from upshift.value import Value

Precision = Literal["fp32", "fp32_medium", "bf16", "fp16", "fp8", "int8"]
Isa = Literal[
    "avx2", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "avx_vnni", "amx_bf16", "amx_fp16", "amx_int8",
    "neon", "neon_fp16", "neon_dotprod", "neon_bf16", "neon_i8mm", "sve", "sve2",
]  # fmt: skip
Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
Exchange = Literal[Collective, "send"]
Backend = Literal["cuda", "rocm", "hpu", "xla", "mps"]  # what PyTorch runs an accelerator with
Device = Literal["cpu", "cuda", "hpu", "xla", "mps"]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Bytes = CountOrZero
Rate = Annotated[float, Field(gt=0)]
Seconds = Annotated[float, Field(ge=0)]

# Matrix instructions first appeared with these compute capabilities: CUDA C Programming Guide, "Compute Capabilities".
MIN_COMPUTE_CAPABILITY: dict[Precision, tuple[int, int]] = {
    "fp32": (0, 0), "fp32_medium": (8, 0), "bf16": (8, 0), "fp16": (7, 0), "fp8": (8, 9), "int8": (7, 2),
}  # fmt: skip
CPU_INSTRUCTIONS: dict[Precision, tuple[Isa, ...]] = {
    "bf16": ("avx512_bf16", "amx_bf16", "neon_bf16"),
    "fp16": ("avx512_fp16", "amx_fp16", "neon_fp16"),
    "int8": ("avx512_vnni", "avx_vnni", "amx_int8", "neon_dotprod", "neon_i8mm"),
}
# "HIP (ROCm) semantics" in PyTorch's documentation: ROCm GPUs keep the name cuda.
TORCH_DEVICE: dict[Backend, Device] = {"cuda": "cuda", "rocm": "cuda", "hpu": "hpu", "xla": "xla", "mps": "mps"}
FINGERPRINT_MEMORY_STEP = 2**28  # bytes; kernels and drivers report totals that differ by a few MiB


NOT_PROBED: tuple[Precision, ...] = ("fp8", "int8")


class Rates(Value):
    """Dense matrix rate by precision in FLOP/s, and memory traffic. A datasheet peak or measured: its holder says.

    fp32_medium is what `torch.set_float32_matmul_precision("medium")` gives: TF32 on GPUs since compute capability 8.0.
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
        """Return measured rates with those of fp8 and int8, which no probe measures: the datasheet's ``peak``, at the share of it
        that bf16 products reach, or else fp16 ones."""
        shares = [
            measured / stated
            for measured, stated in ((self.bf16, peak and peak.bf16), (self.fp16, peak and peak.fp16))
            if measured and stated
        ]
        if peak is None or not shares:
            return self
        known = {name: peak.matrix(name) for name in NOT_PROBED if self.matrix(name) is None}
        return self.changed(**{name: shares[0] * rate for name, rate in known.items() if rate is not None})


class Cpu(Value):
    """The processors of one node. Cache sizes are totals over all instances in the node.

    `peak` holds rates computed from the datasheet of a described CPU, None for a detected one: the probe measures that.
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
    peak: Rates | None = None  # of all cores together

    def supports(self, precision: Precision) -> bool | None:
        """Return whether the cores have instructions for matrices of this precision (torch emulates, slowly, where not)."""
        if precision == "fp32":
            return True
        if precision == "fp8":
            return False
        if precision == "fp32_medium":
            return True if self.architecture == "x86_64" else None
        return None if self.isa is None else any(name in self.isa for name in CPU_INSTRUCTIONS[precision])


class Gpu(Value):
    """One GPU or other accelerator. `peak` holds datasheet figures and is None for a product that is not in the table."""

    name: str
    backend: Backend = "cuda"
    table_key: str | None = None
    memory_bytes: Bytes | None
    free_memory_bytes: Bytes | None = None
    compute_capability: tuple[int, int] | None = None  # CUDA's
    pcie_generation: Count | None = None
    pcie_width: Count | None = None  # lanes
    nvlink_links: CountOrZero | None = None  # active links; 0: the GPU is known to have none
    nvlink_bytes_per_second: Rate | None = None  # per direction, all links of this GPU together
    tdp_watts: Rate | None = None  # thermal design power, or the vendor's word for the board's sustained limit
    peak: Rates | None = None

    def supports(self, precision: Precision) -> bool | None:
        """Return whether the GPU has matrix instructions for this precision.

        On CUDA the compute capability decides, elsewhere whether the table has a rate for it. fp32 runs on all of them.
        """
        if precision == "fp32":
            return True
        if self.backend != "cuda":
            return None if self.peak is None else self.peak.matrix(precision) is not None
        if self.compute_capability is None:
            return None
        return self.compute_capability >= MIN_COMPUTE_CAPABILITY[precision]

    def identity(self) -> dict[str, Any]:
        """Return what tells this GPU from another product: no free memory, no table figures; the name implies the backend."""
        known = self.model_dump(exclude={"backend", "table_key", "free_memory_bytes", "tdp_watts", "peak"})
        return known | {"memory_bytes": _coarse(self.memory_bytes)}


class Link(Value):
    """A connection seen from one device: bytes/s in one direction."""

    name: str
    bytes_per_second: Rate
    latency_seconds: Seconds | None = None
    measured: bool = False  # False: the specification's rate, an upper bound (PCIe peers often reach far less)


class Measured(Value):
    """The probe's measurements on this machine, with torch. Medians; None where not measured."""

    torch_version: str
    transformers_version: str | None
    num_threads: Count
    cpu: Rates
    gpu: Rates | None = None
    dispatch_seconds: Seconds  # one eager torch operation on one element, CPU
    gpu_dispatch_seconds: Seconds | None = None  # the host's time to queue one kernel
    host_to_device_bytes_per_second: Rate | None = None  # from pinned memory
    first_touch_seconds_per_byte: Seconds | None  # page faults of a fresh large tensor, beyond the write itself
    exchanges: dict[Exchange, Link] = {}  # gloo's between two processes here: latency, and bytes of the whole tensor per second
    base_resident_bytes: Bytes | None  # RSS of a process that imported torch and transformers and multiplied once
    compiler: bool | None  # a C++ compiler and the headers torch.compile needs on the CPU work
    probe_seconds: Seconds
    core_share: float | None = None  # share of the cores' time that the probe had: other programs had the rest


class Host(Value):
    """A machine, or several equal ones, that is here or about to be rented."""

    name: str
    num_nodes: Count = 1
    cpu: Cpu | None = None
    gpus_per_node: CountOrZero = 0
    gpu: Gpu | None = None  # every GPU is one of these; free memory is the least of them
    mixed_gpus: tuple[Gpu, ...] = ()  # all GPUs of a node, only where they differ
    intra_node: Link | None = None  # between the GPUs of a node
    inter_node: Link | None = None  # per node, between nodes
    host_to_device: Link | None = None
    disk_bytes_per_second: Rate | None = None  # of the disk that a model's weights are read from, where that was measured
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
        """Return the name that torch has for the devices that compute; a ROCm build of PyTorch calls its own cuda."""
        gpu = self.gpu or next(iter(self.mixed_gpus), None)
        return "cpu" if gpu is None else TORCH_DEVICE[gpu.backend]

    @property
    def num_devices(self) -> int:
        """Return the number of GPUs of all nodes; without GPUs, one device per node."""
        return self.num_nodes * max(1, self.gpus_per_node)

    def ranks_per_node(self, num_processes: int) -> int:
        """Return the ranks on one node of a job of ``num_processes`` processes.

        There is one for each GPU. Without GPUs the processes share the cores of the nodes evenly.
        """
        return self.gpus_per_node or max(num_processes // self.num_nodes, 1)

    def one_device(self) -> Host:
        """Return the same machine with a single GPU, for jobs that use no more; where GPUs differ, with the first."""
        if self.num_devices == 1 and not self.mixed_gpus:
            return self
        gpu = self.gpu or next(iter(self.mixed_gpus), None)
        return self.changed(
            num_nodes=1, gpus_per_node=min(self.gpus_per_node, 1), gpu=gpu, mixed_gpus=(), intra_node=None, inter_node=None
        )

    def cpu_alone(self) -> Host:
        """Return one such machine without its GPUs, for jobs that compute on the CPU."""
        return self.changed(
            num_nodes=1, gpus_per_node=0, gpu=None, mixed_gpus=(), intra_node=None, inter_node=None, host_to_device=None
        )

    def supports(self, precision: Precision) -> bool | None:
        """Return whether every device that would compute has matrix instructions for this precision; None if unknown."""
        parts: list[Gpu | Cpu | None] = [*self.mixed_gpus] or [self.gpu or self.cpu]
        answers = {part.supports(precision) for part in parts if part is not None}
        return False if False in answers else None if None in answers else True

    @property
    def measured_gpu(self) -> Rates | None:
        """Return the rates of the GPU that was probed, those of fp8 and int8 from the datasheet."""
        if self.measured is None or self.measured.gpu is None:
            return None
        return self.measured.gpu.filled(self.gpu.peak if self.gpu is not None else None)

    @property
    def medium_is_bf16(self) -> bool:
        """Return whether torch's ``medium`` precision of fp32 matrix products is bf16 here, as on CPUs with AMX. On other CPUs
        it is fp32."""
        isa = self.cpu.isa if self.cpu is not None and self.device == "cpu" else None
        return isa is not None and "amx_bf16" in isa

    @property
    def fingerprint(self) -> str:
        """Return a short stable hash of what identifies the hardware: no host name, free memory, peaks or measurements."""
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
            "links": [None if link is None else link.model_dump() for link in links],
        }
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def stated_memory(part: Cpu | Gpu | None) -> int | None:
    """Return the free bytes, or all bytes if the free ones are unknown; None where the host does not say."""
    if part is None:
        return None
    return part.memory_bytes if part.free_memory_bytes is None else part.free_memory_bytes


def _coarse(num_bytes: int | None) -> int | None:
    return None if num_bytes is None else round(num_bytes / FINGERPRINT_MEMORY_STEP)
