"""Define the measurements of one rank's steps, as they are written beside its trace."""

from __future__ import annotations

from pydantic import Field

from upshift.value import Value

RANK_FILE, TRACE_FILE = "rank-{}.json", "trace-rank-{}.json.gz"


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
