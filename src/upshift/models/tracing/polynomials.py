# needs torch
"""Fit the costs of a segment to its measurements at several (batch, sequence) points.

A single measurement also does if its numbers are coefficients of polynomials already (see PrimeSizes).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from upshift.models.profile import PassCost, Polynomial, ReleasedGradients, Segment
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


def at_batch(measurement: Measurement, batch: int) -> Measurement:
    """Return a measurement whose numbers are polynomials of the batch as the plain numbers of this batch."""

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return round(float(value[0] + value[1] * batch))
        if isinstance(value, list | tuple):
            return type(value)(plain(item) for item in value)
        return value

    def of_pass(intervals: dict[str, Interval]) -> dict[str, Interval]:
        return {
            name: Interval(**{f.name: plain(getattr(interval, f.name)) for f in fields(Interval)})
            for name, interval in intervals.items()
        }

    return Measurement(
        forward=of_pass(measurement.forward),
        backward=of_pass(measurement.backward),
        accumulating=of_pass(measurement.accumulating),
    )


def fit_segment(points: Sequence[Point], families: Sequence[Sequence[Measurement]], name: str, *, longest: int) -> list[Segment]:
    """Return one segment for each family of measurements.

    ``rise`` holds the operators after which live bytes are highest at some length up to ``longest``: the same operators in the
    same order for every family. With one point, the numbers of its measurements must be coefficients of polynomials. Raise
    NotPolynomial if the families then run different operators.
    """
    forward = _fit_pass(points, longest, [[_with_between(m.forward, name) for m in family] for family in families])
    backward = _fit_pass(points, longest, [[m.backward.get(f"backward {name}") for m in family] for family in families])
    accumulating = _fit_pass(points, longest, [[m.accumulating.get(f"backward {name}") for m in family] for family in families])
    gradients = None
    if len(families) == 1:
        gradients = _fit_gradients(points, longest, [m.backward.get(f"backward {name}") for m in families[0]])
    return [
        Segment(forward=first, backward=second, backward_accumulating=third, gradients_go=gradients)
        for first, second, third in zip(forward, backward, accumulating, strict=True)
    ]


def _fit_gradients(points: Sequence[Point], longest: int, family: Sequence[Interval | None]) -> ReleasedGradients:
    """Return the cost of a first backward pass that drops each gradient as soon as it is complete."""
    intervals = [interval if interval is not None else Interval(live_at_entry=0) for interval in family]
    same_operators = len({tuple(interval.operators) for interval in intervals}) == 1
    rises = []
    for interval in intervals:
        live_bytes = interval.live_without_gradients
        if not same_operators:
            live_bytes = [max(live_bytes, default=interval.live_at_entry)]
        rises.append([value - interval.live_at_entry for value in live_bytes])
    (rise,) = _envelopes(points, longest, [rises])
    elements = [size for size, _ in intervals[0].gradient_moments]
    moments = [fit_single(points, [i.gradient_moments[n][1] - i.live_at_entry for i in intervals]) for n in range(len(elements))]
    return ReleasedGradients(
        rise=rise,
        moments=tuple(dict.fromkeys(zip(elements, moments, strict=True))),
        born=fit_single(points, [i.gradient_bytes for i in intervals]),
    )


def _with_between(forward: dict[str, Interval], name: str) -> Interval | None:
    """Return a layer's forward interval, extended up to the entry of the next layer."""
    layer = forward.get(f"forward {name}")
    between = forward.get(f"forward between {name}")
    if layer is None or between is None:
        return layer
    return Interval(
        live_at_entry=layer.live_at_entry,
        operators=layer.operators + between.operators,
        live=layer.live + between.live,
        live_at_exit=between.live_at_exit,
        released=layer.released + between.released,
        matmul_flops=layer.matmul_flops + between.matmul_flops,
        attention_flops=layer.attention_flops + between.attention_flops,
        repeated_flops=layer.repeated_flops + between.repeated_flops,
        moved_bytes=layer.moved_bytes + between.moved_bytes,
        matmul_bytes=layer.matmul_bytes + between.matmul_bytes,
        num_kernels=layer.num_kernels + between.num_kernels,
    )


def _fit_pass(points: Sequence[Point], longest: int, families: Sequence[Sequence[Interval | None]]) -> list[PassCost]:
    present = [[interval if interval is not None else Interval(live_at_entry=0) for interval in family] for family in families]
    return [
        PassCost(
            left=fit_single(points, [i.live_at_exit - i.live_at_entry for i in intervals]),
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
    """Return the polynomial through one value for each point."""
    if len(points) == 1:
        return polynomial(values[0] + np.zeros(len(POWERS)))
    return polynomial(_solve(points, np.asarray(values, dtype=np.float64)))


def _fit_rise(points: Sequence[Point], longest: int, families: Sequence[Sequence[Interval]]) -> list[tuple[Polynomial, ...]]:
    """Return, for each family, the upper envelope of the live bytes after its operators.

    If the measurements ran different operators, return the one polynomial of each measurement's highest live bytes."""
    same_operators = len({tuple(interval.operators) for intervals in families for interval in intervals}) == 1
    if not same_operators and len(points) == 1:
        raise NotPolynomial("ranks run other operators")
    rises = [
        [[live - i.live_at_entry for live in (i.live if same_operators else _highest(i))] for i in intervals]
        for intervals in families
    ]
    return _envelopes(points, longest, rises)


def _envelopes(
    points: Sequence[Point], longest: int, families: Sequence[Sequence[Sequence[Any]]]
) -> list[tuple[Polynomial, ...]]:
    """Return, for each family, the polynomials of the moments that are highest somewhere in any of the families.

    ``families``: one number for each family, point and moment. All families have equally many moments at each point."""
    if not families[0][0]:
        return [() for _ in families]
    coefficients = [_solve(points, np.array(family, dtype=np.float64)) for family in families]
    sequences = np.linspace(1, longest, GRID_STEPS)
    grid = np.array([_monomials(batch, sequence) for batch in GRID_BATCHES for sequence in sequences])
    highest_moments = np.unique(np.concatenate([np.argmax(grid @ family, axis=1) for family in coefficients]))
    return [tuple(polynomial(family[:, moment]) for moment in highest_moments) for family in coefficients]


def _highest(interval: Interval) -> list[int]:
    return [max(interval.live, default=interval.live_at_entry)]


def _monomials(batch: float, sequence: float) -> list[float]:
    return [1.0, batch, sequence, batch * sequence, sequence * sequence, batch * sequence * sequence]


def _solve(points: Sequence[Point], values: np.ndarray) -> np.ndarray:
    """Return six coefficients for every value. ``values`` has one row for each point.

    Four points give no quadratic terms."""
    if len(points) == 1:
        coefficients: np.ndarray = values[0].T
        return coefficients
    matrix = np.array([_monomials(*point)[: len(points)] for point in points])
    scale = np.abs(matrix).max(axis=0)
    solution = (np.linalg.solve(matrix / scale, values).T / scale).T
    return np.concatenate([solution, np.zeros((len(POWERS) - len(points), *solution.shape[1:]))])
