"""List server CPUs, one socket each.

A rate is cores x operations per cycle and core x base clock. Vendors guarantee the base clock with all cores busy; boost is
faster, and AVX-512 and AMX may be slower. Memory bandwidth is channels x transfers x 8 bytes. The source of a row contains these
products. Caches are of the whole socket. A multiply-add counts as two operations.
"""

from __future__ import annotations

from upshift.hardware.catalog.row import CpuFacts
from upshift.hardware.spec import Cpu, Isa, Precision, Rate, Rates
from upshift.units import KIB, MIB
from upshift.value import Value

MEGA = 10**6


class Core(Value):
    """Describe a microarchitecture. `operations`: of one core in a cycle, by precision."""

    architecture: str
    isa: tuple[Isa, ...]
    operations: dict[Precision, int]
    source: str


def _arm(source: str, isa: tuple[Isa, ...], *, fp32: int, bf16: int | None, int8: int) -> Core:
    operations: dict[Precision, int] = {"fp32": fp32, "fp16": 2 * fp32, "int8": int8}
    if bf16:
        operations["bf16"] = bf16
    return Core(architecture="aarch64", isa=isa, operations=operations, source=source)


ARM_TABLE = "Software Optimization Guide (pipes and throughputs, as in LLVM's scheduling model)"
ZEN = Core(
    architecture="x86_64",
    isa=("avx2",),
    operations={"fp32": 32},
    source="AMD Software Optimization Guide, families 17h and 19h: two 256-bit FMA pipes",
)
ZEN4 = Core(
    architecture="x86_64",
    isa=("avx2", "avx512f", "avx512_bf16", "avx512_vnni"),
    operations={"fp32": 32, "bf16": 64, "int8": 128},
    source="AMD Software Optimization Guide for Zen 4 (57647): 512-bit instructions take two passes of 256-bit pipes",
)
ZEN5 = Core(
    architecture="x86_64",
    isa=("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "avx_vnni"),
    operations={"fp32": 64, "bf16": 128, "int8": 256},
    source="AMD at Computex 2024: Zen 5's 512-bit data path has twice the AVX-512 and AI throughput of Zen 4",
)
AVX512_VNNI = Core(
    architecture="x86_64",
    isa=("avx2", "avx512f", "avx512_vnni"),
    operations={"fp32": 64, "int8": 256},
    source="Intel Optimization Reference Manual: two 512-bit FMA ports",
)
AMX_ISA: tuple[Isa, ...] = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "avx512_vnni",
    "avx_vnni",
    "amx_bf16",
    "amx_int8",
)
AMX = Core(
    architecture="x86_64",
    isa=AMX_ISA,
    operations={"fp32": 64, "bf16": 1024, "fp16": 128, "int8": 2048},
    source="Intel AMX solution brief (2022), 1024 BF16 or 2048 INT8 operations; fp32, fp16: two 512-bit FMA ports",
)
AMX_FP16 = Core(
    architecture="x86_64",
    isa=(*AMX_ISA[:-1], "amx_fp16", "amx_int8"),
    operations={"fp32": 64, "bf16": 1024, "fp16": 1024, "int8": 2048},
    source="Intel AMX solution brief (2022); AMX-FP16 as BF16: Intel Instruction Set Extensions reference, TDPFP16PS",
)
NEOVERSE_N1 = _arm(f"Arm Neoverse N1 {ARM_TABLE}", ("neon", "neon_fp16", "neon_dotprod"), fp32=16, bf16=None, int8=64)
V1_ISA: tuple[Isa, ...] = ("neon", "neon_fp16", "neon_dotprod", "neon_bf16", "neon_i8mm", "sve")
NEOVERSE_V1 = _arm(f"Arm Neoverse V1 {ARM_TABLE}", V1_ISA, fp32=32, bf16=128, int8=256)
NEOVERSE_V2 = _arm(f"Arm Neoverse V2 {ARM_TABLE}", (*V1_ISA, "sve2"), fp32=32, bf16=128, int8=256)

AMD = "AMD product page (2025)"
INTEL = "Intel product specifications, ARK (2025)"
GRAVITON = "AWS Graviton Technical Guide (2025)"


def _peak(core: Core, cores: int, mhz: int, bytes_per_second: Rate) -> Rates:
    figures = {name: cores * count * mhz * MEGA for name, count in core.operations.items()}
    if core.architecture == "x86_64":  # torch's medium precision computes in bf16 on CPUs with AMX, else in fp32
        figures["fp32_medium"] = figures["bf16" if "amx_bf16" in core.isa else "fp32"]
    return Rates.model_validate({**figures, "memory_bytes_per_second": bytes_per_second})


def _row(
    key: str,
    model: str,
    source: str,
    core: Core,
    *,
    cores: int,
    mhz: int,
    memory: tuple[int, str, int],
    l2_kib: int,
    l3_mib: float,
    sockets: int = 2,
) -> tuple[str, CpuFacts]:
    """Return a key and its row. `memory`: channels, kind and 10**6 transfers per second. `l2_kib`: of one core."""
    channels, kind, transfers = memory
    peak = _peak(core, cores, mhz, channels * transfers * MEGA * 8)
    cpu = Cpu(
        model_name=model,
        architecture=core.architecture,
        physical_cores=cores,
        usable_cores=cores,
        numa_nodes=None,
        l2_total_bytes=cores * l2_kib * KIB,
        l3_total_bytes=round(l3_mib * MIB),
        isa=core.isa,
        memory_bytes=None,
        free_memory_bytes=None,
        peak=peak,
    )
    counts = ", ".join(f"{name} {count}" for name, count in core.operations.items())
    derivation = f"{cores} cores x {mhz} MHz x operations a cycle ({counts}: {core.source})"
    return key, CpuFacts(cpu=cpu, max_sockets=sockets, source=f"{source}; {derivation}; {channels} x {kind}-{transfers}")


# fmt: off
CPUS: dict[str, CpuFacts] = dict([
    _row("epyc-7742", "AMD EPYC 7742", AMD, ZEN, cores=64, mhz=2250, memory=(8, "DDR4", 3200), l2_kib=512, l3_mib=256),
    _row("epyc-7763", "AMD EPYC 7763", AMD, ZEN, cores=64, mhz=2450, memory=(8, "DDR4", 3200), l2_kib=512, l3_mib=256),
    _row("epyc-9554", "AMD EPYC 9554", AMD, ZEN4, cores=64, mhz=3100, memory=(12, "DDR5", 4800), l2_kib=1024, l3_mib=256),
    _row("epyc-9654", "AMD EPYC 9654", AMD, ZEN4, cores=96, mhz=2400, memory=(12, "DDR5", 4800), l2_kib=1024, l3_mib=384),
    _row("epyc-9755", "AMD EPYC 9755", AMD, ZEN5, cores=128, mhz=2700, memory=(12, "DDR5", 6400), l2_kib=1024, l3_mib=512),
    _row("epyc-9965", "AMD EPYC 9965", AMD, ZEN5, cores=192, mhz=2250, memory=(12, "DDR5", 6400), l2_kib=1024, l3_mib=384),
    _row("xeon-8280", "Intel Xeon Platinum 8280", INTEL, AVX512_VNNI,
         cores=28, mhz=2700, memory=(6, "DDR4", 2933), l2_kib=1024, l3_mib=38.5, sockets=8),
    _row("xeon-8380", "Intel Xeon Platinum 8380", INTEL, AVX512_VNNI,
         cores=40, mhz=2300, memory=(8, "DDR4", 3200), l2_kib=1280, l3_mib=60),
    _row("xeon-8480", "Intel Xeon Platinum 8480+", INTEL, AMX,
         cores=56, mhz=2000, memory=(8, "DDR5", 4800), l2_kib=2048, l3_mib=105),
    _row("xeon-8592", "Intel Xeon Platinum 8592+", INTEL, AMX,
         cores=64, mhz=1900, memory=(8, "DDR5", 5600), l2_kib=2048, l3_mib=320),
    _row("xeon-6980p", "Intel Xeon 6980P", INTEL, AMX_FP16,
         cores=128, mhz=2000, memory=(12, "DDR5", 6400), l2_kib=2048, l3_mib=504),
    _row("graviton-2", "AWS Graviton2", GRAVITON, NEOVERSE_N1,
         cores=64, mhz=2500, memory=(8, "DDR4", 3200), l2_kib=1024, l3_mib=32, sockets=1),
    _row("graviton-3", "AWS Graviton3", GRAVITON, NEOVERSE_V1,
         cores=64, mhz=2600, memory=(8, "DDR5", 4800), l2_kib=1024, l3_mib=32, sockets=1),
    # 2.8 GHz in instances of one socket, 2.7 GHz in those of two.
    _row("graviton-4", "AWS Graviton4", GRAVITON, NEOVERSE_V2,
         cores=96, mhz=2700, memory=(12, "DDR5", 5600), l2_kib=2048, l3_mib=36),
])
# fmt: on
