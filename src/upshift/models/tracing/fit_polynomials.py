# needs torch
"""Run a variant of the step at the sizes that its polynomials need, and fit them.

A polynomial of batch and length has six coefficients. Two runs with prime sizes give and confirm it. If the numbers are no
polynomials of the length, each of three lengths is run: with one prime batch, or with two small batches.
"""

from __future__ import annotations

import logging
from functools import partial

from upshift.models.ops.block_attention import BLOCK_ATTENTION
from upshift.models.profile import Granularity, Segment, Variant
from upshift.models.tracing.polynomials import Measurement, at_batch, fit_segment
from upshift.models.tracing.segments import Tracer
from upshift.models.tracing.symbolic_sizes import NO_LENGTH, NotPolynomial, PrimeSizes, prime_batch, prime_points

BATCHES = (2, 3)  # not 1, which broadcasting makes a special case of many kernels

logger = logging.getLogger(__name__)

FittedSegments = dict[str, list[Segment]]  # by the segment's name, one for each degree of tensor parallelism


def trace_points(sequence_length: int) -> list[tuple[int, int]]:
    """Return the (batch, sequence) points to measure for lengths up to ``sequence_length``."""
    return [(batch, sequence) for batch in BATCHES for sequence in trace_lengths(sequence_length)]


def trace_lengths(sequence_length: int) -> tuple[int, int, int]:
    """Return three lengths up to ``sequence_length``. Three points determine a quadratic."""
    return max(sequence_length // 4, 3), max(sequence_length // 2, 5), max(sequence_length, 8)


def fit_points(
    tracer: Tracer, variant: Variant, granularity: Granularity | None, points: list[tuple[int, int]], degrees: tuple[int, ...]
) -> FittedSegments:
    measured = [_measure_points(tracer, variant, granularity, points, ranks) for ranks in degrees]
    return {name: fit_segment(points, measured, name, longest=points[-1][1]) for name in segment_names(tracer)}


def _measure_points(
    tracer: Tracer, variant: Variant, granularity: Granularity | None, points: list[tuple[int, int]], ranks: int
) -> list[Measurement]:
    """Measure one rank at all points.

    If the numbers are polynomials of the batch, one run with a prime batch serves all batches of a length. A run at the first
    point confirms it. Packed rows are one row for block attention, whose operators then grow with the batch, as those of a tower
    do that runs each image by itself: a large prime batch takes longer than all points."""
    measure = partial(tracer.measure, variant, recompute=granularity, ranks=ranks)
    lengths = sorted({sequence for _, sequence in points})
    first = measure(batch=points[0][0], sequence=points[0][1])
    grows = variant.masked and variant.attention == BLOCK_ATTENTION or tracer.runs_each_image
    batch = 0 if grows else prime_batch(dimension_sizes(tracer) | set(lengths))
    try:
        runs = {
            sequence: measure(batch=batch, sequence=sequence, sizes=PrimeSizes(batch, NO_LENGTH))
            for sequence in (lengths if batch else ())
        }
        measured = [at_batch(runs[sequence], rows) for rows, sequence in points] if runs else []
        if measured and measured[0] == first:
            return measured
        logger.debug("%s %s: a prime batch shows other numbers than a small one", variant, granularity)
    except NotPolynomial as problem:
        logger.debug("%s %s is measured at all points: %s", variant, granularity, problem)
    return [first, *(measure(batch=rows, sequence=sequence) for rows, sequence in points[1:])]


def fit_primes(
    tracer: Tracer, variant: Variant, granularity: Granularity | None, sequence_length: int, degrees: tuple[int, ...]
) -> FittedSegments | None:
    """Fit from one run with prime sizes, and confirm the result by a second run. This is a third of the work of fit_points.

    Return None if numbers are not polynomials, or if the runs disagree."""
    fits: list[FittedSegments] = []
    grows = variant.attention == BLOCK_ATTENTION or tracer.runs_each_image
    for point in () if grows else prime_points(sequence_length, dimension_sizes(tracer)):
        try:
            measured = [
                [
                    tracer.measure(
                        variant, batch=point[0], sequence=point[1], recompute=granularity, ranks=ranks, sizes=PrimeSizes(*point)
                    )
                ]
                for ranks in degrees
            ]
            fits.append({name: fit_segment([point], measured, name, longest=sequence_length) for name in segment_names(tracer)})
        except NotPolynomial as problem:
            logger.debug("%s %s is fitted to six runs: %s", variant, granularity, problem)
            return None
    return fits[0] if len(fits) == 2 and fits[0] == fits[1] else None


def dimension_sizes(tracer: Tracer) -> set[int]:
    """Return the sizes of this model's dimensions that depend on neither batch nor length."""
    text = tracer.config.get_text_config()
    named = {value for value in vars(text).values() if isinstance(value, int)}
    return named | {size for parameter in tracer.base.parameters() for size in parameter.shape}


def gap_names(tracer: Tracer) -> list[str]:
    return [f"gap {number}" for number in range(len(tracer.stacks) + 1)]


def segment_names(tracer: Tracer) -> list[str]:
    return [*gap_names(tracer), *(name for layers in layer_names(tracer) for name in layers)]


def layer_names(tracer: Tracer) -> list[list[str]]:
    return [[f"layer {n} {position}" for position in range(len(stack.traced_layers))] for n, stack in enumerate(tracer.stacks)]
