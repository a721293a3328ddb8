"""Costs every plan of the space, drops what does not fit, sorts the rest, and keeps the reason of every rejection."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from upshift.hardware.spec import Host
from upshift.models.profile import ModelProfile
from upshift.planning.cost.memory import StepMemory, predict_memory, trace_for
from upshift.planning.cost.resident import memory_limit, predict_resident
from upshift.planning.cost.time import StepTime, largest_micro_batch, predict_time, tokens_per_step
from upshift.planning.plan import Plan
from upshift.planning.workload import Workload
from upshift.record import Numbers, Spread
from upshift.units import format_bytes, gib

FORMULA_INTERVAL = (0.6, 1.6)  # measured over predicted step time, before any trial (docs/accuracy.md)
COST_KEY = (
    "precision", "per_device_train_batch_size", "gradient_accumulation_steps", "activation_checkpointing", "attention",
    "torch_compile", "optim", "loss_chunk_tokens", "packing", "num_processes", "host_memory", "threads_per_process",
    "optim_args", "optimizer_in_backward", "optim_offload", "activation_offload",
)  # fmt: skip


@dataclass(frozen=True)
class Candidate:
    """A plan with its predicted costs."""

    plan: Plan
    memory: StepMemory
    resident: float
    time: StepTime
    tokens_per_second: float
    tier: str = "formula"

    def numbers(self, *, model_flops_per_step: float) -> Numbers:
        step_ms = 1000 * self.time.total
        return Numbers(
            peak_gib=gib(self.memory.peak),
            resident_gib=gib(self.resident),
            step_ms=Spread(p20=step_ms, p50=step_ms, p80=step_ms),
            tokens_per_second=self.tokens_per_second,
            memory={name: {part: gib(size) for part, size in peak.parts.items()} for name, peak in self.memory.phases.items()},
            binding_term=self.time.binding_term,
            model_flops_per_second=model_flops_per_step / self.time.total,
            one_time_seconds=self.time.one_time,
            tier="formula",
            interval=FORMULA_INTERVAL,
        )


@dataclass(frozen=True)
class Rejected:
    plan: Plan
    reason: str


@dataclass
class Ranking:
    """Best first. ``too_big`` keeps what did not fit, smallest first, for the nearest plan that would."""

    candidates: list[Candidate] = field(default_factory=list)
    too_big: list[Candidate] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)


def rank_plans(plans: Iterable[Plan], *, host: Host, profile: ModelProfile, workload: Workload) -> Ranking:
    ranking = Ranking()
    memories: dict[Any, StepMemory] = {}
    for plan in plans:
        candidate = _cost(plan, host, profile, workload, memories)
        if isinstance(candidate, Rejected):
            ranking.rejected.append(candidate)
            continue
        limit = memory_limit(plan, host)
        if limit is not None and candidate.resident > limit:
            ranking.too_big.append(candidate)
            ranking.rejected.append(Rejected(plan, _too_big(candidate, limit)))
        else:
            ranking.candidates.append(candidate)
    ranking.candidates.sort(key=lambda c: (-c.tokens_per_second, c.memory.peak))
    ranking.too_big.sort(key=lambda c: c.resident)
    return ranking


def cost_plan(
    plan: Plan, *, host: Host, profile: ModelProfile, workload: Workload, shape: tuple[int, int] | None = None
) -> Candidate | Rejected:
    """One plan's predicted memory and time, whether it fits or not; memory for micro-batches of at most ``shape``."""
    return _cost(plan, host, profile, workload, {}, shape)


def _cost(
    plan: Plan,
    host: Host,
    profile: ModelProfile,
    workload: Workload,
    memories: dict[Any, StepMemory],
    shape: tuple[int, int] | None = None,
) -> Candidate | Rejected:
    trace = trace_for(profile, plan, workload)
    if trace is None:
        return Rejected(plan, f"{plan.attention} attention in {plan.precision} was not traced for this model")
    key = (
        trace.precision, trace.attention, trace.masked, plan.per_device_train_batch_size, plan.gradient_accumulation_steps > 1,
        plan.activation_checkpointing, plan.loss_chunk_tokens, plan.optim, plan.packing, plan.flattens and plan.num_processes,
        plan.optimizer_in_backward,
    )  # fmt: skip
    if key not in memories:
        memories[key] = predict_memory(profile, trace, plan, shape=shape or largest_micro_batch(plan, workload))
    memory = memories[key]
    time = predict_time(profile, trace, plan, workload, host)
    if time is None:
        return Rejected(plan, f"this host's rate in {plan.precision} is unknown")
    amortised = time.total + time.one_time / workload.total_steps
    return Candidate(plan, memory, predict_resident(memory, plan, host), time, tokens_per_step(profile, workload) / amortised)


def _too_big(candidate: Candidate, limit: float) -> str:
    return (
        f"needs {format_bytes(candidate.resident)} of the {format_bytes(limit)} that a process may use "
        f"(highest in the {candidate.memory.peak_phase} phase)"
    )
