"""Predict held memory from allocated memory: add the base process, fragmentation and the allocator's slack."""

from __future__ import annotations

from statistics import NormalDist

from upshift.hardware.spec import Host, stated_memory
from upshift.planning.cost.memory import StepMemory
from upshift.planning.optimizers import optimizers
from upshift.planning.plan import Plan
from upshift.units import GIB, MIB

# Host memory beyond the base process and live tensors: a regression over 166 steady steps of Llama, Qwen2, GPT-2, BERT and
# T5 of 5 to 30 M parameters (glibc, one thread), chosen and judged on the same rows: median error 2.4 %, 95 % within 8.2 %,
# worst 22.9 % (recomputed BERT). The loss's part explains most of it where its blocks come from the heap, and little where
# they are mapped, which suggests holes in the heap; no allocator was traced. A trial replaces all of it.
FIRST_STEP_BYTES = 75 * MIB  # code and kernels that the first step loads
ADAPTER_BYTES = 48 * MIB  # peft and what it imports, measured beside torch and transformers
COMPILED_BYTES = {"off": 0, "layer": 65 * MIB, "model": 65 * MIB}  # seven rows of layer; model is taken to be the same
WEIGHTS_SHARE = 0.15
ACTIVATIONS_SHARE = 0.17
LOSS_SHARE = 1.1
# A recomputed layer's tensors are made among gradients that stay. Fitted on the 48 recomputed rows of docs/accuracy.md.
RECOMPUTED_SHARE = 1.4
MMAP_BYTES = 32 * MIB  # glibc maps larger blocks one by one and leaves no holes (DEFAULT_MMAP_THRESHOLD_MAX, mallopt(3))
# In 16 bits on a CPU, oneDNN makes code for each size of a product, keeps it, and keeps what belongs to it for the newest sizes
# (ONEDNN_PRIMITIVE_CACHE_CAPACITY). Measured over 900 sizes of products and 400 widths of linear layers (torch 2.13, AVX-512).
SIZE_CODE_BYTES = 0.27 * MIB
CACHED_SIZE_BYTES = 0.29 * MIB
CACHED_SIZES = 1024
WIDTH_PRODUCTS = 12  # a decoder layer has about four sizes of linear layers, each with one product forward and two backward
LOSS_BLOCKS = {"fp32": 2.05, "bf16": 2.8}  # the loss's part of memory, in blocks of fp32 logits
BF16_LOSS_SHARE = 1 / 3  # of the loss's part: the blocks of half that size, where logits are bf16
DEFAULT_BASE_BYTES = 300 * MIB  # torch and transformers imported, where the host was not probed
CUDA_CONTEXT_BYTES = 0.5 * GIB  # context and kernels (COSTS.md D3: 0.3 to 0.5 GB)
NCCL_BYTES = 0.37 * GIB  # of one communicator (COSTS.md D2, D3: 342 to 392 MB, up to 0.5 GB)
# torch's default workspace of a cuBLAS handle (aten/src/ATen/cuda/CublasHandlePool.cpp, torch 2.13)
CUBLAS_BYTES = 8_519_680
CUBLAS_HOPPER_BYTES = 32 * MIB  # on compute capability 9 and 10
# Each thread has a handle: one multiplies in the forward pass, autograd's in the backward pass. On an H100 (torch 2.11) a step
# allocated 67,118,367 bytes more than its tensors take, and two workspaces are 67,108,864 (benchmarks/results/gpu_train.jsonl).
CUBLAS_HANDLES = 2
CUDA_SLACK = 1.04  # caching allocator's rounding and fragmentation, traced tier (COSTS.md D3: 6 to 8 % margin with context)
# Standard deviation of held memory, measured over predicted, before a trial. CPU: of the rows of docs/accuracy.md. CUDA: what
# traced estimates are given (COSTS.md D3, 6 to 8 %); no GPU has confirmed it.
HELD_SPREAD = {"cpu": 0.05, "cuda": 0.08}
USABLE_SHARE = 0.95  # of the free memory


def predict_resident(memory: StepMemory, plan: Plan, host: Host, *, adapter: bool, num_widths: int = 1) -> float:
    """Return the bytes that one process holds in host memory, or on the device if the plan is for a GPU.

    ``adapter``: the process has imported peft. ``num_widths``: how many widths the run's micro-batches have.
    """
    if plan.device == "cuda":
        return outside_allocator(plan) + predict_reserved(memory)
    highest = {name: max(peak.parts.get(name, 0.0) for peak in memory.phases.values()) for name in ("weights", "activations")}
    loss = memory.phases["forward"].parts.get("loss", 0.0)
    holes = (
        WEIGHTS_SHARE * highest["weights"]
        + ACTIVATIONS_SHARE * highest["activations"]
        + LOSS_SHARE * loss * _heap_share(loss, plan)
        + RECOMPUTED_SHARE * memory.recomputed
    )
    # An optimizer that compiles its update brings the same compiler into the process.
    compiled = "layer" if optimizers()[plan.optim].library == "torchao" else plan.torch_compile
    libraries = ADAPTER_BYTES * adapter + COMPILED_BYTES[compiled]
    return base_bytes(host) + libraries + memory.peak + holes + _size_bytes(plan, num_widths)


def _size_bytes(plan: Plan, num_widths: int) -> float:
    """Return the bytes that oneDNN keeps for further widths. Those of the first width are in the other figures."""
    if plan.traced_precision == "fp32":
        return 0.0
    num_sizes = WIDTH_PRODUCTS * (num_widths - 1)
    return SIZE_CODE_BYTES * num_sizes + CACHED_SIZE_BYTES * min(num_sizes, CACHED_SIZES)


def outside_allocator(plan: Plan) -> float:
    """Return the bytes of a GPU that a process holds outside torch's allocator: CUDA's context and NCCL's buffers."""
    return CUDA_CONTEXT_BYTES + NCCL_BYTES * _num_communicators(plan)


def library_bytes(plan: Plan, host: Host) -> int:
    """Return the bytes that torch's CUDA allocator gives to cuBLAS in the first step, which keeps them. 0 on the CPU."""
    if plan.device != "cuda":
        return 0
    capability = host.gpu.compute_capability if host.gpu is not None else None
    is_hopper = capability is not None and (9, 0) <= capability < (12, 0)
    return CUBLAS_HANDLES * (CUBLAS_HOPPER_BYTES if is_hopper else CUBLAS_BYTES)


def base_bytes(host: Host) -> float:
    """Return the bytes of a process that has imported what a step needs and has no tensors."""
    measured = host.measured.base_resident_bytes if host.measured else None
    return (measured or DEFAULT_BASE_BYTES) + FIRST_STEP_BYTES


def predict_reserved(memory: StepMemory) -> float:
    """Return the bytes of the device that torch's CUDA allocator holds: whole segments, and holes.

    Large blocks are segments of their own, and the allocator does not join them. The block of 16-bit logits is free when the
    gradients of the loss are made, but too small for them: they are in fp32.
    """
    at_loss = memory.phases[memory.peak_phase].parts.get("loss", 0.0) > 0.0
    return CUDA_SLACK * memory.peak + memory.half_logits * at_loss


def _num_communicators(plan: Plan) -> int:
    """Return the number of kinds of groups in which a rank exchanges. Each kind has its own buffers."""
    layout = plan.layout
    num_summing = plan.data_parallel * layout.context_parallel
    sharded = layout.shard_size if layout.fully_shard != "no" else 1
    sizes = (
        layout.tensor_parallel,
        layout.context_parallel,
        layout.pipeline_parallel,
        layout.expert_parallel,
        sharded,
        num_summing // sharded,
    )
    return sum(size > 1 for size in sizes)


def _heap_share(loss: float, plan: Plan) -> float:
    """Return the share of the loss's memory that is in blocks from the heap."""
    is_fp32 = plan.traced_precision == "fp32"
    block = loss / LOSS_BLOCKS["fp32" if is_fp32 else "bf16"]
    if plan.host_memory == "keep" or block <= MMAP_BYTES:
        return 1.0
    return BF16_LOSS_SHARE if not is_fp32 and block / 2 <= MMAP_BYTES else 0.0


def memory_limit(plan: Plan, host: Host, *, risk: float | None = None, spread: float | None = None) -> float | None:
    """Return the bytes that one process may be predicted to hold; None where the host does not say how much memory it has.

    ``risk``: the accepted probability of running out of memory; None: a fixed share of the free memory. ``spread``: the standard
    deviation of held memory, measured over predicted, if earlier runs on this host gave one.
    """
    free = free_memory(plan, host)
    if free is None:
        return None
    return free * USABLE_SHARE if risk is None else free / _held_distribution(plan, spread).inv_cdf(1.0 - risk)


def unknown_memory(host: Host) -> str | None:
    """Return a note that no plan was compared with the host's memory, or None if the host says how much it has."""
    if stated_memory(host.cpu if host.device == "cpu" else host.gpu) is not None:
        return None
    stated = "state it behind the name, as in epyc-9654-768gb, or as memory_bytes in a Host JSON file"
    return f"The memory of {host.name} is unknown and no plan was held against it: any may be too big; {stated}"


def free_memory(plan: Plan, host: Host) -> float | None:
    """Return the bytes for one process of the plan; None where the host does not say."""
    if plan.device == "cuda":
        return stated_memory(host.gpu)
    free = stated_memory(host.cpu)
    return None if free is None else free / host.ranks_per_node(plan.num_processes)


def out_of_memory_probability(resident: float, plan: Plan, host: Host, *, spread: float | None = None) -> float | None:
    """Return the probability that the plan holds more than is free; None where the host does not say how much is free."""
    free = free_memory(plan, host)
    return None if free is None else 1.0 - _held_distribution(plan, spread).cdf(free / resident)


def _held_distribution(plan: Plan, spread: float | None) -> NormalDist:
    """Return the distribution of held memory, measured over predicted."""
    return NormalDist(1.0, spread or HELD_SPREAD[plan.device])
