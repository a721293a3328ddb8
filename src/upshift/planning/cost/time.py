"""Predicted time of an optimizer step, term by term, from the profile's counts and the host's rates.

t = matrix products / rate + attention / its rate + moved bytes / bandwidth + kernels x dispatch + update + page faults +
gradient exchange (COSTS.md D4). Measured rates where the host was probed, else the datasheet's times the efficiency that
such parts reach. A trial corrects the sum; the terms stay what explains it.
"""

from __future__ import annotations

from dataclasses import dataclass

from upshift.hardware import gemm_efficiency, memory_efficiency
from upshift.hardware.spec import Host
from upshift.hardware.spec import Precision as MatrixPrecision
from upshift.models.profile import BLOCK_QUERIES, ModelProfile, StepTrace, labelled_share, num_sides
from upshift.planning.cost.memory import place_segments
from upshift.planning.cost.optimizer import (
    compile_seconds,
    trained_elements,
    trained_shapes,
    update_core_seconds,
    update_flops,
    update_words,
)
from upshift.planning.plan import Plan
from upshift.planning.workload import Workload

MATRIX_PRECISION: dict[str, MatrixPrecision] = {
    "fp32": "fp32", "tf32": "fp32_medium", "bf16": "bf16", "fp16": "fp16", "bf16-weights": "bf16", "fp8": "fp8",
}  # fmt: skip
# Measured with this library's trials on a 2-core Zen 4 (docs/log.md, 2026-11-20): flash attention on the CPU runs at this
# share of the fp32 matrix rate, in fp32 and bf16 alike.
CPU_ATTENTION_SHARE = 0.4
BLOCK_ATTENTION_SHARE = 0.9  # as above, of the products that it computes, softmax included
GPU_ATTENTION_SHARE = 0.6  # of the matrix rate; FlashAttention 2 against GEMM on A100, Dao 2023, figure 4
DISPATCHES_PER_KERNEL = 6.0  # autograd, autocast and module calls around each kernel, over one bare operator
GPU_DISPATCH_SECONDS = 6e-6  # queueing one kernel from Python, where not measured
COMPILED_MOVED_SHARE, COMPILED_KERNEL_SHARE = 0.5, 0.3  # what fusion leaves of memory traffic and of kernels
LAYER_COMPILE_SECONDS = 15.0  # one layer, compiled for all; measured (docs/log.md), as is the next
MODEL_COMPILE_SECONDS = 10.0  # the whole model, for each of its layers
DEFAULT_GEMM_EFFICIENCY, DEFAULT_MEMORY_EFFICIENCY = 0.7, 0.75  # for parts outside the fitted table (COSTS.md D7)
CLIP_WORDS = 2.0  # norm reads, scaling writes
UPDATE_IN_BACKWARD_DISPATCHES = 30.0  # Python and operators of one parameter's own step, over one bare operator (docs/log.md)
# What torchao does to each operand of a matrix product in bf16 before it: read it for its scale, read it again, write fp8.
# Counted from its source, never measured here.
FP8_CAST_SHARE, FP8_KERNELS = 2.5, 3.0
GIGABIT_BYTES = 5e9  # gradient exchange between processes of one host, through shared memory


@dataclass(frozen=True)
class Rates:
    """What one process of the plan has to itself."""

    matrix: float
    outside: float  # matrix products outside the layers, which stay in bf16 beside fp8 layers
    attention: float
    memory: float
    dispatch: float
    first_touch: float


@dataclass(frozen=True)
class StepTime:
    terms: dict[str, float]  # seconds of one optimizer step
    one_time: float

    @property
    def total(self) -> float:
        return sum(self.terms.values())

    @property
    def binding_term(self) -> str:
        return max(self.terms, key=lambda name: self.terms[name])


def rates_for(host: Host, plan: Plan, *, flops_per_gemm: float) -> Rates | None:
    """None where the host's rate in this precision is unknown: such a plan cannot be ranked."""
    measured, precision = host.measured, MATRIX_PRECISION[plan.precision]
    if plan.device == "cuda":
        return _gpu_rates(host, precision, flops_per_gemm)
    if measured is None or host.cpu is None:
        return None
    matrix, fp32 = measured.cpu.matrix(precision), measured.cpu.fp32
    memory = measured.cpu.memory_bytes_per_second
    if matrix is None or fp32 is None or memory is None:
        return None
    share = min(plan.threads_per_process / measured.num_threads, 1.0)
    return Rates(
        matrix=matrix * share,
        outside=matrix * share,
        attention=(BLOCK_ATTENTION_SHARE if plan.attention == "block" else CPU_ATTENTION_SHARE) * fp32 * share,
        memory=memory / plan.num_processes,
        dispatch=measured.dispatch_seconds * DISPATCHES_PER_KERNEL,
        first_touch=measured.first_touch_seconds_per_byte or 0.0,
    )


def _gpu_rates(host: Host, precision: MatrixPrecision, flops_per_gemm: float) -> Rates | None:
    gpu, measured = host.gpu, host.measured
    beside: MatrixPrecision = "bf16" if precision == "fp8" else precision
    if gpu is None:
        return None
    dispatch = measured.gpu_dispatch_seconds if measured and measured.gpu_dispatch_seconds else GPU_DISPATCH_SECONDS
    if measured is not None and measured.gpu is not None:
        matrix, memory = measured.gpu.matrix(precision), measured.gpu.memory_bytes_per_second
        outside = measured.gpu.matrix(beside)
    elif gpu.peak is not None:
        key = gpu.table_key or ""
        bandwidth = gpu.peak.memory_bytes_per_second
        share = gemm_efficiency(key, flops_per_gemm) or DEFAULT_GEMM_EFFICIENCY
        matrix, outside = (peak * share if peak else None for peak in (gpu.peak.matrix(precision), gpu.peak.matrix(beside)))
        memory = bandwidth * (memory_efficiency(key) or DEFAULT_MEMORY_EFFICIENCY) if bandwidth else None
    else:
        return None
    if matrix is None or outside is None or memory is None:
        return None
    return Rates(matrix, outside, GPU_ATTENTION_SHARE * outside, memory, dispatch, 0.0)


def host_link(host: Host) -> float | None:
    """Bytes per second between host and device, in one direction; None where unknown."""
    if host.measured is not None and host.measured.host_to_device_bytes_per_second is not None:
        return host.measured.host_to_device_bytes_per_second
    return host.host_to_device.bytes_per_second if host.host_to_device is not None else None


def micro_batch_terms(
    profile: ModelProfile, trace: StepTrace, plan: Plan, rates: Rates, *, link: float | None = None
) -> dict[str, float]:
    """Seconds of forward and backward of one full-length micro-batch. ``link``: bytes per second between host and device."""
    batch, sequence = plan.per_device_train_batch_size, plan.sequence_length
    matmul = outside = attention = moved = kernels = kept = offloaded = 0.0
    for item in place_segments(profile, trace, plan):
        in_fp8 = plan.precision == "fp8" and item.is_layer
        # In chunks only rows with a label are computed; what stands between the layers and the head is small beside it.
        count = item.count * (labelled_share(profile.objective) if item.is_loss and plan.loss_chunk_tokens else 1.0)
        for cost in (item.segment.forward, item.segment.backward_accumulating):
            if item.is_layer:
                matmul += count * cost.matmul_flops.at(batch, sequence)
            else:
                outside += count * cost.matmul_flops.at(batch, sequence)
            attention += count * cost.attention_flops.at(batch, sequence)
            moved += count * cost.moved_bytes.at(batch, sequence)
            kernels += item.count * cost.num_kernels * (FP8_KERNELS if in_fp8 else 1.0)
            if in_fp8:
                moved += item.count * cost.matmul_bytes.at(batch, sequence) * FP8_CAST_SHARE
        left = item.count * max(item.segment.forward.left.at(batch, sequence), 0.0)
        kept += left
        if plan.activation_offload and item.is_layer:
            offloaded += left
    if plan.torch_compile != "off":
        moved, kernels = moved * COMPILED_MOVED_SHARE, kernels * COMPILED_KERNEL_SHARE
    terms = {
        "matrix products": matmul / rates.matrix + outside / rates.outside,
        "attention": attention / rates.attention,
        "memory traffic": moved / rates.memory,
        "page faults": 0.0 if plan.host_memory == "keep" else kept * rates.first_touch,
    }
    if plan.device == "cuda":  # the host queues kernels while the device computes: only what is not hidden counts
        terms["dispatch"] = max(kernels * rates.dispatch - sum(terms.values()), 0.0)
    else:
        terms["dispatch"] = kernels * rates.dispatch
    if offloaded and link is not None:
        terms["activations to the host and back"] = 2.0 * offloaded / link
    return terms


def predict_time(profile: ModelProfile, trace: StepTrace, plan: Plan, workload: Workload, host: Host) -> StepTime | None:
    """Seconds of one optimizer step over the whole global batch; None where a rate is unknown."""
    tokens = plan.per_device_train_batch_size * plan.sequence_length
    flops_per_gemm = 2.0 * tokens * max(profile.hidden_size or 1, 1) ** 2
    rates = rates_for(host, plan, flops_per_gemm=flops_per_gemm)
    if rates is None:
        return None
    micro_batches = full_micro_batches(plan, workload)
    of_one = micro_batch_terms(profile, trace, plan, rates, link=host_link(host))
    terms = {name: seconds * micro_batches for name, seconds in of_one.items()}
    if plan.flattens and workload.lengths is not None:
        terms["attention"] *= workload.lengths.visible_share(BLOCK_QUERIES)
    update = _update_seconds(profile, plan, rates, host, clips=workload.clips_gradients)
    if update is None:
        return None
    terms["update"] = update
    if plan.num_processes > 1:
        terms["gradient exchange"] = 2.0 * profile.parameters.gradient_bytes(plan.parameter_bytes) / GIGABIT_BYTES
    compiling = {"off": 0.0, "layer": LAYER_COMPILE_SECONDS, "model": MODEL_COMPILE_SECONDS * max(profile.num_layers, 1)}
    return StepTime(terms=terms, one_time=compiling[plan.torch_compile] + compile_seconds(profile, plan))


def _update_seconds(profile: ModelProfile, plan: Plan, rates: Rates, host: Host, *, clips: bool) -> float | None:
    """Of the optimizer's step; None where it runs on a host whose memory was not measured."""
    elements = trained_elements(profile)
    size = float(profile.parameters.gradient_bytes(plan.parameter_bytes))
    moved, clipped = size * update_words(plan), size * CLIP_WORDS * clips
    if plan.optim_offload:
        link, memory = host_link(host), host.measured.cpu.memory_bytes_per_second if host.measured else None
        if link is None or memory is None:
            return None
        # A gradient goes to the host, a weight comes back.
        return clipped / rates.memory + 2.0 * size / link + moved / memory
    seconds = (moved + clipped) / rates.memory + update_flops(profile, plan) / rates.matrix
    seconds += elements * update_core_seconds(plan) / plan.threads_per_process
    if plan.optimizer_in_backward and plan.device == "cpu":
        num_tensors = sum(shape.count for shape in trained_shapes(profile))
        seconds += num_tensors * UPDATE_IN_BACKWARD_DISPATCHES * rates.dispatch / DISPATCHES_PER_KERNEL
    return seconds


def full_micro_batches(plan: Plan, workload: Workload) -> float:
    """How many full-length micro-batches a process computes in a step; a fraction where sequences are shorter."""
    sequences = workload.global_batch / plan.num_processes
    if workload.lengths is None:
        return sequences / plan.per_device_train_batch_size
    lengths, pad = workload.lengths, plan.pad_multiple
    full = plan.per_device_train_batch_size * lengths.sequence_length
    if plan.flattens:
        ratio = lengths.flat_tokens_ratio(
            plan.per_device_train_batch_size, global_batch=workload.global_batch, pad_multiple=pad, processes=plan.num_processes
        )
        return sequences * lengths.mean * ratio / full
    if plan.packing:
        rows = sequences * lengths.packed_rows_per_sequence(global_batch=workload.global_batch)
        return max(rows / plan.per_device_train_batch_size, 1.0)
    ratio = lengths.padded_tokens_ratio(plan.per_device_train_batch_size, global_batch=workload.global_batch, pad_multiple=pad)
    return sequences * lengths.mean * ratio / full


def largest_micro_batch(plan: Plan, workload: Workload) -> tuple[int, int]:
    """(rows, tokens a row). A flattened row is as long as the longest in a sample of the data, which may be short of full."""
    batch = plan.per_device_train_batch_size
    if not plan.flattens or workload.lengths is None:
        return batch, plan.sequence_length
    return 1, workload.lengths.longest_flat_row(batch, global_batch=workload.global_batch, processes=plan.num_processes)


def tokens_per_step(profile: ModelProfile, workload: Workload) -> float:
    """Real tokens of a global batch."""
    mean = workload.lengths.mean if workload.lengths else workload.sequence_length * num_sides(profile.objective)
    return workload.global_batch * mean
