"""Read the values by which trials are judged from a training run's Record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from upshift.errors import JobFailed, RequestError
from upshift.record import Numbers, Record

Direction = Literal["minimize", "maximize"]


@dataclass(frozen=True)
class Objective:
    name: str
    direction: Direction
    unit: str
    read: Callable[[Record, Numbers], float | None]


OBJECTIVES = {
    one.name: one
    for one in (
        Objective("eval_loss", "minimize", "", lambda record, measured: measured.evaluation_loss),
        Objective("time", "minimize", "s", lambda record, measured: record.details.get("total_seconds")),
        Objective("memory", "minimize", "GiB", lambda record, measured: measured.resident_gib or measured.peak_gib),
        Objective("speed", "maximize", "tokens/s", lambda record, measured: measured.tokens_per_second),
    )
}


def find_objectives(names: tuple[str, ...]) -> tuple[Objective, ...]:
    unknown = [name for name in names if name not in OBJECTIVES]
    if unknown or not names or len(set(names)) < len(names):
        said = repr(unknown[0] if unknown else ",".join(names))
        raise RequestError(f"objective {said}: it is one or several, each once, of {', '.join(OBJECTIVES)}")
    return tuple(OBJECTIVES[name] for name in names)


def values_of(record: Record, objectives: tuple[Objective, ...]) -> tuple[float, ...]:
    values = [None if record.measured is None else one.read(record, record.measured) for one in objectives]
    missing = [one.name for one, value in zip(objectives, values, strict=True) if value is None]
    if missing:
        raise JobFailed(f"the run did not measure {', '.join(missing)}")
    return tuple(value for value in values if value is not None)
