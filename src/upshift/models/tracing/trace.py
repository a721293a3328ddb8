"""Run the real, unmodified model on fake tensors at a few (batch, sequence) points and fit its segments' polynomials.

Nothing is allocated and no accelerator is needed: the tensors are fake CPU tensors, on which fused attention keeps its
flash-like memory (on ``meta`` it would be decomposed). Inputs: a config. Ignored: kernel-internal scratch (measured below
1.1 % of the peak), torch.compile (its memory is at most the eager one).

Measure every variant of the step at a few (batch, sequence) points and fit the traces of a profile.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from upshift.errors import RequestError
from upshift.models.adapter import base_of
from upshift.models.build import LayerStack, layer_kind, sample_inputs
from upshift.models.describe import (
    attention_heads,
    attention_kernels,
    count_parameters,
    declarations,
    max_positions,
    why_untraceable,
)
from upshift.models.kv_cache import returned_cache
from upshift.models.ops.activation_checkpointing import recompute_layers
from upshift.models.ops.block_attention import NAME
from upshift.models.ops.chunked_loss import why_not_chunked
from upshift.models.profile import (
    BLOCK_QUERIES,
    LOSS_CHUNK_TOKENS,
    CachedLayers,
    Experts,
    Granularity,
    ModelProfile,
    Parameters,
    Polynomial,
    Segment,
    Stack,
    StackTrace,
    StepTrace,
    TensorParallel,
    Variant,
)
from upshift.models.profile_cache import SegmentStore, isolation_of
from upshift.models.quantized import check_quantization
from upshift.models.sequence_length import sequence_length_of
from upshift.models.source import ModelSource
from upshift.models.tensor_parallel_plan import describe_tensor_parallel
from upshift.models.tracing.active_experts import count_experts
from upshift.models.tracing.compiled import call_kind, kept_when_compiled, load_partition
from upshift.models.tracing.fork_map import run_forked
from upshift.models.tracing.op_counter import LiveTracker
from upshift.models.tracing.polynomials import fit_segment, fit_single
from upshift.models.tracing.segments import Tracer, fake_masks, segment_borders
from upshift.models.tracing.symbolic_sizes import Counted, NotPolynomial, OfPrimes, prime_points

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


EAGER_ATTENTION_LIMIT = 256  # measured in docs/log.md


def trace_model(
    source: ModelSource,
    *,
    key: str,
    versions: dict[str, str],
    sequence_length: int,
    variants: tuple[Variant, ...],
    kept: SegmentStore,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ModelProfile:
    """Measure every variant and fit.

    Raise RequestError for more tokens than positions, and for a model that cannot be traced, naming the module."""
    if variants and "quantization_config" in source.config:
        check_quantization(source.config["quantization_config"], source.reference, adapter=source.adapter is not None)
    if variants:
        sequence_length_of(source, sequence_length)  # before the minute that tracing takes
    tracer = Tracer(source)
    points = trace_points(sequence_length)
    try:
        reason = _chunking(tracer)
        isolation = isolation_of(source)
        variants = choose_variants(tracer, variants, sequence_length, masks_padding=isolation.padding != "unmasked")
        divided = _division(tracer, variants, points[0])
        if isinstance(divided, str):
            variants = tuple(variant._replace(divided=False) for variant in variants)
        steps = step_tasks(tracer, variants, sequence_length, chunking=reason is None)
        wanted: list[Callable[[], Any]] = [partial(run, tracer, points) for run in (model_flops, _kv_elements, _cached_layers)]
        described = _described(tracer)
        (flops, kv, cache), found = _run(wanted, steps, kept, progress, compiled=any(variant.compiled for variant in variants))
    except RequestError:
        raise
    except Exception as error:  # any operator may refuse fake tensors; the user needs the module, not the traceback
        raise RequestError(why_untraceable(source, error)) from error
    return ModelProfile(
        key=key,
        model_hash=source.model_hash,
        versions=versions,
        **described,
        isolation=isolation,
        parameters=_count_parameters(tracer),
        stacks=tuple(
            Stack(path=s.path, traced_layers=s.kept, assignment=s.assignment, layer_trainable=s.layer_trainable)
            for s in tracer.stacks
        ),
        steps=steps_of(tracer, variants, found, chunking=reason is None),
        sequence_range=(points[0][1], sequence_length),
        kv_elements=kv,
        cache=cache,
        tensor_parallel=None if isinstance(divided, str) else divided,
        tensor_parallel_reason=divided if isinstance(divided, str) else "the model declares which weights ranks share",
        chunked_loss_reason=reason or "the head is a plain linear layer, and its logits reach cross entropy in a known way",
        forward_flops=flops[0],
        backward_flops=flops[1],
    )


def _run(
    wanted: list[Callable[[], Any]],
    steps: dict[str, Callable[[], Any]],
    kept: SegmentStore,
    progress: Callable[[int, int], None],
    *,
    compiled: bool,
) -> tuple[list[Any], dict[str, Fitted]]:
    """Return the results of all ``wanted``, and of those ``steps`` that succeed. A step that was traced before is read."""
    if compiled:
        load_partition()
    found = {name: segments for name in steps if (segments := kept.get(name)) is not None}
    missing, known = [name for name in steps if name not in found], len(found)
    tasks = [*(steps[name] for name in missing), *wanted]  # the longest ones first
    results = run_forked(tasks, progress=lambda done: progress(known + done, known + len(tasks)))
    for name, traced in zip(missing, results, strict=False):
        if traced is not None:
            found[name] = traced
            kept.put(name, traced)
    return results[len(missing) :], found


def _described(tracer: Tracer) -> dict[str, Any]:
    """Return what the config and the modules say, without running."""
    text = tracer.config.get_text_config()
    return {
        "architecture": tracer.model_class.__name__,
        "model_type": tracer.config.model_type,
        "objective": tracer.objective,
        "vocab_size": getattr(text, "vocab_size", None),
        "hidden_size": getattr(text, "hidden_size", None),
        "max_positions": max_positions(tracer.base),
        "declares": declarations(tracer.base),
        "experts": _experts(tracer),
        "heads": attention_heads(tracer.base),
    }


def _experts(tracer: Tracer) -> Experts | None:
    tracer.model(torch.float32).train(False)
    batch, sequence = trace_points(1)[0]
    inputs = partial(sample_inputs, tracer.base, tracer.objective, batch=batch, sequence=sequence, masked=False)
    whole = base_of(tracer.whole(torch.float32))  # outside of the fake mode: a class may compute with real numbers as it is built
    with fake_masks(masked=False), tracer.fake:
        found = count_experts(whole, tracer.base, inputs)
    tracer.model(torch.float32).train()
    return found


def choose_variants(
    tracer: Tracer, variants: tuple[Variant, ...], sequence_length: int, *, masks_padding: bool
) -> tuple[Variant, ...]:
    """Return the variants whose kernels the model has, without those that another one makes needless.

    If block attention is reached, a causal model's packed rows take it (``masks_padding``: its padded rows need a mask, too).
    At length, ``eager`` is no faster than the others and holds its score matrices. Rows shorter than one block gain nothing by
    blocks, unless lengths differ: then many are packed into one."""
    kernels = attention_kernels(tracer.base)
    others = any(variant.attention in kernels and variant.attention != NAME for variant in variants)
    packed = any(variant.masked and variant.attention == NAME for variant in variants)
    short = others and not packed and sequence_length < BLOCK_QUERIES
    block = next((v for v in variants if v.attention == NAME and NAME in kernels and not short), None)
    reached = block is not None and _reaches_block(tracer, block, trace_points(sequence_length)[0])
    chosen = []
    for variant in variants:
        needless = {
            "sdpa": variant.masked and reached and tracer.objective == "causal-lm" and not masks_padding,
            "block": not reached,
            "eager": "sdpa" in kernels and sequence_length > EAGER_ATTENTION_LIMIT,
        }
        if variant.attention in kernels and not needless[variant.attention]:
            chosen.append(variant)
    return tuple(chosen)


def _reaches_block(tracer: Tracer, variant: Variant, point: tuple[int, int]) -> bool:
    """Return whether block attention computes anything. Cases that it leaves to ``sdpa`` make it no choice of its own."""
    measurement = tracer.measure(variant, batch=point[0], sequence=point[1])
    return any(interval.used for interval in measurement.forward.values())


def _division(tracer: Tracer, variants: tuple[Variant, ...], point: tuple[int, int]) -> TensorParallel | str:
    """Return the parts that tensor parallelism divides, if it was asked for and a slice of the model runs; else why not.

    A profile of no step says what the model declares: no slice was run."""
    if tracer.source.quantized_from is not None:
        return "its 4-bit weights are packed whole, and no rank can have a slice of them"
    wanted = next((variant for variant in variants if variant.divided), None)
    if wanted is None and variants:
        return "it was not asked for: one device has nothing to divide"
    found = describe_tensor_parallel(base_of(tracer.whole(torch.float32)))
    if wanted is None:
        return found
    if isinstance(found, str) or found.divisor % DIVIDED_RANKS:
        return found if isinstance(found, str) else f"its heads or widths are not divisible by {DIVIDED_RANKS}"
    try:
        tracer.measure(wanted, batch=point[0], sequence=point[1], ranks=DIVIDED_RANKS)
    except RuntimeError as error:
        return f"a rank's slice of the model does not run: {' '.join(str(error).split())[:160]}"
    return found


def _chunking(tracer: Tracer) -> str | None:
    base, (batch, sequence) = tracer.base, trace_points(1)[0]  # the shortest: every chunk says the same
    with fake_masks(masked=False), tracer.fake:
        inputs = sample_inputs(base, tracer.objective, batch=batch, sequence=sequence, masked=False)
        return why_not_chunked(base, inputs)


def _count_parameters(tracer: Tracer) -> Parameters:
    always_fp32 = 0
    if tracer.source.adapter is not None:  # peft casts what it adds to bf16 weights up
        trained = [p for p in tracer.whole(torch.bfloat16).parameters() if p.requires_grad]
        always_fp32 = sum(p.numel() for p in trained if p.dtype == torch.float32)
    paths = tuple(stack.path for stack in tracer.stacks)
    return count_parameters(tracer.whole(torch.float32), paths, always_fp32=always_fp32)


def _kv_elements(tracer: Tracer, points: list[tuple[int, int]]) -> Polynomial | None:
    """Return the elements of keys and values that the whole model's cache holds, or None if it does not generate.

    Two runs with prime sizes tell the polynomial. A window would be no polynomial between the points, and is fitted to all."""
    told: set[Polynomial] = set()
    for point in prime_points(points[-1][1], widths(tracer)):
        cache = _filled_cache(tracer, point)
        if cache is None:
            return None
        if any(getattr(layer, "sliding_window", None) is not None for layer in cache.layers):
            break
        try:
            told.add(fit_single([point], [_cached_elements(tracer, cache, OfPrimes(*point))]))
        except NotPolynomial:
            break
    else:
        if len(told) == 1:
            return told.pop()
    caches = [_filled_cache(tracer, point) for point in points]
    if any(cache is None for cache in caches):
        return None
    return fit_single(points, [_cached_elements(tracer, cache, Counted()) for cache in caches])


def _cached_elements(tracer: Tracer, cache: Any, sizes: Counted | OfPrimes) -> Any:
    """Return the elements of the keys and values of all layers of the model."""
    per_layer = [
        sum((sizes.elements(tensor.shape, 1) for tensor in _keys_and_values(layer)), sizes.zero) for layer in cache.layers
    ]
    return sum((per_layer[index] for index in _layers_of(tracer, cache)), sizes.zero)


def _cached_layers(tracer: Tracer, points: list[tuple[int, int]]) -> tuple[CachedLayers, ...]:
    """Return the layers with a cache. Unlike the polynomial above, this is right beyond a sliding window too."""
    cache = _filled_cache(tracer, points[0])
    if cache is None:
        return ()
    counts = Counter(_what_it_keeps(cache.layers[index], points[0][0]) for index in _layers_of(tracer, cache))
    return tuple(
        CachedLayers(count=count, per_token=per_token, per_sequence=per_sequence, heads=heads, window=window)
        for (per_token, per_sequence, heads, window), count in counts.items()
        if per_token or per_sequence
    )


def _filled_cache(tracer: Tracer, point: tuple[int, int]) -> Any:
    """Return the cut model's own cache after one forward pass, or None if it does not generate."""
    model = tracer.model(torch.float32)
    if not tracer.base.can_generate():
        return None
    model.train(False)
    with fake_masks(masked=False), tracer.fake, torch.no_grad():
        inputs = sample_inputs(tracer.base, tracer.objective, batch=point[0], sequence=point[1], masked=False)
        cache = returned_cache(model(**inputs, use_cache=True))
    model.train()
    return getattr(cache, "self_attention_cache", cache)


def _layers_of(tracer: Tracer, cache: Any) -> Sequence[int]:
    """Return which cached layer stands for each layer of the model.

    The cache is made for all layers of the config, of which the cut model fills the first."""
    stack = tracer.stacks[-1] if tracer.stacks else None
    return stack.assignment if stack and len(cache.layers) >= len(stack.kept) else range(len(cache.layers))


def _keys_and_values(layer: Any) -> list[torch.Tensor]:
    tensors = (getattr(layer, "keys", None), getattr(layer, "values", None))
    return [tensor for tensor in tensors if tensor is not None and tensor.numel()]


def _what_it_keeps(layer: Any, batch: int) -> tuple[int, int, int, int | None]:
    """Return the elements for each token, elements for each sequence, heads, and window."""
    per_token = sum(tensor.numel() // (batch * tensor.shape[-2]) for tensor in _keys_and_values(layer))
    states = [state for name in ("conv_states", "recurrent_states") for state in (getattr(layer, name, None) or {}).values()]
    per_sequence = sum(state.numel() // batch for state in states if state is not None)
    heads = min((tensor.shape[1] for tensor in _keys_and_values(layer)), default=1)
    return per_token, per_sequence, heads, getattr(layer, "sliding_window", None)


def model_flops(tracer: Tracer, points: list[tuple[int, int]]) -> tuple[Polynomial, Polynomial]:
    """Return the FLOPs of forward and backward, in evaluation mode with fused attention.

    Dropout would decompose attention and hide that it is causal. FLOPs that a fused backward repeats are left out."""
    model = tracer.model(torch.float32)
    if "sdpa" in attention_kernels(tracer.base):
        tracer.base.set_attn_implementation("sdpa")
    recompute_layers(model, 0)
    model.train(False)

    def fitted(points: list[tuple[int, int]], sizes: Callable[[int, int], Any]) -> tuple[Polynomial, Polynomial]:
        counted = [_flops_at(tracer, model, *point, sizes(*point)) for point in points]
        forward, backward = zip(*counted, strict=True)
        return fit_single(points, forward), fit_single(points, backward)

    try:
        told = {fitted([point], OfPrimes) for point in prime_points(points[-1][1], widths(tracer))}
    except NotPolynomial:
        told = set()
    found = told.pop() if len(told) == 1 else fitted(points, lambda batch, sequence: Counted())
    model.train()
    return found


def _flops_at(tracer: Tracer, model: nn.Module, batch: int, sequence: int, sizes: Counted | OfPrimes) -> tuple[Any, Any]:
    with fake_masks(masked=False), tracer.fake, LiveTracker(sizes) as tracker:
        inputs = sample_inputs(tracer.base, tracer.objective, batch=batch, sequence=sequence, masked=False)
        with segment_borders(model, tracer.stacks, tracker) as borders:
            borders.start("forward")
            loss = model(**inputs).loss
            borders.start("backward")
            loss.backward()
            tracker.border(None)
    model.zero_grad(set_to_none=True)
    totals = {"forward": sizes.zero, "backward": sizes.zero}
    for name, interval in tracker.intervals:
        own = interval.matmul_flops + interval.attention_flops - interval.repeated_flops
        phase = name.split()[0]
        totals[phase] = totals[phase] + own * _layers_like(tracer.stacks, name)
    return totals["forward"], totals["backward"]


def _layers_like(stacks: list[LayerStack], name: str) -> int:
    """Return how many layers of the full model an interval's layer stands for, or 1 for a gap."""
    words = name.split()
    if words[1] != "layer":
        return 1
    return stacks[int(words[2])].assignment.count(int(words[3]))
