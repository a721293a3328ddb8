"""Define the report of `upshift profile`: the step by kind of work beside its roofline, memory by phase, and what would help.

Define the measurements of one rank's steps, as they are written beside its trace.
"""

from __future__ import annotations

from pydantic import Field

from upshift.debugging.finding import Finding, hint, warning
from upshift.debugging.step_signs import DATA_SHARE, LOOP_DATA_FIX, RECOMPILE_FIX
from upshift.planning.analysis.bottleneck import COMMUNICATION, DATA, IDLE, KINDS, Change
from upshift.planning.plan import Plan
from upshift.value import Value

RANK_FILE = "rank-{}.json"
TRACE_FILE = "trace-rank-{}.json.gz"


class Operator(Value):
    name: str
    kind: str
    ms: float  # of its own in a step, without what recording takes
    calls: float  # in a step


class RankProfile(Value):
    rank: int
    step_ms: float = Field(description="median of the steps before the profiler ran")
    recorded_ms: float = Field(description="of a step under the profiler")
    num_steps: int = Field(description="under the profiler")
    kinds_ms: dict[str, float] = Field(description="of a step, by kind of work; sums to step_ms")
    head_ms: dict[str, float] = Field(description="what of head and loss is products, attention and elementwise")
    operators: tuple[Operator, ...] = Field(description="those that take most")
    memory_gib: dict[str, float] = Field(description="allocated at the highest moment, by phase of a step")
    resident_gib: float
    first_step_seconds: float
    compiled: int = Field(description="frames that torch.compile made after the second step")
    why_compiled: str | None = None
    trace: str = Field(description="for https://ui.perfetto.dev or chrome://tracing")


REPORT_FILE = "profile.json"
STRAGGLING = 1.2  # times the median rank's own work
MORE_MEMORY, MORE_GIB = 1.1, 0.05  # than the prediction: times, and at least
NUM_CHANGES = 3


class Kind(Value):
    kind: str
    ms: float = Field(description="of a step, mean of the ranks")
    share: float
    roofline_ms: float | None = Field(description="at the rates that this host reaches; None: the planner has no term for it")
    times_roofline: float | None


class PhaseMemory(Value):
    phase: str
    measured_gib: float
    predicted_gib: float | None


class ProfileReport(Value):
    model: str
    host: str
    plan: Plan
    label: str
    step_ms: float
    roofline_ms: float
    predicted_ms: float | None = Field(description="with what runs here have taught the planner")
    tokens_per_second: float
    kinds: tuple[Kind, ...]
    binding_term: str
    binding_words: str
    changes: tuple[Change, ...] = Field(description="at most three, most gain first")
    memory: tuple[PhaseMemory, ...]
    resident_gib: float
    predicted_resident_gib: float | None
    ranks: tuple[RankProfile, ...]
    folder: str
    findings: tuple[Finding, ...]


def mean_kinds(ranks: tuple[RankProfile, ...]) -> dict[str, float]:
    return {kind: sum(rank.kinds_ms.get(kind, 0.0) for rank in ranks) / len(ranks) for kind in KINDS}


def kinds_of(ranks: tuple[RankProfile, ...], roofline: dict[str, float]) -> tuple[Kind, ...]:
    """Return the kinds of work. ``roofline`` has the seconds of a step, by kind."""
    found = []
    step = sum(rank.step_ms for rank in ranks) / len(ranks)
    for kind, ms in mean_kinds(ranks).items():
        bound = 1000 * roofline[kind] if kind in roofline else None
        if ms == 0.0 and not bound:
            continue
        times = ms / bound if bound else None
        found.append(Kind(kind=kind, ms=ms, share=ms / step, roofline_ms=bound, times_roofline=times))
    return tuple(found)


def binding(kinds: tuple[Kind, ...]) -> tuple[str, str]:
    """Return the kind that takes most, and what it is held up by, in words."""
    largest = max(kinds, key=lambda kind: kind.ms)
    words = f"{largest.share:.0%} of the step"
    if largest.times_roofline is not None:
        words += f", {largest.times_roofline:.1f} times what the host's own rates give ({largest.roofline_ms:.1f} ms)"
    if largest.kind == IDLE:
        words += ": the step is too small for its operators, which wait for Python"
    return largest.kind, words


def findings_of(ranks: tuple[RankProfile, ...], kinds: tuple[Kind, ...], memory: tuple[PhaseMemory, ...]) -> list[Finding]:
    found = []
    data = next((kind for kind in kinds if kind.kind == DATA), None)
    if data is not None and data.share > DATA_SHARE:
        found.append(
            warning("data loader", what=f"{data.share:.0%} of a step waits for its batch", fix=LOOP_DATA_FIX,
                    evidence=f"{data.ms:.1f} ms of a step"),
        )  # fmt: skip
    again = max(ranks, key=lambda rank: rank.compiled)
    if again.compiled:
        why = f"; torch says: {again.why_compiled}" if again.why_compiled else ""
        found.append(
            warning("recompiles", what=f"{again.compiled} frames were compiled again after the second step", fix=RECOMPILE_FIX,
                    evidence=f"rank {again.rank}{why}"),
        )  # fmt: skip
    own = {rank.rank: rank.step_ms - rank.kinds_ms.get(COMMUNICATION, 0.0) for rank in ranks}
    middle = sorted(own.values())[(len(own) - 1) // 2]
    slow = max(own, key=lambda rank: own[rank])
    if own[slow] > STRAGGLING * middle:
        found.append(
            warning(f"rank {slow}", what=f"works {own[slow] / middle:.1f} times as long as the others, which wait for it",
                    evidence=", ".join(f"rank {rank} {ms:.1f} ms" for rank, ms in own.items()),
                    fix="on its host: upshift doctor, and ps -eo pid,pcpu,args --sort=-pcpu | head"),
        )  # fmt: skip
    above = [
        row
        for row in memory
        if row.predicted_gib and row.measured_gib > max(MORE_MEMORY * row.predicted_gib, row.predicted_gib + MORE_GIB)
    ]
    if above:
        worst = max(above, key=lambda row: row.measured_gib)
        found.append(
            hint("memory", what=f"the {worst.phase} phase holds more than was predicted",
                 evidence=f"{worst.measured_gib:.3f} GiB, predicted {worst.predicted_gib:.3f}",
                 fix="upshift train ... --set per_device_train_batch_size=N, half of it, where memory is short"),
        )  # fmt: skip
    return found
