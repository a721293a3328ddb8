"""Find the evaluations of a trial at which its pruner decides anything.

The others are not made: each costs a pass over held-out data."""

from __future__ import annotations

from collections.abc import Callable

from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner, SuccessiveHalvingPruner

from upshift.errors import RequestError
from upshift.internals.optuna_names import MAX_RESOURCE, MIN_RESOURCE, REDUCTION, STOPPING_RATE

EVALUATIONS, FACTOR = 9, 3
PRUNERS: dict[str, Callable[[int], BasePruner]] = {  # of the evaluations of a trial
    "halving": lambda evaluations: SuccessiveHalvingPruner(min_resource=1, reduction_factor=FACTOR),
    "hyperband": lambda evaluations: HyperbandPruner(min_resource=1, max_resource=evaluations, reduction_factor=FACTOR),
    "median": lambda evaluations: MedianPruner(n_startup_trials=4),
    "none": lambda evaluations: NopPruner(),
}


def make_pruner(name: str, evaluations: int) -> BasePruner:
    if name not in PRUNERS:
        raise RequestError(f"pruner {name!r} is not one of {', '.join(PRUNERS)}")
    return PRUNERS[name](evaluations)


def rungs(pruner: BasePruner, longest: int) -> tuple[int, ...]:
    """Return steps up to ``longest``: the pruner decides at the first report from each of them on, and at no other.

    Return all steps for a pruner whose rungs are not known beforehand."""
    if type(pruner) is NopPruner:
        return ()
    first: int | None = None
    if type(pruner) is SuccessiveHalvingPruner and MIN_RESOURCE.of(pruner) is not None:  # None: computed from ended trials
        first = MIN_RESOURCE.of(pruner) * REDUCTION.of(pruner) ** STOPPING_RATE.of(pruner)
    if type(pruner) is HyperbandPruner and isinstance(MAX_RESOURCE.of(pruner), int):
        first = MIN_RESOURCE.of(pruner)  # of the bracket that begins earliest
    if first is None:
        return tuple(range(1, longest + 1))
    found = []
    while first <= longest:
        found.append(first)
        first *= REDUCTION.of(pruner)  # both have it
    return tuple(found)


def decides(found: tuple[int, ...], *, before: int, step: int) -> bool:
    """Return whether a report at ``step``, the first since ``before``, reaches a rung."""
    return any(before < rung <= step for rung in found)
