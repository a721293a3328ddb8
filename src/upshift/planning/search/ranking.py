"""Cost every plan of the space, drop what does not fit, sort the rest, and keep the reason of every rejection."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from upshift.hardware import AttentionKernel
from upshift.hardware.spec import Host
from upshift.models.profile import ModelProfile, StepTrace
from upshift.planning.cost.communication import UnknownLink, link_advice
from upshift.planning.cost.memo import Memo
from upshift.planning.cost.memory import (
    Peak,
    StepMemory,
    has_earlier_gradients,
    micro_batch_memory,
    predict_memory,
    step_memory,
    with_libraries,
)
from upshift.planning.cost.partition import deciding_shares
from upshift.planning.cost.process_memory import (
    library_bytes,
    memory_limit,
    out_of_memory_probability,
    predict_reserved,
    predict_resident,
)
from upshift.planning.cost.rates import NO_RATE_ADVICE, predict_rates
from upshift.planning.cost.segments import micro_batch_key, plan_trace
from upshift.planning.cost.time import StepTime, largest_micro_batch, num_widths, predict_time, tokens_per_step
from upshift.planning.cost.uncertainty import Number, estimated_bases, formula_basis, held_memory_spread, step_interval
from upshift.planning.plan import Plan
from upshift.planning.search.constraints import why_not_isolated
from upshift.planning.workload import Workload
from upshift.record import Basis, Numbers, Spread
from upshift.units import GIB, format_bytes, gib

STEP_FITS_PREFIX = "its step fits,"  # the reason of a plan that is rejected for another phase begins with this
EXTRA_MEMORY_BYTES = 8 * GIB  # plans that would fit with this much more memory are kept
COST_KEY = (
    "precision", "per_device_train_batch_size", "gradient_accumulation_steps", "activation_checkpointing",
    "recompute_granularity", "attention", "torch_compile", "optim", "loss_chunk_tokens", "packing", "num_processes",
    "layout", "host_memory", "threads_per_process", "optim_args", "optimizer_in_backward", "optim_offload", "activation_offload",
    "fused_kernels", "loss_kernel", "rounding", "weight_offload",
)  # fmt: skip


@dataclass(frozen=True)
class Candidate:
    """A plan with its predicted costs."""

    plan: Plan
    memory: StepMemory
    resident: float
    time: StepTime
    tokens_per_second: float
    bases: dict[Number, Basis] = field(default_factory=dict)  # how sure the numbers are; default: by formula

    def basis(self, number: Number) -> Basis:
        """Return how sure a number of the candidate is."""
        return self.bases.get(number) or formula_basis(number, self.plan)

    def numbers(self, *, model_flops_per_step: float, phases: dict[str, Peak] | None = None, host: Host | None = None) -> Numbers:
        """Return the predicted numbers.

        ``phases``: the phases of the whole job. None means those of a step. ``host``: with whose memory the plan's is compared.
        """
        step_ms = 1000 * self.time.total
        peaks = phases or self.memory.phases
        step_basis = self.basis("step")
        held_basis = self.basis("held")
        probability = None
        if host is not None:
            spread = held_memory_spread(held_basis)
            probability = out_of_memory_probability(self.resident, self.plan, host, spread=spread)
        return Numbers(
            peak_gib=gib(self.memory.peak),
            reserved_gib=gib(predict_reserved(self.memory)) if self.plan.device == "cuda" else None,
            resident_gib=gib(self.resident),
            out_of_memory_probability=probability,
            step_ms=Spread(p20=step_ms, p50=step_ms, p80=step_ms),
            tokens_per_second=self.tokens_per_second,
            memory={name: {part: gib(size) for part, size in peak.parts.items()} for name, peak in peaks.items()},
            binding_term=self.time.binding_term,
            model_flops_per_second=model_flops_per_step / self.time.total,
            one_time_seconds=self.time.one_time,
            tier=step_basis.tier,
            interval=step_basis.interval,
            num_records=step_basis.num_records,
            peak_basis=self.basis("allocated"),
            resident_basis=held_basis,
        )


def limit_of(candidate: Candidate, host: Host, workload: Workload) -> float | None:
    """Return the bytes that one process of the candidate may be predicted to hold; None where the host's memory is unknown.

    They follow from the risk that the workload accepts and from how sure the candidate's held memory is.
    """
    return memory_limit(candidate.plan, host, risk=workload.risk, spread=held_memory_spread(candidate.basis("held")))


@dataclass(frozen=True)
class Rejected:
    """A plan that cannot run, and why."""

    plan: Plan
    reason: str


@dataclass(frozen=True)
class TooBig:
    """A plan that is too big. Only its memory was predicted."""

    plan: Plan
    memory: StepMemory
    resident: float
    limit: float

    @property
    def reason(self) -> str:
        return (
            f"needs {format_bytes(self.resident)} of the {format_bytes(self.limit)} that a process may use "
            f"(highest in the {self.memory.peak_phase} phase)"
        )


@dataclass
class Ranking:
    """The plans of a space, best first.

    ``too_big`` has plans that do not fit, smallest first: those that would fit with a little more memory, or else the smallest
    one. ``num_unseen``: the number of plans that need more memory than one that is far too big.
    """

    candidates: list[Candidate] = field(default_factory=list)
    too_big: list[Candidate] = field(default_factory=list)
    rejected: list[Rejected | TooBig] = field(default_factory=list)
    num_unseen: int = 0

    @property
    def num_rejected(self) -> int:
        return len(self.rejected) + self.num_unseen

    @property
    def phase_problem(self) -> str | None:
        """Return why the best plan whose step fits does not fit in another phase; None where there is no such plan."""
        return next((entry.reason for entry in self.rejected if STEP_FITS_PREFIX in entry.reason), None)

    def add(self, plan: Plan, coster: Coster) -> bool:
        """Predict the costs of a plan and add it to the ranking.

        Return False where the plan is far too big. Its time is then not predicted.
        """
        limit = coster.limit(plan)
        estimate = coster.estimate_memory(plan)
        if isinstance(estimate, Rejected):
            self.rejected.append(estimate)
            return True
        if limit is not None and estimate.resident > limit + EXTRA_MEMORY_BYTES:
            self.rejected.append(TooBig(plan, estimate.memory, estimate.resident, limit))
            return False
        candidate = coster.estimate_time(plan, estimate)
        if isinstance(candidate, Rejected):
            self.rejected.append(candidate)
        elif limit is not None and estimate.resident > limit:
            self.too_big.append(candidate)
            self.rejected.append(TooBig(plan, estimate.memory, estimate.resident, limit))
        else:
            self.candidates.append(candidate)
        return True

    def sort(self, coster: Coster) -> None:
        """Sort the plans. If none is nearly small enough, add the smallest one that is too big."""
        self.candidates.sort(key=lambda candidate: (-candidate.tokens_per_second, candidate.memory.peak))
        if not self.too_big:
            too_big = [entry for entry in self.rejected if isinstance(entry, TooBig)]
            if too_big:
                smallest = coster.cost(min(too_big, key=lambda entry: entry.resident).plan)
                if isinstance(smallest, Candidate):
                    self.too_big.append(smallest)
        self.too_big.sort(key=lambda candidate: candidate.resident)


def rank_plans(plans: Iterable[Plan], *, host: Host, profile: ModelProfile, workload: Workload) -> Ranking:
    """Predict the costs of the plans and rank them."""
    ranking = Ranking()
    coster = Coster(host, profile, workload)
    for plan in plans:
        ranking.add(plan, coster)
    ranking.sort(coster)
    return ranking


def cost_plan(
    plan: Plan, *, host: Host, profile: ModelProfile, workload: Workload, shape: tuple[int, int] | None = None
) -> Candidate | Rejected:
    """Return one plan's predicted memory and time, whether it fits or not; memory for micro-batches of at most ``shape``."""
    return Coster(host, profile, workload).cost(plan, shape)


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory that a process of a plan holds, and the trace that the prediction follows."""

    trace: StepTrace
    memory: StepMemory
    resident: float


class Coster:
    """Predicts the costs of plans for one host, model and workload.

    It computes once what plans have in common: the traces of ranks that share layers, and the memory and time of one
    micro-batch. ``kernel``: of attention, in another program.
    """

    def __init__(self, host: Host, profile: ModelProfile, workload: Workload, *, kernel: AttentionKernel | None = None) -> None:
        self.host = host
        self._kernel = kernel or workload.runs_in.kernel_on(host)
        self.profile = profile
        self.workload = workload
        self._memo = Memo()
        self._tokens = tokens_per_step(profile, workload)
        self._step_bases = {
            exchanges: Basis(tier="formula", interval=step_interval(workload.program, host, exchanges=exchanges))
            for exchanges in (False, True)
        }

    def cost(self, plan: Plan, shape: tuple[int, int] | None = None) -> Candidate | Rejected:
        """Return the predicted memory and time of a plan, whether it fits or not."""
        estimate = self.estimate_memory(plan, shape)
        return estimate if isinstance(estimate, Rejected) else self.estimate_time(plan, estimate)

    def limit(self, plan: Plan) -> float | None:
        """Return the bytes that one process may be predicted to hold; None where the host's memory is unknown."""
        return memory_limit(plan, self.host, risk=self.workload.risk, spread=held_memory_spread(self._bases(plan)["held"]))

    def estimate_memory(self, plan: Plan, shape: tuple[int, int] | None = None) -> MemoryEstimate | Rejected:
        """Return the memory of a plan. ``shape``: rows and tokens a row of the largest micro-batch; None: the plan's own."""
        problem = why_not_isolated(self.profile.isolation, plan, longest=self.workload.longest)
        if problem is not None:
            return Rejected(plan, problem)
        trace = plan_trace(self.profile, plan, self.workload, memo=self._memo)
        if trace is None:
            degree = plan.layout.tensor_parallel
            sharing = f" as one of {degree} tensor-parallel ranks" if degree > 1 else ""
            return Rejected(plan, f"{plan.attention} attention in {plan.precision} was not traced{sharing}")
        if plan.activation_checkpointing and plan.recompute_granularity not in trace.gaps_recomputed:
            return Rejected(plan, f"the model's layers cannot be recomputed in {plan.recompute_granularity} in {plan.precision}")
        tensors = self._memory(trace, plan, shape or largest_micro_batch(plan, self.workload))
        memory = with_libraries(tensors, library_bytes(plan, self.host))
        resident = predict_resident(
            memory, plan, self.host, adapter=self.profile.parameters.adapter, num_widths=num_widths(plan, self.workload)
        )
        return MemoryEstimate(trace, memory, resident)

    def estimate_time(self, plan: Plan, estimate: MemoryEstimate) -> Candidate | Rejected:
        """Return the plan with its memory and its predicted time."""
        try:
            time = predict_time(
                self.profile, estimate.trace, plan, self.workload, self.host, kernel=self._kernel, memo=self._memo
            )
        except UnknownLink as problem:
            return Rejected(plan, f"{problem} on {self.host.name}; {link_advice(self.host)}")
        if time is None:
            return Rejected(plan, self._unknown_rate(plan))
        amortised = time.total + time.one_time / self.workload.total_steps
        return Candidate(plan, estimate.memory, estimate.resident, time, self._tokens / amortised, self._bases(plan))

    def _bases(self, plan: Plan) -> dict[Number, Basis]:
        """Return how sure the numbers of a plan are: less sure if the model was estimated from its sizes."""
        varies = num_widths(plan, self.workload) > 1
        key = ("bases", plan.device, plan.torch_compile, plan.host_memory, varies)
        return self._memo.get_or_compute(key, partial(self._make_bases, plan, varies))

    def _make_bases(self, plan: Plan, varies: bool) -> dict[Number, Basis]:
        bases: dict[Number, Basis] = {
            "step": self._step_bases[plan.layout.exchanges],
            "allocated": formula_basis("allocated", plan),
            "held": formula_basis("held", plan, varies=varies),
        }
        return estimated_bases(bases) if self.profile.is_estimated else bases

    def _unknown_rate(self, plan: Plan) -> str:
        if plan.optim_offload and predict_rates(self.host, self.profile, plan) is not None:
            return (
                "an update on the host needs the rates of its memory and link, which were not measured; use optim_offload=false"
            )
        return f"this host's rate in {plan.precision} is unknown{NO_RATE_ADVICE}"

    def _memory(self, trace: StepTrace, plan: Plan, shape: tuple[int, int]) -> StepMemory:
        if not has_earlier_gradients(plan):
            return predict_memory(self.profile, trace, plan, shape=shape)
        memory_by_rank = []
        for stage, share in deciding_shares(self.profile, plan, self._memo):
            key = ("walk", micro_batch_key(trace, plan, stage), shape, plan.packing)
            compute = partial(micro_batch_memory, self.profile, trace, plan, stage, shape=shape, memo=self._memo)
            micro_batch = self._memo.get_or_compute(key, compute)
            memory_by_rank.append(step_memory(micro_batch, self.profile, plan, stage, share))
        if len(memory_by_rank) == 1:
            return memory_by_rank[0]
        return max(memory_by_rank, key=lambda memory: memory.peak)
