"""Describe a plan and its predicted cost in words, so that the page needs no figure to be understood."""

from __future__ import annotations

from collections.abc import Mapping

from upshift.planning.cost.time import sample_unit
from upshift.planning.cost.uncertainty import Number
from upshift.planning.layout import Layout
from upshift.planning.plan import ALONE, HOW_RECOMPUTED, Plan
from upshift.planning.planner import Planning
from upshift.planning.search.ranking import Candidate, limit_of
from upshift.units import format_seconds, gib

SMALL_SHARE = 0.005  # of a step's time: smaller terms are not mentioned
SMALL_GIB = 0.0005
STAGES = {"optimizer": "ZeRO 1", "gradients": "ZeRO 2", "weights": "ZeRO 3"}
TIERS = {
    "formula": "from formulas and the host's rates; nothing was run",
    "transferred": "corrected by other runs on this machine",
    "calibrated": "corrected by a trial",
    "measured": "measured here",
}


def sentence(plan: Plan, num_layers: int) -> str:
    """Return the plan's choices, without a full stop."""
    ranks = "1 process" if plan.device == "cpu" else "1 device"
    if plan.num_processes > 1:
        ranks = f"{plan.num_processes:,} {'processes' if plan.device == 'cpu' else 'ranks'}"
    shared = f" ({layout_words(plan.layout)})" if plan.layout != ALONE else ""
    size = plan.per_device_train_batch_size
    sequences = f"{size:,} {'packed row' if plan.packing else 'sequence'}{'s' * (size != 1)}"
    parts = [
        f"{plan.precision} on {ranks}{shared}",
        f"micro-batches of {sequences}, {plan.gradient_accumulation_steps:,} to a step",
        f"{plan.activation_checkpointing} of {num_layers} layers recomputed"
        + (HOW_RECOMPUTED[plan.recompute_granularity] if plan.activation_checkpointing else ""),
        f"{plan.attention} attention",
        {"off": "not compiled", "layer": "compiled by layer", "model": "compiled whole"}[plan.torch_compile],
        "fused kernels" * plan.fused_kernels,
        f"{plan.loss_kernel} loss" if plan.loss_kernel != "eager" else "",
        "the loss in chunks" if plan.loss_chunk_tokens else "",
        f"weights on the {plan.weight_offload}" if plan.weight_offload != "none" else "",
        "activations on the host" if plan.activation_offload else "",
        "updates rounded to the nearest" * plan.rounds_to_nearest,
        plan.optim + (" in the backward pass" if plan.optimizer_in_backward else "") + (" on the host" * plan.optim_offload),
    ]
    return ", ".join(part for part in parts if part)


def layout_words(layout: Layout) -> str:
    words = [f"{STAGES[layout.fully_shard]} over {layout.shard_size:,}"] if layout.fully_shard != "no" else []
    words += ["fp32 master weights"] * layout.master_weights + ["gradients in bf16"] * layout.bf16_gradients
    if layout.tensor_parallel > 1:
        words.append(f"tensor parallel {layout.tensor_parallel}{' with sequence parallel' * layout.sequence_parallel}")
        words += ["inputs gathered again"] * layout.gather_again + ["vocabulary parallel"] * layout.vocabulary_parallel
    if layout.context_parallel > 1:
        words.append(f"context parallel {layout.context_parallel} ({layout.context_kind})")
    if layout.pipeline_parallel > 1:
        stages = f", {layout.virtual_stages} stages a rank" if layout.virtual_stages > 1 else ""
        words.append(f"pipeline parallel {layout.pipeline_parallel} ({layout.pipeline_schedule}{stages})")
    if layout.expert_parallel > 1:
        words.append(f"expert parallel {layout.expert_parallel}")
    words += ["no exchange while computing"] * (not layout.overlap)
    return ", ".join(words)


def layout_kind(layout: Layout) -> str:
    """Return which kinds of parallelism a layout combines, whatever their degrees."""
    degrees = {
        "tensor": layout.tensor_parallel,
        "context": layout.context_parallel,
        "pipeline": layout.pipeline_parallel,
        "expert": layout.expert_parallel,
    }
    names = [name for name, degree in degrees.items() if degree > 1]
    if names:
        return f"{' + '.join(names)} parallel"
    return "fully sharded" if layout.fully_shard != "no" else "data parallel"


def memory_owner(plan: Plan) -> str:
    return "process" if plan.device == "cpu" else "device"


def held_gib(candidate: Candidate) -> float:
    """Return the GiB held on each device, or by all processes together where they share the host's memory."""
    return gib(candidate.resident) * (candidate.plan.num_processes if candidate.plan.device == "cpu" else 1)


def limit_of_candidate(planning: Planning, candidate: Candidate) -> float | None:
    """Return the GiB that one process or device of a plan may be predicted to hold."""
    limit = limit_of(candidate, planning.host, planning.workload)
    return None if limit is None else gib(limit)


def limit_gib(planning: Planning) -> float | None:
    """Return the GiB that may be held on each device, or by all processes together where they share the host's memory."""
    plan = planning.best
    limit = limit_of_candidate(planning, planning.ranking.candidates[0])
    return None if limit is None else limit * (plan.num_processes if plan.device == "cpu" else 1)


def memory_words(memory: Mapping[str, float], *, at_most: int | None = None) -> str:
    """Return the parts of one phase, the largest first."""
    largest_first = sorted(memory.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {size:.2f}" for name, size in largest_first[:at_most] if f"{size:.2f}" != "0.00")


def memory_by_phase(planning: Planning, candidate: Candidate) -> dict[str, dict[str, float]]:
    """Return GiB by phase and part, for every phase of the job that is predicted."""
    return planning.numbers(candidate).memory


def parts_of(memory: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the parts that take memory in any phase."""
    return list(dict.fromkeys(name for row in memory.values() for name, size in row.items() if size > SMALL_GIB))


def time_words(candidate: Candidate, *, at_most: int | None = None) -> str:
    """Return the terms of a step, the longest first."""
    total = candidate.time.total
    terms = sorted(candidate.time.terms.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in terms[:at_most] if seconds > SMALL_SHARE * total)


def basis_words(candidate: Candidate) -> str:
    """Return the tier of each predicted number, and the range of measured / predicted that is expected."""
    ranges = []
    numbers: tuple[Number, ...] = ("step", "allocated", "held")
    for name in numbers:
        basis = candidate.basis(name)
        low, high = basis.interval or (1.0, 1.0)
        tier = "measured here" if basis.tier == "measured" else basis.tier
        ranges.append(f"{name}: {tier}, {low:.2f} to {high:.2f} \N{MULTIPLICATION SIGN}")
    return "; ".join(ranges)


def speed_words(planning: Planning) -> str:
    return f"{sample_unit(planning.profile)} per second"


def cost_words(planning: Planning, candidate: Candidate) -> str:
    """Return speed, step and memory of a plan as one sentence."""
    return (
        f"{candidate.tokens_per_second:,.0f} {speed_words(planning)}, {format_seconds(candidate.time.total)} a step, "
        f"{gib(candidate.memory.peak):.2f} GiB allocated at most (in the {candidate.memory.peak_phase} phase), "
        f"{gib(candidate.resident):.2f} GiB held by each {memory_owner(candidate.plan)}"
    )


def full_memory_words(planning: Planning, candidate: Candidate) -> str:
    """Return every phase with its parts, as the bars show them."""
    rows = memory_by_phase(planning, candidate).items()
    return "; ".join(f"{phase}: {sum(row.values()):.2f} GiB ({memory_words(row) or 'nothing large'})" for phase, row in rows)
