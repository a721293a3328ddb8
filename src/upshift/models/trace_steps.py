"""Every variant of the step, measured at a few (batch, sequence) points and fitted: the traces of a profile."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

from upshift.models.block_attention import NAME
from upshift.models.fit import Measurement, fit_segment
from upshift.models.measure import Tracer
from upshift.models.profile import LOSS_CHUNK_TOKENS, Granularity, Segment, StackTrace, StepTrace
from upshift.models.store import Variant

BLOCK_TRACE_LENGTH = 1024
CHUNKED_TRACE_LENGTH = 512  # all that comes after the layers is linear in the tokens
BATCHES = (2, 3)  # 1 is avoided: broadcasting makes it a special case of many kernels
DIVIDED_RANKS = 2  # what is divided and what is not follows from one rank of one, and one of two


def trace_points(sequence_length: int) -> list[tuple[int, int]]:
    return [(batch, sequence) for batch in BATCHES for sequence in trace_lengths(sequence_length)]


def trace_lengths(sequence_length: int) -> tuple[int, int, int]:
    """Three lengths up to the one asked for; a quadratic through them is exact between them."""
    return max(sequence_length // 4, 3), max(sequence_length // 2, 5), max(sequence_length, 8)


def chunked_points(sequence_length: int) -> list[tuple[int, int]]:
    """Of one to eight whole chunks: work goes by chunks, and polynomials through parts of them would say nothing beyond."""
    shortest = 1 << ((max(min(sequence_length, CHUNKED_TRACE_LENGTH), 8) // 4).bit_length() - 1)
    batch = LOSS_CHUNK_TOKENS // shortest
    return [(rows, length) for rows in (batch, 2 * batch) for length in (shortest, 2 * shortest, 4 * shortest)]


def trace_steps(
    tracer: Tracer, variants: tuple[Variant, ...], sequence_length: int, *, chunking: bool, progress: Callable[[int, int], None]
) -> list[StepTrace]:
    """One trace a variant, two where it is ``divided``. Raises RuntimeError where a slice of the model does not run."""
    chunked: dict[str, Segment] = {}  # by precision: the loss is the same beside any attention
    steps: list[StepTrace] = []
    for number, variant in enumerate(variants):
        if chunking and variant.precision not in chunked:
            chunked[variant.precision] = _trace_chunked(tracer, variant, chunked_points(sequence_length))
        steps += _trace_step(tracer, variant, chunked.get(variant.precision), sequence_length)
        progress(number + 1, len(variants))
    return steps


def _trace_step(tracer: Tracer, variant: Variant, chunked_gap: Segment | None, sequence_length: int) -> list[StepTrace]:
    """Plain, and with every layer recomputed in each way that the model offers."""
    # Block attention runs some ten operators a block: traced at lengths of a few blocks, it is as exact beyond.
    points = trace_points(min(sequence_length, BLOCK_TRACE_LENGTH) if variant.attention == NAME else sequence_length)
    degrees = (1, DIVIDED_RANKS) if variant.divided else (1,)

    def measure(way: Granularity | None) -> list[list[Measurement]]:
        return [
            [tracer.measure(variant, batch=b, sequence=s, recompute=way, ranks=ranks) for b, s in points] for ranks in degrees
        ]

    measured: dict[Granularity | None, list[list[Measurement]]] = {None: measure(None)}
    if tracer.base.supports_gradient_checkpointing:
        measured["full"] = measure("full")
        if variant.selective:
            with suppress(RuntimeError):  # see recompute.py: not every layer can be recomputed so
                measured["selective"] = measure("selective")
    ways = [way for way in measured if way is not None]
    layers = [[f"layer {n} {position}" for position in range(len(stack.kept))] for n, stack in enumerate(tracer.stacks)]
    gaps = [f"gap {number}" for number in range(len(tracer.stacks) + 1)]
    fitted = {
        (way, name): fit_segment(points, families, name)
        for way, families in measured.items()
        for name in (*gaps, *(name for names in layers for name in names))
    }

    def of(way: Granularity | None, names: Iterable[str], which: int) -> tuple[Segment, ...]:
        return tuple(fitted[way, name][which] for name in names)

    return [
        StepTrace(
            precision=variant.precision,
            attention=variant.attention,
            masked=variant.masked,
            tensor_parallel=ranks,
            gaps=of(None, gaps, which),
            gaps_recomputed={way: of(way, gaps, which) for way in ways},
            chunked_gap=chunked_gap,
            stacks=tuple(
                StackTrace(plain=of(None, names, which), recomputed={way: of(way, names, which) for way in ways})
                for names in layers
            ),
        )
        for which, ranks in enumerate(degrees)
    ]


def _trace_chunked(tracer: Tracer, variant: Variant, points: list[tuple[int, int]]) -> Segment:
    """The last gap with the loss computed in chunks."""
    measurements = [tracer.measure(variant, batch=b, sequence=s, chunked=True) for b, s in points]
    return fit_segment(points, [measurements], f"gap {len(tracer.stacks)}")[0]
