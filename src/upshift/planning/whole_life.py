"""A plan fits when every phase of its job does, and not its step alone: which phase does not, with its bytes.

The phases around a step are computed for the plans that are shown, from the best downward, until enough of them fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from upshift.hardware.spec import Host
from upshift.models.profile import ModelProfile
from upshift.planning.cost.basis import held_spread
from upshift.planning.cost.life import life, needed
from upshift.planning.cost.memory import Peak
from upshift.planning.cost.resident import CUDA_SLACK, memory_limit
from upshift.planning.cost.segments import trace_for
from upshift.planning.cost.time import largest_micro_batch
from upshift.planning.rank import Candidate, Ranking, Rejected
from upshift.planning.workload import Workload
from upshift.units import format_bytes

MAX_WORDS = 3  # parts of memory that are named


@dataclass(frozen=True)
class WholeLife:
    """The phases of jobs of one model and workload on one host."""

    host: Host
    profile: ModelProfile
    workload: Workload

    def phases(self, candidate: Candidate) -> dict[str, Peak]:
        """Allocated bytes by phase and part, in the job's order."""
        trace = trace_for(self.profile, candidate.plan, self.workload)
        if trace is None:
            return dict(candidate.memory.phases)
        shape = largest_micro_batch(candidate.plan, self.workload)
        return life(self.profile, trace, candidate.plan, candidate.memory, shape=shape)

    def too_big(self, candidate: Candidate) -> str | None:
        """The phase around the step that needs most, where that is more than may be held."""
        spread = held_spread(candidate.basis("held"))
        limit = memory_limit(candidate.plan, self.host, risk=self.workload.risk, spread=spread)
        if limit is None:
            return None
        needs = {name: needed(name, peak) for name, peak in self.phases(candidate).items()}
        phase = max(needs, key=lambda name: needs[name])
        held = held_in(candidate, needs[phase])
        if needs[phase] <= candidate.memory.peak or held <= limit:
            return None
        parts = sorted(self.phases(candidate)[phase].parts.items(), key=lambda item: -item[1])
        named = ", ".join(f"{part} {format_bytes(size)}" for part, size in parts[:MAX_WORDS] if size)
        return (
            f"its step fits, {phase} does not: needs {format_bytes(held)} of the {format_bytes(limit)} that a process may use "
            f"({named})"
        )

    def fitting(self, ranking: Ranking, *, enough: int) -> Ranking:
        """The same ranking, whose first ``enough`` plans fit in every phase; those that do not are rejected with the phase."""
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


def held_in(candidate: Candidate, allocated: float) -> float:
    """What the process or device holds at a moment with so much allocated: a step's holes and libraries are there too."""
    slack = CUDA_SLACK if candidate.plan.device == "cuda" else 1.0
    return candidate.resident + slack * (allocated - candidate.memory.peak)
