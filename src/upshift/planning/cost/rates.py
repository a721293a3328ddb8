"""Predict the rates that one rank of a plan has to itself, and the cost of weights that are read from the host or from disk.

The rates are those of matrix products, attention, memory and dispatch. They are measured where the host was probed. Elsewhere
they are the datasheet's, times the efficiency that such parts reach.

Frozen weights of layers may be kept on the host or on disk. A step reads these weights layer by layer, forward and backward.
Two buffers of a layer's size stay in memory: the step reads into one while the other is computed with. An embedding that is not
tied to the head is looked up in its file, so a step reads only the rows of a batch's tokens. All other weights, such as the
head, stay in memory.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from upshift.hardware import AttentionKernel, attention_efficiency, efficiency_row, gemm_efficiency, memory_efficiency
from upshift.hardware.spec import Gpu, Host
from upshift.hardware.spec import Precision as MatrixPrecision
from upshift.hardware.spec import Rates as MatrixRates
from upshift.models.profile import ModelProfile
from upshift.planning.plan import Plan

MATRIX_PRECISION: dict[str, MatrixPrecision] = {
    "fp32": "fp32",
    "tf32": "fp32_medium",
    "bf16": "bf16",
    "fp16": "fp16",
    "bf16-weights": "bf16",
    "fp8": "fp8",
}
# Measured with this library's trials on a 2-core Zen 4 (docs/log.md, 2026-11-20): flash attention on the CPU runs at this
# share of the fp32 matrix rate, in fp32 and bf16 alike.
CPU_ATTENTION_SHARE = 0.4
BLOCK_ATTENTION_SHARE = 0.9  # measured likewise, for the products that block attention computes, softmax included
DISPATCHES_PER_KERNEL = 6.0  # autograd, autocast and module calls around each kernel, over one bare operator
# The same on a GPU's host, over queueing one kernel. Measured on an H100's: 28 to 46 us a kernel of BERT-large in bf16, where
# queueing one takes 7.6 (docs/gpu_check.md). The device computes meanwhile, so only small batches are bound by it.
GPU_DISPATCHES_PER_KERNEL = 5.0
CPU_DISPATCH_SECONDS = 1.2e-6  # one operator on one element, where not measured: what the probe finds on a 2-core Zen 4
GPU_DISPATCH_SECONDS = 6e-6  # queueing one kernel from Python, where not measured
# Matrix products with a weight in a step: its output, its input's gradient and, if it is trained, its own gradient.
TRAINED_PRODUCTS = 3
FROZEN_PRODUCTS = 2
NO_RATE_ADVICE = " and no source publishes it; name another --on, or a Host JSON file that states it"
# For devices outside the fitted table (COSTS.md D7).
DEFAULT_GEMM_EFFICIENCY = 0.7
DEFAULT_MEMORY_EFFICIENCY = 0.75


class Sustained(NamedTuple):
    """The share of single kernels' rates that training keeps: clocks fall under load."""

    matrix: float  # the share that matrix products keep
    memory: float


# By compute capability, where no trial measured them. Fitted on the published rows of LLM Foundry (benchmarks/published) for MPT
# of 125M, 760M, 3B, 13B and 70B, bf16, A100 and H100. B200: on SimuMax's rows of Llama 3 70B (bf16, nothing hidden) and NVIDIA's
# of Llama 3 8B and 70B (fp8; Megatron-Bridge's recipes recompute nothing there), both sources alike: they come out as on an H100.
# Fitted to SimuMax alone memory had 0.5, with which NVIDIA's rows were 5 to 15 % too slow. Other GPUs: between them, not checked.
# Attention is fitted to no row: its kernels were measured alone.
SUSTAINED = {
    (8, 0): Sustained(0.82, 1.0),
    (9, 0): Sustained(0.70, 0.95),
    (10, 0): Sustained(0.70, 0.95),
}
SUSTAINED_ELSEWHERE = Sustained(0.78, 0.85)
# Desktop cards. Fitted to four rows alone: two 3090 and two 4090 that train copies of Llama 2 7B with LoRA or QLoRA
# (AnswerDotAI/fsdp_qlora). They come out 4 to 13 % too slow; as other GPUs they were 55 % too slow. The probable reason: at half
# of their rate the tensor cores do not take the power that lowers the clocks. Laptops, with less power, have no published rows.
SUSTAINED_GEFORCE = Sustained(1.0, 0.85)
# The programs whose runs they were fitted to.
FITTED_TO_RUNS_OF = {(8, 0): "LLM Foundry", (9, 0): "LLM Foundry", (10, 0): "Megatron with Transformer Engine"}
# The rate of attention where no kernel of it was measured, as a share of a matrix product's rate.
OTHER_ATTENTION_SHARE = 0.3
# The kernel behind sdpa in 16 bits. torch prefers cuDNN's on these (check_prefer_cudnn_attention of torch 2.13, sdp_utils.cpp).
CUDNN_CAPABILITIES = ((9, 0), (10, 0))
FLASH_KERNELS: dict[str, AttentionKernel] = {"flash_attention_2": "flash_2", "flash_attention_3": "flash_3"}
# The factors of matrix products are those of tensor cores, whose power lowers the clocks. Products in fp32 run without tensor
# cores and keep their rate: with the factor, published fp32 rows on A100 and V100 and an H100's here were predicted 25 % too
# slow.
FULL_PRECISION_SUSTAINED = 1.0


class Rates(NamedTuple):
    """The rates that one process of the plan has to itself, per second.

    ``dispatch`` is in seconds a kernel, and ``first_touch`` in seconds a byte.
    """

    matrix: float
    outside: float  # matrix products outside the layers, which stay in bf16 beside fp8 layers
    attention: float
    memory: float
    stream: float  # bytes per second of kernels that run over all of the parameters at once, as an update does
    dispatch: float
    first_touch: float


def predict_rates(host: Host, profile: ModelProfile, plan: Plan, *, kernel: AttentionKernel | None = None) -> Rates | None:
    """Return the rates of one process.

    Return None where the host's rate in this precision is unknown. Such a plan cannot be ranked.
    ``kernel``: of attention on GPUs, in another program; None: the one that the plan runs.
    """
    if plan.device == "cuda":
        return _gpu_rates(host, profile, plan, kernel)
    measured = host.measured
    if host.cpu is None or (measured is None and host.cpu.peak is None):
        return None
    if measured is not None:
        peak_rates = measured.cpu
        threads = measured.num_threads
        matrix_efficiency = 1.0
        bandwidth_efficiency = 1.0
    else:
        peak_rates = host.cpu.peak or MatrixRates()
        threads = host.cpu.usable_cores
        matrix_efficiency = DEFAULT_GEMM_EFFICIENCY
        bandwidth_efficiency = DEFAULT_MEMORY_EFFICIENCY
    matrix = peak_rates.matrix(MATRIX_PRECISION[plan.precision])
    fp32 = peak_rates.fp32
    bandwidth = peak_rates.memory_bytes_per_second
    if matrix is None or fp32 is None or bandwidth is None:
        return None
    ranks_here = host.ranks_per_node(plan.num_processes)
    processes_per_core = max(ranks_here / threads, 1.0)
    matrix_share = min(plan.threads_per_process / threads, 1.0) * matrix_efficiency / processes_per_core
    attention_share = BLOCK_ATTENTION_SHARE if plan.attention == "block" else CPU_ATTENTION_SHARE
    dispatch_seconds = measured.dispatch_seconds if measured else CPU_DISPATCH_SECONDS
    return Rates(
        matrix=matrix * matrix_share,
        outside=matrix * matrix_share,
        attention=attention_share * fp32 * matrix_share,
        memory=bandwidth * bandwidth_efficiency / ranks_here,
        stream=bandwidth * bandwidth_efficiency / ranks_here,
        dispatch=dispatch_seconds * DISPATCHES_PER_KERNEL * processes_per_core,
        first_touch=(measured.first_touch_seconds_per_byte or 0.0) if measured else 0.0,
    )


def _gpu_rates(host: Host, profile: ModelProfile, plan: Plan, kernel: AttentionKernel | None) -> Rates | None:
    gpu = host.gpu
    measured = host.measured
    precision = MATRIX_PRECISION[plan.precision]
    outside_precision: MatrixPrecision = "bf16" if precision == "fp8" else precision
    if gpu is None:
        return None
    dispatch = measured.gpu_dispatch_seconds if measured and measured.gpu_dispatch_seconds else GPU_DISPATCH_SECONDS
    probed = host.measured_gpu or MatrixRates()
    matrix = probed.matrix(precision)
    outside = probed.matrix(outside_precision)
    memory = probed.memory_bytes_per_second
    if matrix is None or outside is None or memory is None:
        listed = _datasheet_rates(gpu, profile, plan)
        matrix = matrix or listed.matrix(precision)
        outside = outside or listed.matrix(outside_precision)
        memory = memory or listed.memory_bytes_per_second
    if matrix is None or outside is None or memory is None:
        return None
    elsewhere = SUSTAINED_GEFORCE if gpu.is_desktop_geforce else SUSTAINED_ELSEWHERE
    sustained = SUSTAINED.get(gpu.compute_capability or (0, 0), elsewhere)
    kept = FULL_PRECISION_SUSTAINED if precision == "fp32" else sustained.matrix
    return Rates(
        matrix=kept * matrix,
        outside=kept * outside,
        attention=_attention_rate(gpu, plan, outside_precision, outside, kernel),
        memory=sustained.memory * memory,
        stream=memory,
        dispatch=dispatch * GPU_DISPATCHES_PER_KERNEL,
        first_touch=0.0,
    )


def _attention_rate(gpu: Gpu, plan: Plan, precision: MatrixPrecision, products: float, kernel: AttentionKernel | None) -> float:
    """Return the FLOP/s of attention's forward and backward pass. ``products``: those of single matrix products."""
    capability = gpu.compute_capability or (0, 0)
    share = None
    if precision in ("bf16", "fp16"):
        own: AttentionKernel = "cudnn" if capability in CUDNN_CAPABILITIES else "flash_2"
        share = attention_efficiency(kernel or FLASH_KERNELS.get(plan.attention, own), capability, plan.sequence_length)
    peak = gpu.peak.matrix(precision) if gpu.peak else None
    return OTHER_ATTENTION_SHARE * products if share is None else share * (peak or products)


def _datasheet_rates(gpu: Gpu, profile: ModelProfile, plan: Plan) -> MatrixRates:
    """Return the datasheet's rates times the share that the model's products reach, and that its memory traffic reaches."""
    if gpu.peak is None:
        return MatrixRates()
    precision = MATRIX_PRECISION[plan.precision]
    bf16, own = gpu.peak.matrix("bf16"), gpu.peak.matrix(precision)
    slower = max(bf16 / own, 1.0) if bf16 and own else 1.0
    share = product_efficiency(efficiency_row(gpu, precision), profile, plan, slower=slower)
    bandwidth_share = memory_efficiency(gpu.table_key or "") or DEFAULT_MEMORY_EFFICIENCY
    reached = {name: rate and rate * share for name, rate in gpu.peak.model_dump().items()}
    bandwidth = gpu.peak.memory_bytes_per_second
    return MatrixRates(**reached | {"memory_bytes_per_second": bandwidth and bandwidth * bandwidth_share})


def host_link(host: Host) -> float | None:
    """Return the bytes per second between host and device, in one direction; None where unknown."""
    if host.measured is not None and host.measured.host_to_device_bytes_per_second is not None:
        return host.measured.host_to_device_bytes_per_second
    return host.host_to_device.bytes_per_second if host.host_to_device is not None else None


def product_efficiency(row: str, profile: ModelProfile, plan: Plan, *, slower: float = 1.0) -> float:
    """Return the share of the peak that the model's matrix products reach together, each by its size.

    The size of a weight's product follows from the tokens that are multiplied with it, and from the part of the weight that a
    rank has. Frozen weights, such as those below an adapter, have no product for a gradient of their own.

    Args:
        row: of measured efficiencies, see ``efficiency_row``.
        slower: the rate of bf16, whose products were measured, over that of the precision. A product in a slower precision takes
            as long as a larger one in bf16, and waits for memory and launches as little as that.
    """
    tokens = plan.per_device_train_batch_size * plan.sequence_length / plan.layout.context_parallel
    flops = seconds = 0.0
    parameters = profile.parameters
    trained = [(shape, TRAINED_PRODUCTS) for shape in parameters.trainable_shapes]
    frozen = [(shape, FROZEN_PRODUCTS) for shape in parameters.frozen_shapes]
    for shape, num_products in trained + frozen:
        if len(shape.shape) < 2 or shape.elements == parameters.embedding != parameters.head:
            continue
        product_tokens = tokens
        if len(shape.shape) == 3 and profile.experts is not None:  # one kernel computes all experts' products
            product_tokens *= profile.experts.per_token / profile.experts.count
        product_flops = 2.0 * product_tokens * prod(shape.shape) / plan.layout.tensor_parallel
        total = num_products * product_flops * shape.count
        flops += total
        seconds += total / (gemm_efficiency(row, slower * product_flops) or DEFAULT_GEMM_EFFICIENCY)
    return flops / seconds if seconds else DEFAULT_GEMM_EFFICIENCY


OFFLOAD_PASSES = 2  # forward and backward; the weights of a recomputed layer are there when its backward pass begins
OFFLOAD_BUFFERS = 2  # the next pass goes the other way, and begins with the layers that the buffers hold


class OffloadedWeights(NamedTuple):
    """Bytes of the weights that are not kept in memory, and of the buffers for them."""

    layers: float = 0.0  # read by each pass
    rows: float = 0.0  # looked up row by row
    buffers: float = 0.0

    @property
    def saved(self) -> float:
        """Return the bytes of memory that the offload saves."""
        return self.layers + self.rows - self.buffers


NO_OFFLOAD = OffloadedWeights()


def offloaded_weights(profile: ModelProfile, plan: Plan) -> OffloadedWeights:
    """Return the bytes of the weights that the plan keeps outside the device's memory."""
    if plan.weight_offload == "none":
        return NO_OFFLOAD
    size = frozen_bytes(profile, plan)
    frozen_sizes = [stack.layer_frozen[index] for stack in profile.stacks if stack.layer_frozen for index in stack.assignment]
    largest = max(frozen_sizes) / sum(frozen_sizes) if sum(frozen_sizes) else 1.0 / max(profile.num_layers, 1)
    parameters = profile.parameters
    outside = parameters.trainable - parameters.trainable_layers - parameters.trainable_head
    reads_rows = plan.weight_offload == "disk" and not parameters.tied and outside == 0
    rows = parameters.embedding * _element_bytes(profile, plan) if reads_rows else 0.0
    return OffloadedWeights(size, rows, min(OFFLOAD_BUFFERS * largest, 1.0) * size)


def frozen_bytes(profile: ModelProfile, plan: Plan) -> float:
    """Return the bytes of the frozen weights of the layers."""
    parameters = profile.parameters
    return float(parameters.layers - parameters.trainable_layers) * _element_bytes(profile, plan)


def _element_bytes(profile: ModelProfile, plan: Plan) -> int:
    return 2 if profile.parameters.always_bf16 else plan.parameter_bytes


def offload_wait_seconds(profile: ModelProfile, plan: Plan, host: Host, compute_seconds: float) -> dict[str, float]:
    """Return the seconds for which a step waits for weights, by the place they come from. Empty if no weights are offloaded.

    ``compute_seconds``: for which the step's micro-batches compute, while the next layer is read.
    """
    if plan.weight_offload == "none":
        return {}
    link = host_link(host) if plan.device == "cuda" else None
    rates = {"host": link, "disk": host.disk_bytes_per_second if plan.weight_offload == "disk" else None}
    known_rates = {place: rate for place, rate in rates.items() if rate is not None}
    slowest = min(known_rates, key=lambda place: known_rates[place])  # the two go on at the same time
    weights = offloaded_weights(profile, plan)
    read_seconds = plan.gradient_accumulation_steps * (OFFLOAD_PASSES * weights.layers - weights.buffers) / known_rates[slowest]
    return {f"weights from the {slowest}": max(read_seconds - compute_seconds, 0.0)}
