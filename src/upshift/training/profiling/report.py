"""Define the measurements of one rank's profiled steps, and the report of `upshift profile` that combines them.

The report has the time of a step by kind of work beside its roofline, the memory by phase, and changes that would help.
"""

from __future__ import annotations

from pydantic import Field

from upshift.debugging.finding import Finding, hint, warning
from upshift.debugging.step_faults import DATA_SHARE, LOOP_DATA_FIX, RECOMPILE_FIX
from upshift.planning.analysis.bottleneck import COMMUNICATION, DATA, IDLE, KINDS, Change
from upshift.planning.plan import Plan
from upshift.value import Value

RANK_FILE = "rank-{}.json"
TRACE_FILE = "trace-rank-{}.json.gz"


class Operator(Value):
    """The time of one operator in a step."""

    name: str
    kind: str
    ms: float  # own time in a step, without recording
    calls: float  # in a step


class RankProfile(Value):
    """The measurements of one rank, as they are written beside its trace."""

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
STRAGGLER_FACTOR = 1.2  # times the median rank's own work: such a rank is reported
EXCESS_FACTOR = 1.1  # times the predicted memory: more is reported
MIN_EXCESS_GIB = 0.05  # above the prediction, at least
NUM_CHANGES = 3


class Kind(Value):
    """The time of one kind of work in a step."""

    kind: str
    ms: float = Field(description="of a step, mean of the ranks")
    share: float
    roofline_ms: float | None = Field(description="at the rates that this host reaches; None: the planner has no term for it")
    times_roofline: float | None


class PhaseMemory(Value):
    """The memory of one phase of a step."""

    phase: str
    measured_gib: float
    predicted_gib: float | None


class ProfileReport(Value):
    """The report of a profile."""

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
    """Return the ms of a step by kind, as the mean of the ranks."""
    return {kind: sum(rank.kinds_ms.get(kind, 0.0) for rank in ranks) / len(ranks) for kind in KINDS}


def summarize_kinds(ranks: tuple[RankProfile, ...], roofline: dict[str, float]) -> tuple[Kind, ...]:
    """Return the time of each kind of work. ``roofline`` has the seconds of a step, by kind."""
    summary = []
    step = sum(rank.step_ms for rank in ranks) / len(ranks)
    for kind, ms in mean_kinds(ranks).items():
        bound = 1000 * roofline[kind] if kind in roofline else None
        if ms == 0.0 and not bound:
            continue
        times = ms / bound if bound else None
        summary.append(Kind(kind=kind, ms=ms, share=ms / step, roofline_ms=bound, times_roofline=times))
    return tuple(summary)


def find_binding_kind(kinds: tuple[Kind, ...]) -> tuple[str, str]:
    """Return the kind of work that takes most time, and a description of it."""
    largest = max(kinds, key=lambda kind: kind.ms)
    description = f"{largest.share:.0%} of the step"
    if largest.times_roofline is not None:
        description += f", {largest.times_roofline:.1f} times what the host's own rates give ({largest.roofline_ms:.1f} ms)"
    if largest.kind == IDLE:
        description += ": the step is too small for its operators, which wait for Python"
    return largest.kind, description


def find_problems(ranks: tuple[RankProfile, ...], kinds: tuple[Kind, ...], memory: tuple[PhaseMemory, ...]) -> list[Finding]:
    """Return what slows the steps down, or takes more memory than predicted."""
    findings = []
    data = next((kind for kind in kinds if kind.kind == DATA), None)
    if data is not None and data.share > DATA_SHARE:
        findings.append(
            warning(
                "data loader",
                what=f"{data.share:.0%} of a step waits for its batch",
                evidence=f"{data.ms:.1f} ms of a step",
                fix=LOOP_DATA_FIX,
            )
        )
    recompiling = max(ranks, key=lambda rank: rank.compiled)
    if recompiling.compiled:
        reason = f"; torch says: {recompiling.why_compiled}" if recompiling.why_compiled else ""
        findings.append(
            warning(
                "recompiles",
                what=f"{recompiling.compiled} frames were compiled again after the second step",
                evidence=f"rank {recompiling.rank}{reason}",
                fix=RECOMPILE_FIX,
            )
        )
    work_ms = {rank.rank: rank.step_ms - rank.kinds_ms.get(COMMUNICATION, 0.0) for rank in ranks}
    median_ms = sorted(work_ms.values())[(len(work_ms) - 1) // 2]
    slowest = max(work_ms, key=lambda rank: work_ms[rank])
    if work_ms[slowest] > STRAGGLER_FACTOR * median_ms:
        findings.append(
            warning(
                f"rank {slowest}",
                what=f"works {work_ms[slowest] / median_ms:.1f} times as long as the others, which wait for it",
                evidence=", ".join(f"rank {rank} {ms:.1f} ms" for rank, ms in work_ms.items()),
                fix="on its host: upshift doctor, and ps -eo pid,pcpu,args --sort=-pcpu | head",
            )
        )
    above = [
        row
        for row in memory
        if row.predicted_gib and row.measured_gib > max(EXCESS_FACTOR * row.predicted_gib, row.predicted_gib + MIN_EXCESS_GIB)
    ]
    if above:
        worst = max(above, key=lambda row: row.measured_gib)
        findings.append(
            hint(
                "memory",
                what=f"the {worst.phase} phase holds more than was predicted",
                evidence=f"{worst.measured_gib:.3f} GiB, predicted {worst.predicted_gib:.3f}",
                fix="upshift train ... --set per_device_train_batch_size=N, half of it, where memory is short",
            )
        )
    return findings
