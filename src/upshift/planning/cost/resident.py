"""From allocated tensors to what the process or the device really holds: base, fragmentation, allocator slack."""

from __future__ import annotations

from upshift.hardware.spec import Host
from upshift.planning.cost.memory import StepMemory
from upshift.planning.plan import Plan
from upshift.units import GIB, MIB

# How much of the heap glibc keeps beyond live tensors that come and go, as a factor on them (docs/log.md, 2026-11-20:
# 1.57 to 2.11 without, 1.20 to 1.44 with compiled layers, which allocate fewer and larger blocks). A trial replaces it.
TRANSIENT_FACTOR = {"off": 1.7, "layer": 1.45, "model": 1.4}
DEFAULT_BASE_BYTES = 300 * MIB  # torch and transformers imported, where the host was not probed
CUDA_CONTEXT_BYTES = 0.5 * GIB  # context and kernels (COSTS.md D3: 0.3 to 0.5 GB)
CUDA_SLACK = 1.04  # caching allocator's rounding and fragmentation, traced tier (COSTS.md D3: 6 to 8 % margin with context)
USABLE_SHARE = 0.95  # of the free memory


def predict_resident(memory: StepMemory, plan: Plan, host: Host) -> float:
    """Bytes of one process (host memory) or of the device."""
    if plan.device == "cuda":
        return CUDA_CONTEXT_BYTES + CUDA_SLACK * memory.peak
    base = (host.measured.base_resident_bytes if host.measured else None) or DEFAULT_BASE_BYTES
    highest = memory.phases[memory.peak_phase].parts
    lasting = highest["weights"] + highest["optimizer"]
    return base + lasting + (memory.peak - lasting) * TRANSIENT_FACTOR[plan.torch_compile]


def memory_limit(plan: Plan, host: Host) -> float | None:
    """Bytes that one process may hold; None where the host does not say."""
    if plan.device == "cuda":
        gpu = host.gpu
        free = (gpu.free_memory_bytes or gpu.memory_bytes) if gpu else None
        return free * USABLE_SHARE if free else None
    cpu = host.cpu
    free = (cpu.free_memory_bytes or cpu.memory_bytes) if cpu else None
    return free * USABLE_SHARE / plan.num_processes if free else None
