"""Turn measurements at several (batch, sequence) points, or one whose numbers are polynomials already, into a segment's costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from upshift.models.profile import GradientsGo, PassCost, Polynomial, Segment
from upshift.models.tracing.op_counter import Interval
from upshift.models.tracing.symbolic_sizes import POWERS, NotPolynomial, polynomial

Point = tuple[int, int]
# Where two events of a segment compete for its peak, the polynomials are compared on this grid.
GRID_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 1024)
GRID_STEPS = 12


@dataclass(frozen=True)
class Measurement:
    """The intervals of one point, by name."""

    forward: dict[str, Interval]
    backward: dict[str, Interval]
    accumulating: dict[str, Interval]


def fit_segment(points: Sequence[Point], families: Sequence[Sequence[Measurement]], name: str, *, longest: int) -> list[Segment]:
    """Return one segment for each family of measurements.

    Their terms of ``rise`` are of the same operators, in the same order, and of those that are highest at some length up to
    the ``longest``. With one point the numbers of its measurement are polynomials (sizes.py). Raise NotPolynomial if operators
    differ then.
    """
    forward = _fit_pass(points, longest, [[_with_between(m.forward, name) for m in family] for family in families])
    backward = _fit_pass(points, longest, [[m.backward.get(f"backward {name}") for m in family] for family in families])
    again = _fit_pass(points, longest, [[m.accumulating.get(f"backward {name}") for m in family] for family in families])
    alone = len(families) == 1
    gone = _fit_gradients(points, longest, [m.backward.get(f"backward {name}") for m in families[0]]) if alone else None
    return [
        Segment(forward=there, backward=back, backward_accumulating=onto, gradients_go=gone)
        for there, back, onto in zip(forward, backward, again, strict=True)
    ]


def _fit_gradients(points: Sequence[Point], longest: int, family: Sequence[Interval | None]) -> GradientsGo:
    intervals = [interval if interval is not None else Interval(entered=0) for interval in family]
    same = len({tuple(interval.operators) for interval in intervals}) == 1
    live = [i.without if same else [max(i.without, default=i.entered)] for i in intervals]
    (rise,) = _envelopes(points, longest, [[[one - i.entered for one in of] for i, of in zip(intervals, live, strict=True)]])
    elements = [size for size, _ in intervals[0].moments]
    moments = [fit_single(points, [i.moments[n][1] - i.entered for i in intervals]) for n in range(len(elements))]
    return GradientsGo(
        rise=rise,
        moments=tuple(dict.fromkeys(zip(elements, moments, strict=True))),
        born=fit_single(points, [i.born for i in intervals]),
    )


def _with_between(forward: dict[str, Interval], name: str) -> Interval | None:
    """Return a layer's forward interval, extended up to the entry of the next layer."""
    own = forward.get(f"forward {name}")
    after = forward.get(f"forward between {name}")
    if own is None or after is None:
        return own
    return Interval(
        entered=own.entered,
        operators=own.operators + after.operators,
        live=own.live + after.live,
        left=after.left,
        released=own.released + after.released,
        matmul_flops=own.matmul_flops + after.matmul_flops,
        attention_flops=own.attention_flops + after.attention_flops,
        repeated_flops=own.repeated_flops + after.repeated_flops,
        moved_bytes=own.moved_bytes + after.moved_bytes,
        matmul_bytes=own.matmul_bytes + after.matmul_bytes,
        num_kernels=own.num_kernels + after.num_kernels,
    )


def _fit_pass(points: Sequence[Point], longest: int, families: Sequence[Sequence[Interval | None]]) -> list[PassCost]:
    present = [[interval if interval is not None else Interval(entered=0) for interval in family] for family in families]
    return [
        PassCost(
            left=fit_single(points, [i.left - i.entered for i in intervals]),
            released=fit_single(points, [i.released for i in intervals]),
            rise=rise,
            matmul_flops=fit_single(points, [i.matmul_flops for i in intervals]),
            attention_flops=fit_single(points, [i.attention_flops for i in intervals]),
            moved_bytes=fit_single(points, [i.moved_bytes for i in intervals]),
            matmul_bytes=fit_single(points, [i.matmul_bytes for i in intervals]),
            num_kernels=max(i.num_kernels for i in intervals),
        )
        for intervals, rise in zip(present, _fit_rise(points, longest, present), strict=True)
    ]


def fit_single(points: Sequence[Point], values: Sequence[Any]) -> Polynomial:
    if len(points) == 1:
        return polynomial(values[0] + np.zeros(len(POWERS)))
    return polynomial(_solve(points, np.asarray(values, dtype=np.float64)))


def _fit_rise(points: Sequence[Point], longest: int, families: Sequence[Sequence[Interval]]) -> list[tuple[Polynomial, ...]]:
    """Return the upper envelope of every operator's live bytes, or of the highest ones if the operators differ."""
    same = len({tuple(interval.operators) for intervals in families for interval in intervals}) == 1
    if not same and len(points) == 1:
        raise NotPolynomial("ranks run other operators")
    return _envelopes(
        points,
        longest,
        [[[live - i.entered for live in (i.live if same else _highest(i))] for i in intervals] for intervals in families],
    )


def _envelopes(
    points: Sequence[Point], longest: int, families: Sequence[Sequence[Sequence[Any]]]
) -> list[tuple[Polynomial, ...]]:
    """Return the moments that are highest somewhere, in any of the families. All families have as many moments at each point."""
    if not families[0][0]:
        return [() for _ in families]
    coefficients = [_solve(points, np.array(family, dtype=np.float64)) for family in families]
    sequences = np.linspace(1, longest, GRID_STEPS)
    grid = np.array([_monomials(batch, sequence) for batch in GRID_BATCHES for sequence in sequences])
    winners = np.unique(np.concatenate([np.argmax(grid @ family, axis=1) for family in coefficients]))
    return [tuple(polynomial(family[:, winner]) for winner in winners) for family in coefficients]


def _highest(interval: Interval) -> list[int]:
    return [max(interval.live, default=interval.entered)]


def _monomials(batch: float, sequence: float) -> list[float]:
    return [1.0, batch, sequence, batch * sequence, sequence * sequence, batch * sequence * sequence]


def _solve(points: Sequence[Point], values: np.ndarray) -> np.ndarray:
    """Return six coefficients of every value, which has one number for each point. Four points give no quadratic terms."""
    if len(points) == 1:
        only: np.ndarray = values[0].T
        return only
    matrix = np.array([_monomials(*point)[: len(points)] for point in points])
    scale = np.abs(matrix).max(axis=0)
    solution = (np.linalg.solve(matrix / scale, values).T / scale).T
    return np.concatenate([solution, np.zeros((len(POWERS) - len(points), *solution.shape[1:]))])
