"""Check that every phase of a plan's job fits in memory, and not its step alone. Name the phase that does not fit.

The phases around a step are predicted for the plans that are shown, from the best downward, until enough of them fit.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from upshift.hardware.spec import Host
from upshift.models.profile import ModelProfile
from upshift.planning.cost.memo import Memo
from upshift.planning.cost.memory import WITH_LOGITS, Peak, phase_memory, required_bytes
from upshift.planning.cost.process_memory import CUDA_SLACK, base_bytes, predict_reserved
from upshift.planning.cost.segments import plan_trace
from upshift.planning.cost.time import largest_micro_batch
from upshift.planning.search.ranking import STEP_FITS_PREFIX, Candidate, Ranking, Rejected, limit_of
from upshift.planning.workload import Workload
from upshift.units import format_bytes

MAX_NAMED_PARTS = 3  # parts of memory that a message names


@dataclass(frozen=True)
class JobMemory:
    """The memory of every phase of a job, for one model and workload on one host."""

    host: Host
    profile: ModelProfile
    workload: Workload
    _memo: Memo = field(default_factory=Memo, init=False, compare=False, repr=False)

    def phase_peaks(self, candidate: Candidate, *, sequences: int | None = None) -> dict[str, Peak]:
        """Return the allocated bytes by phase and part, in the job's order.

        ``sequences``: the sequences of a micro-batch. None means those of the plan's largest one.
        """
        plan = candidate.plan
        trace = plan_trace(self.profile, plan, self.workload, memo=self._memo)
        if trace is None:
            return dict(candidate.memory.phases)
        shape = largest_micro_batch(plan, self.workload) if sequences is None else (sequences, plan.sequence_length)
        return phase_memory(self.profile, trace, plan, candidate.memory, shape=shape)

    def limit(self, candidate: Candidate) -> float | None:
        """Return the bytes that one process may be predicted to hold; None where the host's memory is unknown."""
        return limit_of(candidate, self.host, self.workload)

    def held_bytes(self, candidate: Candidate, allocated: float) -> float:
        """Return the bytes that the process or device holds at a moment with ``allocated`` bytes allocated.

        A process's heap has holes in proportion up to the step's peak. Memory beyond the peak is mapped apart.
        """
        above = allocated - candidate.memory.peak
        if candidate.plan.device == "cuda":
            return candidate.resident + CUDA_SLACK * above
        if above >= 0.0:
            return candidate.resident + above
        base = base_bytes(self.host)
        return base + (candidate.resident - base) * allocated / candidate.memory.peak

    def reserved_bytes(self, candidate: Candidate, allocated: float) -> float:
        """Return the bytes that a CUDA allocator reserves at a moment with ``allocated`` bytes allocated.

        Segments that it cannot reuse stay reserved.
        """
        return predict_reserved(candidate.memory) + CUDA_SLACK * (allocated - candidate.memory.peak)

    def describe_excess(self, candidate: Candidate) -> str | None:
        """Describe the phase around the step that needs most memory. Return None if the phase fits."""
        limit = self.limit(candidate)
        if limit is None:
            return None
        phases = {name: peak for name, peak in self.phase_peaks(candidate).items() if name != WITH_LOGITS}
        needs = {name: required_bytes(name, peak) for name, peak in phases.items()}
        largest_phase = max(needs, key=lambda name: needs[name])
        held_bytes = self.held_bytes(candidate, needs[largest_phase])
        if needs[largest_phase] <= candidate.memory.peak or held_bytes <= limit:
            return None
        largest_parts = sorted(phases[largest_phase].parts.items(), key=lambda item: -item[1])
        named_parts = ", ".join(f"{part} {format_bytes(size)}" for part, size in largest_parts[:MAX_NAMED_PARTS] if size)
        needed = f"needs {format_bytes(held_bytes)} of {format_bytes(limit)}"
        return f"{STEP_FITS_PREFIX} {largest_phase} does not: {needed} ({named_parts})"

    def fits(self, candidate: Candidate) -> bool:
        """Return whether the step and every other phase of the job fit. A host of unknown memory takes every plan."""
        limit = self.limit(candidate)
        return limit is None or (candidate.resident <= limit and self.describe_excess(candidate) is None)

    def describe_problems(self, candidate: Candidate) -> tuple[str, ...]:
        """Describe the phase that does not fit, and evaluation with logits if it does not fit: a user may want it later."""
        reasons = [self.describe_excess(candidate), self._describe_logits(candidate)]
        return tuple(reason for reason in reasons if reason is not None)

    def _describe_logits(self, candidate: Candidate) -> str | None:
        """Describe why evaluation with logits does not fit, and in which micro-batch it would. Return None where it fits."""
        limit = self.limit(candidate)
        with_logits = self.phase_peaks(candidate).get(WITH_LOGITS)
        if limit is None or with_logits is None or self.held_bytes(candidate, with_logits.total) <= limit:
            return None
        needs = f"needs {format_bytes(self.held_bytes(candidate, with_logits.total))} of {format_bytes(limit)}"
        problem = f"{WITH_LOGITS} in the steps' micro-batches does not fit: {needs}"
        size = candidate.plan.per_device_train_batch_size
        while size > 1:
            size //= 2
            if self.held_bytes(candidate, self.phase_peaks(candidate, sequences=size)[WITH_LOGITS].total) <= limit:
                return f"{problem}; in micro-batches of {size} it does"
        return f"{problem}; nor does it one sequence at a time"

    def drop_unfitting(self, ranking: Ranking, *, num_plans: int) -> Ranking:
        """Return the ranking with its first ``num_plans`` plans fitting in every phase.

        Plans that do not fit are rejected, and the reason names the phase.
        """
        fitting: list[Candidate] = []
        rejected: list[Rejected] = []
        num_checked = 0
        for candidate in ranking.candidates:
            if len(fitting) == num_plans:
                break
            num_checked += 1
            reason = self.describe_excess(candidate)
            if reason is None:
                fitting.append(candidate)
            else:
                rejected.append(Rejected(candidate.plan, reason))
        if not rejected:
            return ranking
        candidates = [*fitting, *ranking.candidates[num_checked:]]
        return replace(ranking, candidates=candidates, rejected=[*rejected, *ranking.rejected])
