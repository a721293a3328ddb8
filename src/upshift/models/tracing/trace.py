# needs torch
"""Trace a model's training step without its weights, and return the model's profile.

The unmodified model runs on fake CPU tensors at a few (batch, sequence) points, in every requested variant of the step. The
measurements give polynomials for each segment of the step (see segments.py). The same runs give the model's FLOPs and the
sizes of its cache.
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
    heads_in_cache,
    max_positions,
    why_untraceable,
)
from upshift.models.kv_cache import returned_cache
from upshift.models.ops.activation_checkpointing import recompute_layers
from upshift.models.ops.block_attention import BLOCK_ATTENTION
from upshift.models.ops.chunked_loss import why_not_chunked
from upshift.models.profile import (
    BLOCK_QUERIES,
    LOSS_CHUNK_TOKENS,
    CachedLayers,
    Experts,
    Granularity,
    Images,
    Isolation,
    ModelProfile,
    ModelRuns,
    Parameters,
    Polynomial,
    Segment,
    Stack,
    StackTrace,
    StepTrace,
    TensorParallel,
    Variant,
    with_eager_attention,
)
from upshift.models.profile_cache import SegmentStore, check_token_ids, isolation_of
from upshift.models.quantized import check_quantization
from upshift.models.sequence_length import sequence_length_of
from upshift.models.source import ModelSource
from upshift.models.tensor_parallel_plan import describe_tensor_parallel
from upshift.models.tracing.compiled import call_signature, compiled_saved_bytes, load_partition
from upshift.models.tracing.fit_polynomials import (
    FittedSegments,
    dimension_sizes,
    fit_points,
    fit_primes,
    gap_names,
    layer_names,
    trace_points,
)
from upshift.models.tracing.fork_map import run_forked
from upshift.models.tracing.images import measure_images
from upshift.models.tracing.mixtures import experts_per_token, sum_experts
from upshift.models.tracing.op_counter import LiveTracker
from upshift.models.tracing.polynomials import fit_segment, fit_single
from upshift.models.tracing.segments import Tracer, fake_masks, segment_borders
from upshift.models.tracing.symbolic_sizes import NotPolynomial, PlainSizes, PrimeSizes, prime_points

BLOCK_TRACE_LENGTH = 1024
COMPILED_TRACE_LENGTH = 256  # minimum; lengths up to here have a prime that differs from all widths
CHUNKED_TRACE_LENGTH = 512  # maximum; everything after the layers is linear in the tokens
DIVIDED_RANKS = 2  # a rank of one and a rank of two together show which parts are divided
IMAGE_ISOLATION = Isolation(reason="a processor writes each row with the images of its own")

logger = logging.getLogger(__name__)


def chunked_points(sequence_length: int) -> list[tuple[int, int]]:
    """Return points whose tokens fill one to four whole chunks.

    The loss is computed chunk by chunk, so points with partial chunks would give polynomials that are wrong elsewhere."""
    shortest = 1 << ((max(min(sequence_length, CHUNKED_TRACE_LENGTH), 8) // 2).bit_length() - 1)
    batch = LOSS_CHUNK_TOKENS // shortest
    return [(rows, length) for rows in (batch, 2 * batch) for length in (shortest, 2 * shortest)]


def step_tasks(
    tracer: Tracer, variants: tuple[Variant, ...], sequence_length: int, *, chunking: bool
) -> dict[str, Callable[[], FittedSegments | None]]:
    """Return the traces to make, by name. A trace raises RuntimeError if a rank's slice of the model does not run."""
    tasks: dict[str, Callable[[], FittedSegments | None]] = {}
    for variant in variants:
        for granularity in _granularities(tracer, variant):
            tasks[_trace_name(variant, granularity)] = partial(_trace_segments, tracer, variant, granularity, sequence_length)
        if chunking:  # the loss does not depend on the attention kernel
            tasks.setdefault(_chunked_name(variant), partial(_trace_chunked, tracer, variant, chunked_points(sequence_length)))
    return tasks


def assemble_steps(
    tracer: Tracer, variants: tuple[Variant, ...], traces: dict[str, FittedSegments], *, chunking: bool
) -> tuple[StepTrace, ...]:
    """Return one step for each variant, or two if the variant is ``divided``."""
    return tuple(step for variant in variants for step in _variant_steps(tracer, variant, traces, chunking=chunking))


def _trace_name(variant: Variant, granularity: Granularity | None) -> str:
    # The fields that are reset here do not change this trace: each other granularity has its own trace, and only the plain
    # trace (granularity None) holds the bytes of compiled layers.
    compiled = variant.compiled and granularity is None
    return f"{variant._replace(selective=False, alternate=False, compiled=compiled)} {granularity}"


def _chunked_name(variant: Variant) -> str:
    return f"chunked {variant.precision}"


def _granularities(tracer: Tracer, variant: Variant) -> list[Granularity | None]:
    if not tracer.base.supports_gradient_checkpointing:
        return [None]
    granularities: list[Granularity | None] = [None, "full"]
    if variant.selective:
        granularities.append("selective")
    if variant.alternate:
        granularities.append("alternate")
    return granularities


def _trace_segments(
    tracer: Tracer, variant: Variant, granularity: Granularity | None, sequence_length: int
) -> FittedSegments | None:
    """Trace every segment with all layers recomputed at this granularity. Return None if the layers do not support it."""
    # Block attention runs some ten operators a block. Its trace at a few blocks is exact for longer rows, too.
    points = trace_points(min(sequence_length, BLOCK_TRACE_LENGTH) if variant.attention == BLOCK_ATTENTION else sequence_length)
    degrees = (1, DIVIDED_RANKS) if variant.divided else (1,)
    try:
        segments = fit_primes(tracer, variant, granularity, sequence_length, degrees)
        segments = segments or fit_points(tracer, variant, granularity, points, degrees)
    except RuntimeError:
        if granularity not in ("selective", "alternate"):
            raise
        return None
    # Layers with block attention or 4-bit weights are never planned as compiled.
    may_compile = variant.compiled and variant.attention != BLOCK_ATTENTION and tracer.source.quantized_from is None
    if granularity is None and may_compile:
        for degree_index, ranks in enumerate(degrees):
            for name, saved_bytes in _compiled_layer_bytes(tracer, variant, sequence_length, ranks).items():
                segments[name][degree_index] = segments[name][degree_index].model_copy(update={"compiled": saved_bytes})
    return segments


def _compiled_layer_bytes(tracer: Tracer, variant: Variant, sequence_length: int, ranks: int) -> dict[str, Polynomial]:
    """Return the bytes that compiled layers save for the backward pass, by the layer's name.

    Layers that torch cannot trace as one graph are left out. Planning then takes the bytes of eager layers, which are more."""
    saved_bytes: dict[str, Polynomial] = {}
    try:
        batch, sequence = prime_points(max(sequence_length, COMPILED_TRACE_LENGTH), dimension_sizes(tracer))[0]
        calls = tracer.layer_calls(variant, batch=batch, sequence=sequence, ranks=ranks)
        for names, layers in zip(layer_names(tracer), calls, strict=True):
            by_signature: dict[str, Polynomial] = {}  # first, inner and last layers are often alike
            for name, (layer, call) in zip(names, layers, strict=True):
                signature = f"{layer_kind(layer)} {call_signature(call)}"
                if signature not in by_signature:
                    with tracer.fake, fake_masks(masked=variant.masked):
                        by_signature[signature] = compiled_saved_bytes(
                            layer, call, PrimeSizes(batch, sequence), autocast=variant.precision == "bf16"
                        )
                saved_bytes[name] = by_signature[signature]
    except Exception as error:  # layers and operators raise errors of many kinds
        logger.debug("compiled layers are taken to keep what eager ones do: %s", error)
    return saved_bytes


def _trace_chunked(tracer: Tracer, variant: Variant, points: list[tuple[int, int]]) -> FittedSegments:
    """Trace the last gap, with the loss computed in chunks."""
    measurements = [tracer.measure(variant, batch=b, sequence=s, chunked=True) for b, s in points]
    last = gap_names(tracer)[-1]
    return {last: fit_segment(points, [measurements], last, longest=points[-1][1])}


def _variant_steps(tracer: Tracer, variant: Variant, traces: dict[str, FittedSegments], *, chunking: bool) -> list[StepTrace]:
    gaps = gap_names(tracer)
    layers = layer_names(tracer)
    granularities = [
        granularity
        for granularity in _granularities(tracer, variant)
        if granularity is not None and _trace_name(variant, granularity) in traces
    ]

    def segments(granularity: Granularity | None, names: Iterable[str], degree_index: int) -> tuple[Segment, ...]:
        return tuple(traces[_trace_name(variant, granularity)][name][degree_index] for name in names)

    return [
        StepTrace(
            precision=variant.precision,
            attention=variant.attention,
            masked=variant.masked,
            tensor_parallel=ranks,
            gaps=segments(None, gaps, degree_index),
            gaps_recomputed={granularity: segments(granularity, gaps, degree_index) for granularity in granularities},
            chunked_gap=traces[_chunked_name(variant)][gaps[-1]][0] if chunking else None,
            stacks=tuple(
                StackTrace(
                    plain=segments(None, names, degree_index),
                    recomputed={granularity: segments(granularity, names, degree_index) for granularity in granularities},
                )
                for names in layers
            ),
        )
        for degree_index, ranks in enumerate((1, DIVIDED_RANKS) if variant.divided else (1,))
    ]


def trace_model(
    source: ModelSource,
    *,
    key: str,
    versions: dict[str, str],
    sequence_length: int,
    variants: tuple[Variant, ...],
    store: SegmentStore,
    progress: Callable[[int, int], None] = lambda done, total: None,
    chunked: bool = True,
) -> ModelProfile:
    """Measure every variant of the step, and return the model's profile.

    ``chunked``: also trace the loss in chunks. Raise RequestError if the model has fewer than ``sequence_length`` positions.
    Raise RequestError, with the name of the module, if the model cannot be traced."""
    if variants and "quantization_config" in source.config:
        check_quantization(source.config["quantization_config"], source.reference, adapter=source.adapter is not None)
    if variants:
        sequence_length_of(source, sequence_length)  # before the minute that tracing takes
    tracer = Tracer(source)
    points = trace_points(sequence_length)
    try:
        isolation = IMAGE_ISOLATION if source.images_per_row else isolation_of(source)
        check_token_ids(source, isolation)
        reason = _why_not_chunked(tracer)
        variants = choose_variants(tracer, variants, sequence_length, masks_padding=isolation.padding != "unmasked")
        division = _tensor_parallel_or_reason(tracer, variants, points[0])
        if isinstance(division, str):
            variants = tuple(variant._replace(divided=False) for variant in variants)
        chunking = chunked and reason is None
        steps = step_tasks(tracer, variants, sequence_length, chunking=chunking)
        model_tasks: list[Callable[[], Any]] = [
            partial(run, tracer, points) for run in (model_flops, _kv_elements, _cached_layers)
        ]
        description = _description(tracer)
        runs, traces = _run_tasks(model_tasks, steps, store, progress, compiled=any(variant.compiled for variant in variants))
        description["heads"] = heads_in_cache(description["heads"], runs.cache)
    except RequestError:
        raise
    except Exception as error:  # any operator may reject fake tensors; the user needs the module, not the traceback
        raise RequestError(why_untraceable(source, error)) from error
    return ModelProfile(
        key=key,
        model_hash=source.model_hash,
        versions=versions,
        **description,
        isolation=isolation,
        parameters=_count_parameters(tracer),
        stacks=tuple(Stack(**vars(stack)) for stack in tracer.stacks),
        steps=assemble_steps(tracer, variants, traces, chunking=chunking),
        sequence_range=(points[0][1], sequence_length),
        kv_elements=runs.kv_elements,
        cache=runs.cache,
        tensor_parallel=None if isinstance(division, str) else division,
        tensor_parallel_reason=division if isinstance(division, str) else "the model declares which weights ranks share",
        chunked_loss_reason=reason or "the head is a plain linear layer, and its logits reach cross entropy in a known way",
        forward_flops=runs.forward_flops,
        backward_flops=runs.backward_flops,
        images=_measure_images(tracer),
    )


def _measure_images(tracer: Tracer) -> Images | None:
    number = tracer.source.images_per_row
    if not number:
        return None
    tracer.model(torch.float32)
    with tracer.running(masked=False):
        return measure_images(tracer.base, number)


def _run_tasks(
    model_tasks: list[Callable[[], Any]],
    steps: dict[str, Callable[[], Any]],
    store: SegmentStore,
    progress: Callable[[int, int], None],
    *,
    compiled: bool,
) -> tuple[ModelRuns, dict[str, FittedSegments]]:
    """Run the ``model_tasks`` (FLOPs, keys and values, cached layers) and the ``steps``, except for those that the store has.

    Steps that cannot be traced are left out of the traces."""
    runs = store.get_runs()
    traces = {name: segments for name in steps if (segments := store.get(name)) is not None}
    missing = [name for name in steps if name not in traces]
    if compiled and missing:
        load_partition()
    num_stored = len(traces)
    tasks = [*(steps[name] for name in missing), *(model_tasks if runs is None else ())]  # the longest tasks first
    results = run_forked(tasks, progress=lambda done: progress(num_stored + done, num_stored + len(tasks)))
    for name, traced in zip(missing, results, strict=False):
        if traced is not None:
            traces[name] = traced
            store.put(name, traced)
    if runs is None:
        (forward_flops, backward_flops), kv_elements, cache = results[len(missing) :]
        runs = ModelRuns(forward_flops=forward_flops, backward_flops=backward_flops, kv_elements=kv_elements, cache=cache)
        store.put_runs(runs)
    return runs, traces


def _description(tracer: Tracer) -> dict[str, Any]:
    """Return the profile's fields that follow from the config and the modules, without running the model."""
    text = tracer.config.get_text_config()
    return {
        "architecture": tracer.model_class.__name__,
        "model_type": tracer.config.model_type,
        "objective": tracer.objective,
        "vocab_size": getattr(text, "vocab_size", None),
        "hidden_size": getattr(text, "hidden_size", None),
        "max_positions": max_positions(tracer.base),
        "declares": declarations(tracer.base),
        "experts": _count_experts(tracer),
        "heads": attention_heads(tracer.base),
    }


def _count_experts(tracer: Tracer) -> Experts | None:
    tracer.model(torch.float32).train(False)
    batch, sequence = trace_points(1)[0]
    inputs = partial(tracer.inputs, tracer.base, batch=batch, sequence=sequence, masked=False)
    with tracer.running(masked=False):
        per_token = experts_per_token(tracer.base, inputs)
    tracer.model(torch.float32).train()
    # The full model is made outside of the fake mode, because a class may compute with real numbers in its constructor.
    return sum_experts(base_of(tracer.whole_model(torch.float32)), tracer.base, per_token) if per_token else None


def choose_variants(
    tracer: Tracer, variants: tuple[Variant, ...], sequence_length: int, *, masks_padding: bool
) -> tuple[Variant, ...]:
    """Return the variants whose kernels the model has, without those that another variant makes unnecessary.

    - ``sdpa`` with a mask is left out if block attention serves a causal model's packed rows, unless its padded rows need a
      mask, too (``masks_padding``).
    - ``block`` is left out if the model never calls it, and for rows shorter than one block, unless rows are packed.
    - ``eager`` takes the place of ``sdpa`` in a model that has no ``sdpa``."""
    kernels = attention_kernels(tracer.base)
    if "sdpa" not in kernels:
        variants = with_eager_attention(variants)
    has_other_kernel = any(variant.attention in kernels and variant.attention != BLOCK_ATTENTION for variant in variants)
    packs_rows = any(variant.masked and variant.attention == BLOCK_ATTENTION for variant in variants)
    is_short = has_other_kernel and not packs_rows and sequence_length < BLOCK_QUERIES
    block_variant = next(
        (v for v in variants if v.attention == BLOCK_ATTENTION and BLOCK_ATTENTION in kernels and not is_short), None
    )
    block_is_used = block_variant is not None and _uses_block_attention(tracer, block_variant, trace_points(sequence_length)[0])
    chosen = []
    for variant in variants:
        needless = {
            "sdpa": variant.masked and block_is_used and tracer.objective == "causal-lm" and not masks_padding,
            "block": not block_is_used,
        }
        if variant.attention in kernels and not needless.get(variant.attention, False):
            chosen.append(variant)
    return tuple(chosen)


def _uses_block_attention(tracer: Tracer, variant: Variant, point: tuple[int, int]) -> bool:
    """Return whether block attention computes anything in this model. It leaves some cases to ``sdpa``."""
    measurement = tracer.measure(variant, batch=point[0], sequence=point[1])
    return any(interval.traced_operators for interval in measurement.forward.values())


def _tensor_parallel_or_reason(tracer: Tracer, variants: tuple[Variant, ...], point: tuple[int, int]) -> TensorParallel | str:
    """Return the parts that tensor parallelism divides, or the reason why it cannot be planned.

    A rank's slice of the model is run to confirm it. Without variants nothing is run, and the answer is the model's
    declaration."""
    if tracer.source.quantized_from is not None:
        return "its 4-bit weights are packed whole, and no rank can have a slice of them"
    divided_variant = next((variant for variant in variants if variant.divided), None)
    if divided_variant is None and variants:
        return "it was not asked for: one device has nothing to divide"
    answer = describe_tensor_parallel(base_of(tracer.whole_model(torch.float32)))
    if divided_variant is None:
        return answer
    if isinstance(answer, str) or answer.divisor % DIVIDED_RANKS:
        return answer if isinstance(answer, str) else f"its heads or widths are not divisible by {DIVIDED_RANKS}"
    try:
        tracer.measure(divided_variant, batch=point[0], sequence=point[1], ranks=DIVIDED_RANKS)
    except (RuntimeError, AssertionError) as error:  # torch.nn.functional asserts the sizes that it gets
        return f"a rank's slice of the model does not run: {' '.join(str(error).split())[:160]}"
    return answer


def _why_not_chunked(tracer: Tracer) -> str | None:
    """Return why the loss cannot be computed in chunks, or None if it can."""
    if tracer.source.images_per_row:
        return "rows with images are trained by programs that compute their loss at once"
    base = tracer.base
    batch, sequence = trace_points(1)[0]  # the shortest point will do, since every chunk behaves alike
    with fake_masks(masked=False), tracer.fake:
        inputs = sample_inputs(base, tracer.objective, batch=batch, sequence=sequence, masked=False)
        return why_not_chunked(base, inputs)


def _count_parameters(tracer: Tracer) -> Parameters:
    always_fp32 = 0
    if tracer.source.adapter is not None:  # peft keeps the parameters that it adds to bf16 weights in fp32
        trained = [p for p in tracer.whole_model(torch.bfloat16).parameters() if p.requires_grad]
        always_fp32 = sum(p.numel() for p in trained if p.dtype == torch.float32)
    paths = tuple(stack.path for stack in tracer.stacks)
    return count_parameters(tracer.whole_model(torch.float32), paths, always_fp32=always_fp32)


def _kv_elements(tracer: Tracer, points: list[tuple[int, int]]) -> Polynomial | None:
    """Return the elements of keys and values in the whole model's cache, or None if the model does not generate.

    Two runs with prime sizes give the polynomial. A cache with a sliding window is no polynomial, and is fitted to all points
    instead."""
    answers: set[Polynomial] = set()
    for point in prime_points(points[-1][1], dimension_sizes(tracer)):
        cache = _filled_cache(tracer, point)
        if cache is None:
            return None
        if any(getattr(layer, "sliding_window", None) is not None for layer in cache.layers):
            break
        try:
            answers.add(fit_single([point], [_cached_elements(tracer, cache, PrimeSizes(*point))]))
        except NotPolynomial:
            break
    else:
        if len(answers) == 1:
            return answers.pop()
    caches = [_filled_cache(tracer, point) for point in points]
    if any(cache is None for cache in caches):
        return None
    return fit_single(points, [_cached_elements(tracer, cache, PlainSizes()) for cache in caches])


def _cached_elements(tracer: Tracer, cache: Any, sizes: PlainSizes | PrimeSizes) -> Any:
    """Return the elements of the keys and values of all layers of the full model."""
    per_layer = [
        sum((sizes.elements(tensor.shape, 1) for tensor in _keys_and_values(layer)), sizes.zero) for layer in cache.layers
    ]
    return sum((per_layer[index] for index in _cached_layer_indices(tracer, cache)), sizes.zero)


def _cached_layers(tracer: Tracer, points: list[tuple[int, int]]) -> tuple[CachedLayers, ...]:
    """Return the layers that have a cache, in groups of equal sizes.

    Unlike the polynomial of _kv_elements, this stays exact for rows longer than a sliding window."""
    cache = _filled_cache(tracer, points[0])
    if cache is None:
        return ()
    counts = Counter(_cache_sizes(cache.layers[index], points[0][0]) for index in _cached_layer_indices(tracer, cache))
    return tuple(
        CachedLayers(count=count, per_token=per_token, per_sequence=per_sequence, heads=heads, window=window)
        for (per_token, per_sequence, heads, window), count in counts.items()
        if per_token or per_sequence
    )


def _filled_cache(tracer: Tracer, point: tuple[int, int]) -> Any:
    """Return the cache of the cut model after one forward pass, or None if it does not generate."""
    model = tracer.model(torch.float32)
    if not tracer.base.can_generate():
        return None
    model.train(False)
    with fake_masks(masked=False), tracer.fake, torch.no_grad():
        inputs = sample_inputs(tracer.base, tracer.objective, batch=point[0], sequence=point[1], masked=False)
        if tracer.base.config.is_encoder_decoder:  # as generate does: an encoder has no cache, and some refuse use_cache
            encoder_inputs = {name: value for name, value in inputs.items() if name != "labels"}
            inputs["encoder_outputs"] = tracer.base.get_encoder()(**encoder_inputs, return_dict=True)
        cache = returned_cache(model(**inputs, use_cache=True))
    model.train()
    return getattr(cache, "self_attention_cache", cache)


def _cached_layer_indices(tracer: Tracer, cache: Any) -> Sequence[int]:
    """Return the index of the cached layer that represents each layer of the full model.

    The cache has an entry for every layer of the config. The cut model fills the first ones."""
    stack = tracer.stacks[-1] if tracer.stacks else None
    return stack.assignment if stack and len(cache.layers) >= len(stack.traced_layers) else range(len(cache.layers))


def _keys_and_values(layer: Any) -> list[torch.Tensor]:
    tensors = (getattr(layer, "keys", None), getattr(layer, "values", None))
    return [tensor for tensor in tensors if tensor is not None and tensor.numel()]


def _cache_sizes(layer: Any, batch: int) -> tuple[int, int, int, int | None]:
    """Return a layer's cached elements for each token, its elements for each sequence, its heads, and its window."""
    per_token = sum(tensor.numel() // (batch * tensor.shape[-2]) for tensor in _keys_and_values(layer))
    states = [state for name in ("conv_states", "recurrent_states") for state in (getattr(layer, name, None) or {}).values()]
    per_sequence = sum(state.numel() // batch for state in states if state is not None)
    heads = min((tensor.shape[1] for tensor in _keys_and_values(layer)), default=1)
    return per_token, per_sequence, heads, getattr(layer, "sliding_window", None)


def model_flops(tracer: Tracer, points: list[tuple[int, int]]) -> tuple[Polynomial, Polynomial]:
    """Return the FLOPs of the model's own mathematics, forward and backward, without recomputation.

    The model runs in evaluation mode with fused attention: dropout would decompose attention and hide that it is causal.
    FLOPs that a fused backward pass repeats are left out."""
    model = tracer.model(torch.float32)
    if "sdpa" in attention_kernels(tracer.base):
        tracer.base.set_attn_implementation("sdpa")
    recompute_layers(model, 0)
    model.train(False)

    def fit(points: list[tuple[int, int]], sizes: Callable[[int, int], Any]) -> tuple[Polynomial, Polynomial]:
        flops_at_points = [_flops_at(tracer, model, *point, sizes(*point)) for point in points]
        forward, backward = zip(*flops_at_points, strict=True)
        return fit_single(points, forward), fit_single(points, backward)

    try:
        primes = () if tracer.runs_each_image else prime_points(points[-1][1], dimension_sizes(tracer))
        answers = {fit([point], PrimeSizes) for point in primes}
    except NotPolynomial:
        answers = set()
    flops = answers.pop() if len(answers) == 1 else fit(points, lambda batch, sequence: PlainSizes())
    model.train()
    return flops


def _flops_at(tracer: Tracer, model: nn.Module, batch: int, sequence: int, sizes: PlainSizes | PrimeSizes) -> tuple[Any, Any]:
    with (
        tracer.running(masked=False),
        LiveTracker(sizes) as tracker,
        segment_borders(model, tracer.stacks, tracker) as borders,
    ):
        borders.start("forward")
        loss = model(**tracer.inputs(model, batch=batch, sequence=sequence, masked=False)).loss
        borders.start("backward")
        loss.backward()
        tracker.border(None)
    model.zero_grad(set_to_none=True)
    totals = {"forward": sizes.zero, "backward": sizes.zero}
    for name, interval in tracker.intervals:
        matrix_flops = interval.matmul_flops + interval.attention_flops - interval.repeated_flops
        phase = name.split()[0]
        totals[phase] = totals[phase] + matrix_flops * _num_layers_represented(tracer.stacks, name)
    return totals["forward"], totals["backward"]


def _num_layers_represented(stacks: list[LayerStack], name: str) -> int:
    """Return how many layers of the full model this interval's layer represents, or 1 for a gap."""
    fields = name.split()
    if fields[1] != "layer":
        return 1
    return stacks[int(fields[2])].assignment.count(int(fields[3]))
