"""Measure every variant of the step at a few (batch, sequence) points and fit the traces of a profile."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial

from upshift.models.block_attention import NAME
from upshift.models.build import layer_kind
from upshift.models.compiled import call_kind, kept_when_compiled
from upshift.models.fit import fit_segment
from upshift.models.measure import Tracer, fake_masks
from upshift.models.profile import LOSS_CHUNK_TOKENS, Granularity, Polynomial, Segment, StackTrace, StepTrace, Variant
from upshift.models.sizes import NotPolynomial, OfPrimes, prime_points

BLOCK_TRACE_LENGTH = 1024
COMPILED_TRACE_LENGTH = 256  # at least: at this length a prime differs from all widths
CHUNKED_TRACE_LENGTH = 512  # all that comes after the layers is linear in the tokens
BATCHES = (2, 3)  # 1 is avoided: broadcasting makes it a special case of many kernels
DIVIDED_RANKS = 2  # one rank of one, and one of two, show which parts are divided


def trace_points(sequence_length: int) -> list[tuple[int, int]]:
    return [(batch, sequence) for batch in BATCHES for sequence in trace_lengths(sequence_length)]


def trace_lengths(sequence_length: int) -> tuple[int, int, int]:
    """Return three lengths up to ``sequence_length``. A quadratic through them is exact between them."""
    return max(sequence_length // 4, 3), max(sequence_length // 2, 5), max(sequence_length, 8)


def chunked_points(sequence_length: int) -> list[tuple[int, int]]:
    """Return points of one to four whole chunks.

    Work goes by chunks, and polynomials through parts of them would say nothing beyond."""
    shortest = 1 << ((max(min(sequence_length, CHUNKED_TRACE_LENGTH), 8) // 2).bit_length() - 1)
    batch = LOSS_CHUNK_TOKENS // shortest
    return [(rows, length) for rows in (batch, 2 * batch) for length in (shortest, 2 * shortest)]


logger = logging.getLogger(__name__)

Fitted = dict[str, list[Segment]]  # by the segment's name, one for each degree


def step_tasks(
    tracer: Tracer, variants: tuple[Variant, ...], sequence_length: int, *, chunking: bool
) -> dict[str, Callable[[], Fitted | None]]:
    """Return the traces to make, by name. They raise RuntimeError if a slice of the model does not run."""
    tasks: dict[str, Callable[[], Fitted | None]] = {}
    for variant in variants:
        for way in _ways(tracer, variant):
            tasks[_name(variant, way)] = partial(_trace_way, tracer, variant, way, sequence_length)
        if chunking:  # the loss is the same beside any attention
            tasks.setdefault(_chunked_name(variant), partial(_trace_chunked, tracer, variant, chunked_points(sequence_length)))
    return tasks


def steps_of(tracer: Tracer, variants: tuple[Variant, ...], found: dict[str, Fitted], *, chunking: bool) -> tuple[StepTrace, ...]:
    """Return one trace for each variant, two if it is ``divided``."""
    return tuple(step for variant in variants for step in _steps(tracer, variant, found, chunking=chunking))


def _name(variant: Variant, way: Granularity | None) -> str:
    # The other ways of recomputing, and what compiled layers keep, are told by traces of their own, or by the plain one.
    compiled = variant.compiled and way is None
    return f"{variant._replace(selective=False, alternate=False, compiled=compiled)} {way}"


def _chunked_name(variant: Variant) -> str:
    return f"chunked {variant.precision}"


def _ways(tracer: Tracer, variant: Variant) -> list[Granularity | None]:
    if not tracer.base.supports_gradient_checkpointing:
        return [None]
    ways: list[Granularity | None] = [None, "full"]
    if variant.selective:
        ways.append("selective")
    if variant.alternate:
        ways.append("alternate")
    return ways


def _trace_way(tracer: Tracer, variant: Variant, way: Granularity | None, sequence_length: int) -> Fitted | None:
    """Trace every segment, with all layers recomputed in this way. Return None if they cannot be (see recompute.py)."""
    # Block attention runs some ten operators a block: traced at lengths of a few blocks, it is as exact beyond.
    points = trace_points(min(sequence_length, BLOCK_TRACE_LENGTH) if variant.attention == NAME else sequence_length)
    degrees = (1, DIVIDED_RANKS) if variant.divided else (1,)
    try:
        found = _from_primes(tracer, variant, way, sequence_length, degrees) or _fitted(tracer, variant, way, points, degrees)
    except RuntimeError:
        if way not in ("selective", "alternate"):
            raise
        return None
    compiles = variant.compiled and variant.attention != NAME and tracer.source.quantized_from is None  # else never planned
    if way is None and compiles:
        for which, ranks in enumerate(degrees):
            for name, kept in _compiled(tracer, variant, sequence_length, ranks).items():
                found[name][which] = found[name][which].model_copy(update={"compiled": kept})
    return found


def _fitted(
    tracer: Tracer, variant: Variant, way: Granularity | None, points: list[tuple[int, int]], degrees: tuple[int, ...]
) -> Fitted:
    measured = [
        [tracer.measure(variant, batch=b, sequence=s, recompute=way, ranks=ranks) for b, s in points] for ranks in degrees
    ]
    return {name: fit_segment(points, measured, name, longest=points[-1][1]) for name in _segments(tracer)}


def _from_primes(
    tracer: Tracer, variant: Variant, way: Granularity | None, sequence_length: int, degrees: tuple[int, ...]
) -> Fitted | None:
    """Fit from one run, which a second one confirms: a third of the work.

    Return None if numbers are no polynomials, or not the same."""
    found: list[Fitted] = []
    for point in prime_points(sequence_length, widths(tracer)) if variant.attention != NAME else ():
        try:
            measured = [
                [tracer.measure(variant, batch=point[0], sequence=point[1], recompute=way, ranks=ranks, sizes=OfPrimes(*point))]
                for ranks in degrees
            ]
            found.append({name: fit_segment([point], measured, name, longest=sequence_length) for name in _segments(tracer)})
        except NotPolynomial as problem:
            logger.debug("%s %s is fitted to six runs: %s", variant, way, problem)
            return None
    return found[0] if len(found) == 2 and found[0] == found[1] else None


def widths(tracer: Tracer) -> set[int]:
    """Return numbers that dimensions of this model may have, whatever its batch and length."""
    text = tracer.config.get_text_config()
    named = {value for value in vars(text).values() if isinstance(value, int)}
    return named | {size for parameter in tracer.base.parameters() for size in parameter.shape}


def _compiled(tracer: Tracer, variant: Variant, sequence_length: int, ranks: int) -> dict[str, Polynomial]:
    """Return what layers keep when they are compiled.

    Layers that torch cannot trace as one graph are left out. They are taken to keep what eager ones do, which is more."""
    found: dict[str, Polynomial] = {}
    try:
        batch, sequence = prime_points(max(sequence_length, COMPILED_TRACE_LENGTH), widths(tracer))[0]
        calls = tracer.layer_calls(variant, batch=batch, sequence=sequence, ranks=ranks)
        for names, layers in zip(_layers(tracer), calls, strict=True):
            known: dict[str, Polynomial] = {}  # first, inner and last layers are often alike
            for name, (layer, call) in zip(names, layers, strict=True):
                kind = f"{layer_kind(layer)} {call_kind(call)}"
                if kind not in known:
                    with tracer.fake, fake_masks(masked=variant.masked):
                        known[kind] = kept_when_compiled(
                            layer, call, OfPrimes(batch, sequence), autocast=variant.precision == "bf16"
                        )
                found[name] = known[kind]
    except Exception as error:  # every layer and operator may refuse in its own way
        logger.debug("compiled layers are taken to keep what eager ones do: %s", error)
    return found


def _trace_chunked(tracer: Tracer, variant: Variant, points: list[tuple[int, int]]) -> Fitted:
    """Trace the last gap with the loss computed in chunks."""
    measurements = [tracer.measure(variant, batch=b, sequence=s, chunked=True) for b, s in points]
    last = _gaps(tracer)[-1]
    return {last: fit_segment(points, [measurements], last, longest=points[-1][1])}


def _gaps(tracer: Tracer) -> list[str]:
    return [f"gap {number}" for number in range(len(tracer.stacks) + 1)]


def _segments(tracer: Tracer) -> list[str]:
    return [*_gaps(tracer), *(name for layers in _layers(tracer) for name in layers)]


def _layers(tracer: Tracer) -> list[list[str]]:
    return [[f"layer {n} {position}" for position in range(len(stack.kept))] for n, stack in enumerate(tracer.stacks)]


def _steps(tracer: Tracer, variant: Variant, found: dict[str, Fitted], *, chunking: bool) -> list[StepTrace]:
    gaps, layers = _gaps(tracer), _layers(tracer)
    ways = [way for way in _ways(tracer, variant) if way is not None and _name(variant, way) in found]

    def of(way: Granularity | None, names: Iterable[str], which: int) -> tuple[Segment, ...]:
        return tuple(found[_name(variant, way)][name][which] for name in names)

    return [
        StepTrace(
            precision=variant.precision,
            attention=variant.attention,
            masked=variant.masked,
            tensor_parallel=ranks,
            gaps=of(None, gaps, which),
            gaps_recomputed={way: of(way, gaps, which) for way in ways},
            chunked_gap=found[_chunked_name(variant)][gaps[-1]][0] if chunking else None,
            stacks=tuple(
                StackTrace(plain=of(None, names, which), recomputed={way: of(way, names, which) for way in ways})
                for names in layers
            ),
        )
        for which, ranks in enumerate((1, DIVIDED_RANKS) if variant.divided else (1,))
    ]
