"""Check that every phase of a plan's job fits, and not its step alone. Say which phase does not fit, with its bytes.

The phases around a step are computed for the plans that are shown, from the best downward, until enough of them fit.
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
from upshift.planning.search.ranking import FITS_BUT, Candidate, Ranking, Rejected, limit_of
from upshift.planning.workload import Workload
from upshift.units import format_bytes

MAX_WORDS = 3  # parts of memory that are named


@dataclass(frozen=True)
class WholeLife:
    """The phases of jobs of one model and workload on one host."""

    host: Host
    profile: ModelProfile
    workload: Workload
    _memo: Memo = field(default_factory=Memo, init=False, compare=False, repr=False)

    def phases(self, candidate: Candidate, *, sequences: int | None = None) -> dict[str, Peak]:
        """Return the allocated bytes by phase and part, in the job's order. ``sequences``: of a micro-batch; None: the plan's
        largest."""
        plan = candidate.plan
        trace = plan_trace(self.profile, plan, self.workload, memo=self._memo)
        if trace is None:
            return dict(candidate.memory.phases)
        shape = largest_micro_batch(plan, self.workload) if sequences is None else (sequences, plan.sequence_length)
        return phase_memory(self.profile, trace, plan, candidate.memory, shape=shape)

    def limit(self, candidate: Candidate) -> float | None:
        return limit_of(candidate, self.host, self.workload)

    def held(self, candidate: Candidate, allocated: float) -> float:
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

    def reserved(self, candidate: Candidate, allocated: float) -> float:
        """Return the bytes that a CUDA allocator reserves at a moment with ``allocated`` bytes allocated: a stuck
        segment stays.
        """
        return predict_reserved(candidate.memory) + CUDA_SLACK * (allocated - candidate.memory.peak)

    def too_big(self, candidate: Candidate) -> str | None:
        """Return, in words, the phase around the step that needs most, if it needs more than may be held; else None."""
        limit = self.limit(candidate)
        if limit is None:
            return None
        phases = {name: peak for name, peak in self.phases(candidate).items() if name != WITH_LOGITS}
        needs = {name: required_bytes(name, peak) for name, peak in phases.items()}
        phase = max(needs, key=lambda name: needs[name])
        held = self.held(candidate, needs[phase])
        if needs[phase] <= candidate.memory.peak or held <= limit:
            return None
        parts = sorted(phases[phase].parts.items(), key=lambda item: -item[1])
        named = ", ".join(f"{part} {format_bytes(size)}" for part, size in parts[:MAX_WORDS] if size)
        return f"{FITS_BUT} {phase} does not: needs {format_bytes(held)} of {format_bytes(limit)} ({named})"

    def does_not_fit(self, candidate: Candidate) -> tuple[str, ...]:
        """Return in words the phase that does not fit, and evaluation with logits, which nobody has asked for yet."""
        reasons = [self.too_big(candidate), self._logits(candidate)]
        return tuple(reason for reason in reasons if reason is not None)

    def _logits(self, candidate: Candidate) -> str | None:
        """Return in words why evaluation with logits does not fit, with the micro-batch in which it would; None where it fits."""
        limit = self.limit(candidate)
        whole = self.phases(candidate).get(WITH_LOGITS)
        if limit is None or whole is None or self.held(candidate, whole.total) <= limit:
            return None
        needs = f"needs {format_bytes(self.held(candidate, whole.total))} of {format_bytes(limit)}"
        words = f"{WITH_LOGITS} in the steps' micro-batches does not fit: {needs}"
        size = candidate.plan.per_device_train_batch_size
        while size > 1:
            size //= 2
            if self.held(candidate, self.phases(candidate, sequences=size)[WITH_LOGITS].total) <= limit:
                return f"{words}; in micro-batches of {size} it does"
        return f"{words}; nor does it one sequence at a time"

    def fitting(self, ranking: Ranking, *, enough: int) -> Ranking:
        """Return the same ranking, whose first ``enough`` plans fit in every phase; those that do not are rejected with the
        phase."""
        kept: list[Candidate] = []
        rejected: list[Rejected] = []
        looked_at = 0
        for candidate in ranking.candidates:
            if len(kept) == enough:
                break
            looked_at += 1
            reason = self.too_big(candidate)
            if reason is None:
                kept.append(candidate)
            else:
                rejected.append(Rejected(candidate.plan, reason))
        if not rejected:
            return ranking
        candidates = [*kept, *ranking.candidates[looked_at:]]
        return replace(ranking, candidates=candidates, rejected=[*rejected, *ranking.rejected])
