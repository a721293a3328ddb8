"""Predict the time of an optimizer step, term by term, from the profile's counts and the host's rates.

t = matrix products / rate + attention / its rate + moved bytes / bandwidth + kernels x dispatch + update + page faults +
gradient exchange (COSTS.md D4). Rates are measured where the host was probed, else the datasheet's times the efficiency that
such parts reach. A trial corrects the sum. The terms still explain it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from typing import Literal

from upshift.hardware import AttentionKernel
from upshift.hardware.spec import Host
from upshift.models.profile import BLOCK_QUERIES, ModelProfile, StepTrace, labelled_share, num_sides
from upshift.planning.cost.communication import ComputeSeconds, ExchangeCost, RowShares
from upshift.planning.cost.memo import Memo
from upshift.planning.cost.network import Group, collective_seconds
from upshift.planning.cost.optimizer import (
    compile_seconds,
    trained_elements,
    trained_shapes,
    update_core_seconds,
    update_flops,
    update_words,
)
from upshift.planning.cost.partition import Stage, deciding_shares
from upshift.planning.cost.pipeline_schedule import idle_micro_batches
from upshift.planning.cost.rates import DISPATCHES_PER_KERNEL, Rates, host_link, offload_wait_seconds, predict_rates
from upshift.planning.cost.segments import micro_batch_key, place_segments
from upshift.planning.plan import ALONE, Plan
from upshift.planning.search.constraints import PACKED_KERNELS
from upshift.planning.workload import Workload

SampleUnit = Literal["tokens", "images"]
# What fusion leaves of memory traffic, and of the number of kernels.
COMPILED_MOVED_SHARE = 0.5
COMPILED_KERNEL_SHARE = 0.3
LAYER_COMPILE_SECONDS = 15.0  # one layer, compiled once for all equal ones; measured (docs/log.md), as is the next
MODEL_COMPILE_SECONDS = 10.0  # the whole model, for each of its layers
CLIP_WORDS = 2.0  # norm reads, scaling writes
# Python and operators of one parameter's own step, over one bare operator (docs/log.md).
DISPATCHES_PER_UPDATE_IN_BACKWARD = 30.0
# torchao reads an operand of a matrix product in bf16 for its scale, reads it again and writes fp8: 2.5 words. Of the nine
# tensors of a weight's three products five are operands to cast: the weight and the input in each pass, the output's gradient.
# Transformer Engine scales by what it saw before and writes fp8 and its transpose at once: 2 words. It casts the output's
# gradient and the input. The norm before two of four matrices writes fp8 itself, so that only the transpose is left there.
# Weights are cast once in a step. Counted from sources, never measured here.
FP8_CAST_SHARE = 2.5 * 5 / 9
FUSED_FP8_CAST_SHARE = 2.0 * 1.6 / 9
FP8_KERNELS = 3.0
# Python and operators of one unit of fully_shard (a layer, or what is outside the layers) in a micro-batch: hooks, copies, gather
# and reduction. Measured on a Zen 4 core with one process of torch 2.13 and nine matrices a unit: 0.8 to 1.3 ms, beside 0.2 ms of
# the matrices' own operators. Processes on CPUs wait for each gather, whose measured time counts this work.
FULLY_SHARD_UNIT_SECONDS = 1.1e-3
# Every rank waits for the slowest, so a step is longer by this share for each doubling of the nodes. Fitted on LLM Foundry's
# MPT of 125M, 760M, 3B, 13B and 70B on 1 to 16 nodes (docs/log.md).
WAITING_SHARE = 0.01


@dataclass(frozen=True)
class StepTime:
    """The seconds of one optimizer step, by term, and those that are spent once before the first step."""

    terms: dict[str, float]
    one_time: float

    @property
    def total(self) -> float:
        return sum(self.terms.values())

    @property
    def binding_term(self) -> str:
        return max(self.terms, key=lambda name: self.terms[name])


def micro_batch_terms(
    profile: ModelProfile,
    trace: StepTrace,
    plan: Plan,
    rates: Rates,
    *,
    link: float | None = None,
    stage: Stage | None = None,
    memo: Memo | None = None,
    head_alone: bool = False,
    forward_alone: bool = False,
) -> dict[str, float]:
    """Return the seconds of forward and backward of one full-length micro-batch on a rank of ``stage``, by term.

    ``link``: bytes per second between host and device. ``head_alone``: count only what comes after the layers.
    ``forward_alone``: count a forward pass that saves nothing for a backward pass.
    """
    ranks = plan.layout.context_parallel
    batch = plan.per_device_train_batch_size
    sequence = -(-plan.sequence_length // ranks)
    cast = FUSED_FP8_CAST_SHARE if plan.fused_kernels else FP8_CAST_SHARE
    matmul = matmul_outside = attention = moved = kernels = activation_bytes = offloaded_bytes = 0.0
    placed = place_segments(profile, trace, plan, stage, memo=memo)
    if head_alone:
        placed = [item for item in placed if item.is_loss]
    for item in placed:
        is_fp8 = plan.precision == "fp8" and item.is_layer
        # In chunks only rows with a label are computed. The operators between the layers and the head are small beside it.
        count = item.count * (labelled_share(profile.objective) if item.is_loss and plan.loss_chunk_tokens else 1.0)
        for cost in (item.segment.forward, item.segment.backward_accumulating)[: 1 if forward_alone else 2]:
            products = count * cost.matmul_flops.at(batch, sequence)
            if item.is_layer:
                matmul += products
            else:
                matmul_outside += products
            attention += count * cost.attention_flops.at(batch, plan.sequence_length) / ranks  # each query sees all keys
            moved += count * cost.moved_bytes.at(batch, sequence)
            kernels += item.count * cost.num_kernels * (FP8_KERNELS if is_fp8 else 1.0)
            if is_fp8:
                moved += item.count * cost.matmul_bytes.at(batch, sequence) * cast
        saved = 0.0 if forward_alone else item.count * max(item.segment.forward.left.at(batch, sequence), 0.0)
        activation_bytes += saved
        if plan.activation_offload and item.is_layer:
            offloaded_bytes += saved
    if plan.torch_compile != "off" or plan.fused_kernels:
        kernels *= COMPILED_KERNEL_SHARE
    if plan.torch_compile != "off":  # fused_trace counts what fused kernels move
        moved *= COMPILED_MOVED_SHARE
    terms = {
        "matrix products": matmul / rates.matrix + matmul_outside / rates.outside,
        "attention": attention / rates.attention,
        "memory traffic": moved / rates.memory,
        "page faults": 0.0 if plan.host_memory == "keep" else activation_bytes * rates.first_touch,
    }
    compute_seconds = sum(terms.values()) if plan.device == "cuda" else 0.0  # the host queues kernels while the device computes
    host_seconds = kernels * rates.dispatch + _fully_shard_seconds(plan, sum(item.count for item in placed if item.is_layer))
    terms["dispatch"] = max(host_seconds - compute_seconds, 0.0)
    if offloaded_bytes and link is not None:
        terms["activations to the host and back"] = 2.0 * offloaded_bytes / link
    return terms


def _fully_shard_seconds(plan: Plan, num_layers: float) -> float:
    """Return for how many seconds of a micro-batch a GPU's host runs fully_shard."""
    return (num_layers + 1.0) * FULLY_SHARD_UNIT_SECONDS if plan.layout.gathers and plan.device == "cuda" else 0.0


def predict_time(
    profile: ModelProfile,
    trace: StepTrace,
    plan: Plan,
    workload: Workload,
    host: Host,
    *,
    kernel: AttentionKernel | None = None,
    memo: Memo | None = None,
) -> StepTime | None:
    """Return the seconds of one optimizer step over the whole global batch; None where a rate is unknown. Raises UnknownLink.

    ``kernel``: of attention, in another program.
    """
    memo = memo or Memo()
    key = (
        "rates",
        plan.precision,
        plan.attention,
        plan.threads_per_process,
        plan.num_processes,
        plan.per_device_train_batch_size,
        plan.sequence_length,
        plan.layout.tensor_parallel,
        plan.layout.context_parallel,
    )
    rates = memo.get_or_compute(key, lambda: predict_rates(host, profile, plan, kernel=kernel))
    if rates is None:
        return None
    if plan.device != "cpu" or plan.layout != ALONE or host.num_nodes > 1:
        return _slowest_rank_time(profile, trace, plan, workload, host, rates, memo)
    num_micro_batches = num_full_micro_batches(plan, workload)
    one_micro_batch = micro_batch_terms(profile, trace, plan, rates, link=host_link(host))
    if workload.forward_passes:
        forward = micro_batch_terms(profile, trace, plan, rates, forward_alone=True)
        one_micro_batch = _sum_of_terms(one_micro_batch, forward)
    terms = {name: seconds * num_micro_batches for name, seconds in one_micro_batch.items()}
    terms |= offload_wait_seconds(profile, plan, host, sum(terms.values()))
    if plan.flattens and workload.lengths is not None:
        terms["attention"] *= workload.lengths.visible_share(BLOCK_QUERIES)
    update = _update_seconds(profile, plan, rates, host, clips=workload.clips_gradients)
    if update is None:
        return None
    terms["update"] = update
    if plan.num_processes > 1:
        gradients = float(profile.parameters.gradient_bytes(plan.parameter_bytes))
        group = Group(plan.num_processes, 1, plan.num_processes)
        terms["gradient exchange"] = collective_seconds(host, "all_reduce", gradients, group) or 0.0
    return StepTime(terms=terms, one_time=_compiling_seconds(profile, plan))


def _slowest_rank_time(
    profile: ModelProfile,
    trace: StepTrace,
    plan: Plan,
    workload: Workload,
    host: Host,
    rates: Rates,
    memo: Memo,
) -> StepTime | None:
    """Return the time of the slowest rank: its computation, exchanges that are not hidden, and the pipeline's idle time."""
    num_micro_batches = num_full_micro_batches(plan, workload)
    rows = RowShares(workload.trained_share, workload.trained_share * workload.forward_passes)
    slowest = None
    key = ("update", plan.optim, plan.optim_args, plan.precision, plan.optim_offload, rates)
    update = memo.get_or_compute(key, lambda: _update_seconds(profile, plan, rates, host, clips=workload.clips_gradients))
    if update is None:
        return None
    for stage, share in deciding_shares(profile, plan, memo):
        one_micro_batch = _cached_micro_batch_terms(profile, trace, plan, host, rates, stage, memo)
        forward: dict[str, float] = {}
        if workload.forward_passes:
            forward = micro_batch_terms(profile, trace, plan, rates, stage=stage, memo=memo, forward_alone=True)
            one_micro_batch = _sum_of_terms(one_micro_batch, forward)
        terms = {name: seconds * num_micro_batches for name, seconds in one_micro_batch.items()}
        if plan.packing and plan.attention in PACKED_KERNELS and workload.lengths is not None:
            terms["attention"] *= min(2.0 * workload.lengths.visible_share(BLOCK_QUERIES), 1.0)  # the trace counts half of all
        compute = ComputeSeconds(  # of the rows that are trained, and as many with a forward pass alone, if there are such passes
            total=rows.trained * sum(one_micro_batch.values()),
            attention=rows.trained * one_micro_batch["attention"],
            forward=rows.trained * sum(forward.values()),
        )
        terms |= offload_wait_seconds(profile, plan, host, sum(terms.values()))
        terms["update"] = update * share.updated
        if plan.layout.pipeline_parallel > 1:
            terms["pipeline idle"] = compute.total * idle_micro_batches(plan)
        if plan.num_processes > 1:
            terms |= ExchangeCost(host, profile, plan, stage, compute, memo, rows).seconds()
        nodes = max(plan.num_processes / host.ranks_per_node(plan.num_processes), 1.0)
        if nodes > 1.0:
            terms["waiting for the slowest node"] = WAITING_SHARE * log2(nodes) * sum(terms.values())
        if slowest is None or sum(terms.values()) > sum(slowest.values()):
            slowest = terms
    return StepTime(terms=slowest or {}, one_time=_compiling_seconds(profile, plan))


def _cached_micro_batch_terms(
    profile: ModelProfile, trace: StepTrace, plan: Plan, host: Host, rates: Rates, stage: Stage, memo: Memo
) -> dict[str, float]:
    key = ("micro-batch", micro_batch_key(trace, plan, stage), plan.torch_compile, plan.host_memory, plan.num_processes)
    return memo.get_or_compute(
        key, lambda: micro_batch_terms(profile, trace, plan, rates, link=host_link(host), stage=stage, memo=memo)
    )


def _sum_of_terms(terms: dict[str, float], others: dict[str, float]) -> dict[str, float]:
    return {name: seconds + others.get(name, 0.0) for name, seconds in terms.items()}


def _compiling_seconds(profile: ModelProfile, plan: Plan) -> float:
    compiling = {"off": 0.0, "layer": LAYER_COMPILE_SECONDS, "model": MODEL_COMPILE_SECONDS * max(profile.num_layers, 1)}
    return compiling[plan.torch_compile] + compile_seconds(profile, plan)


def _update_seconds(profile: ModelProfile, plan: Plan, rates: Rates, host: Host, *, clips: bool) -> float | None:
    """Return the seconds of the optimizer's update; None where it runs on a host whose memory or link was not measured."""
    elements = trained_elements(profile)
    gradient_bytes = float(profile.parameters.gradient_bytes(plan.parameter_bytes))
    moved_bytes = gradient_bytes * update_words(plan)
    clip_bytes = gradient_bytes * CLIP_WORDS * clips
    if plan.optim_offload:
        link = host_link(host)
        host_memory_rate = host.measured.cpu.memory_bytes_per_second if host.measured else None
        if link is None or host_memory_rate is None:
            return None
        # A gradient goes to the host, and a weight comes back.
        return clip_bytes / rates.stream + 2.0 * gradient_bytes / link + moved_bytes / host_memory_rate
    seconds = (moved_bytes + clip_bytes) / rates.stream + update_flops(profile, plan) / rates.matrix
    seconds += elements * update_core_seconds(plan) / plan.threads_per_process
    if plan.optimizer_in_backward and plan.device == "cpu":
        num_tensors = sum(shape.count for shape in trained_shapes(profile))
        seconds += num_tensors * DISPATCHES_PER_UPDATE_IN_BACKWARD * rates.dispatch / DISPATCHES_PER_KERNEL
    return seconds


def num_full_micro_batches(plan: Plan, workload: Workload) -> float:
    """Return how many full-length micro-batches a process trains in a step; a fraction where sequences are shorter."""
    sequences = workload.num_trained / plan.data_parallel
    if workload.lengths is None:
        return sequences / plan.per_device_train_batch_size
    lengths = workload.lengths
    pad_multiple = plan.pad_multiple
    full_tokens = plan.per_device_train_batch_size * lengths.sequence_length
    if plan.flattens:
        ratio = lengths.flat_tokens_ratio(
            plan.per_device_train_batch_size,
            global_batch=workload.global_batch,
            pad_multiple=pad_multiple,
            processes=plan.data_parallel,
        )
        return sequences * lengths.mean * ratio / full_tokens
    if plan.packing:
        rows = sequences * lengths.packed_rows_per_sequence(global_batch=workload.global_batch)
        return max(rows / plan.per_device_train_batch_size, 1.0)
    ratio = lengths.padded_tokens_ratio(
        plan.per_device_train_batch_size, global_batch=workload.global_batch, pad_multiple=pad_multiple
    )
    return sequences * lengths.mean * ratio / full_tokens


def num_widths(plan: Plan, workload: Workload) -> int:
    """Return how many widths the micro-batches of a run have, in a sample of its data."""
    if workload.lengths is None or (plan.packing and not plan.flattens):
        return 1
    size = plan.per_device_train_batch_size
    if not plan.flattens:
        return workload.lengths.num_padded_widths(size, global_batch=workload.global_batch, pad_multiple=plan.pad_multiple)
    return workload.lengths.num_flat_widths(
        size, global_batch=workload.global_batch, pad_multiple=plan.pad_multiple, processes=plan.data_parallel
    )


def largest_micro_batch(plan: Plan, workload: Workload) -> tuple[int, int]:
    """Return (rows, tokens a row) of the largest micro-batch. Rows that have only a forward pass are computed before, apart.

    A flattened row is as long as the longest in a sample of the data, which may be shorter than a full one.
    """
    batch = plan.per_device_train_batch_size // (2 if workload.has_ratings else 1)
    if not plan.flattens or workload.lengths is None:
        return batch, plan.sequence_length
    return 1, workload.lengths.longest_flat_row(batch, global_batch=workload.global_batch, processes=plan.data_parallel)


def sample_unit(profile: ModelProfile) -> SampleUnit:
    """Return the unit of what the model reads, in which its speed is given."""
    return "images" if profile.objective == "image-classification" else "tokens"


def tokens_per_step(profile: ModelProfile, workload: Workload) -> float:
    """Return the number of real tokens of a global batch; an image counts as one."""
    if sample_unit(profile) == "images":
        return workload.global_batch
    mean = workload.lengths.mean if workload.lengths else workload.sequence_length * num_sides(profile.objective)
    return workload.global_batch * mean
