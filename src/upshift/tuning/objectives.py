"""Define the objectives of a search, and read their values from the record of a training run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from upshift.errors import JobFailed, RequestError
from upshift.record import Numbers, Record

Direction = Literal["minimize", "maximize"]


@dataclass(frozen=True)
class Objective:
    """A number to minimize or maximize. ``read`` takes it from a run's record, whose measured numbers come second."""

    name: str
    direction: Direction
    unit: str
    read: Callable[[Record, Numbers], float | None]


OBJECTIVES = {
    objective.name: objective
    for objective in (
        Objective("eval_loss", "minimize", "", lambda record, measured: measured.evaluation_loss),
        Objective("time", "minimize", "s", lambda record, measured: record.details.get("total_seconds")),
        Objective("memory", "minimize", "GiB", lambda record, measured: measured.resident_gib or measured.peak_gib),
        Objective("speed", "maximize", "tokens/s", lambda record, measured: measured.tokens_per_second),
    )
}


def find_objectives(names: tuple[str, ...]) -> tuple[Objective, ...]:
    """Return the objectives by name. Raise RequestError for an unknown or a repeated name, or for none."""
    unknown = [name for name in names if name not in OBJECTIVES]
    if unknown or not names or len(set(names)) < len(names):
        text = repr(unknown[0] if unknown else ",".join(names))
        raise RequestError(f"objective {text} is not possible; give one or several of {', '.join(OBJECTIVES)}")
    return tuple(OBJECTIVES[name] for name in names)


def read_values(record: Record, objectives: tuple[Objective, ...]) -> tuple[float, ...]:
    """Return the values of the objectives. Raise JobFailed if the run did not measure one."""
    values = [None if record.measured is None else objective.read(record, record.measured) for objective in objectives]
    missing = [objective.name for objective, value in zip(objectives, values, strict=True) if value is None]
    if missing:
        raise JobFailed(f"the run did not measure {', '.join(missing)}")
    return tuple(value for value in values if value is not None)
