"""Runs the real, unmodified model on fake tensors at a few (batch, sequence) points and fits its segments' polynomials.

Nothing is allocated and no accelerator is needed: the tensors are fake CPU tensors, on which fused attention keeps its
flash-like memory (on ``meta`` it would be decomposed). Inputs: a config. Ignored: kernel-internal scratch (measured below
1.1 % of the peak), torch.compile (its memory is at most the eager one).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from upshift.errors import RequestError
from upshift.models.block_attention import NAME
from upshift.models.build import LayerStack, sample_inputs
from upshift.models.chunked_loss import why_not_chunked
from upshift.models.describe import attention_kernels, count_parameters, declarations, max_positions, why_untraceable
from upshift.models.fit import Measurement, fit_segment, fit_single
from upshift.models.measure import Tracer, fake_masks, segment_borders
from upshift.models.profile import (
    LOSS_CHUNK_TOKENS,
    ModelProfile,
    Parameters,
    Polynomial,
    Segment,
    Stack,
    StackTrace,
    StepTrace,
)
from upshift.models.recompute import recompute_layers
from upshift.models.source import ModelSource
from upshift.models.store import Variant
from upshift.models.tracker import LiveTracker

BLOCK_TRACE_LENGTH = 1024
CHUNKED_TRACE_LENGTH = 512  # all that comes after the layers is linear in the tokens
EAGER_ATTENTION_LIMIT = 256  # measured in docs/log.md
BATCHES = (2, 3)  # 1 is avoided: broadcasting makes it a special case of many kernels


def trace_model(
    source: ModelSource,
    *,
    key: str,
    versions: dict[str, str],
    sequence_length: int,
    variants: tuple[Variant, ...],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ModelProfile:
    """Measure every variant and fit. Raises RequestError naming the module that cannot be traced."""
    tracer = Tracer(source)
    points = trace_points(sequence_length)
    try:
        reason = _chunking(tracer, points[0])
        variants = choose_variants(tracer, variants, sequence_length)
        steps = _trace_steps(tracer, variants, sequence_length, chunking=reason is None, progress=progress)
        forward_flops, backward_flops = _model_flops(tracer, points)
        kv = _kv_elements(tracer, points)
    except RequestError:
        raise
    except Exception as error:  # any operator may refuse fake tensors; the user needs the module, not the traceback
        raise RequestError(why_untraceable(source, error)) from error
    return ModelProfile(
        key=key,
        model_hash=source.model_hash,
        architecture=tracer.model_class.__name__,
        model_type=tracer.config.model_type,
        objective=tracer.objective,
        versions=versions,
        vocab_size=getattr(tracer.config.get_text_config(), "vocab_size", None),
        hidden_size=getattr(tracer.config.get_text_config(), "hidden_size", None),
        max_positions=max_positions(tracer.base),
        parameters=_count_parameters(tracer),
        declares=declarations(tracer.base),
        stacks=tuple(
            Stack(path=s.path, traced_layers=s.kept, assignment=s.assignment, layer_trainable=s.layer_trainable)
            for s in tracer.stacks
        ),
        steps=tuple(steps),
        sequence_range=(points[0][1], sequence_length),
        kv_elements=kv,
        chunked_loss_reason=reason or "the head is a plain linear layer, and its logits reach cross entropy in a known way",
        forward_flops=forward_flops,
        backward_flops=backward_flops,
    )


def choose_variants(tracer: Tracer, variants: tuple[Variant, ...], sequence_length: int) -> tuple[Variant, ...]:
    """Those whose kernels the model has, and none that another one makes needless: where block attention is reached, a
    causal model's packed rows take it; at length, ``eager`` is no faster than the others and holds its score matrices."""
    kernels = attention_kernels(tracer.base)
    block = next((v for v in variants if v.attention == NAME and NAME in kernels), None)
    reached = block is not None and _reaches_block(tracer, block, trace_points(sequence_length)[0])
    chosen = []
    for variant in variants:
        needless = {
            "sdpa": variant.masked and reached and tracer.objective == "causal-lm",
            "block": not reached,
            "eager": "sdpa" in kernels and sequence_length > EAGER_ATTENTION_LIMIT,
        }
        if variant.attention in kernels and not needless[variant.attention]:
            chosen.append(variant)
    return tuple(chosen)


def _reaches_block(tracer: Tracer, variant: Variant, point: tuple[int, int]) -> bool:
    """Block attention leaves to ``sdpa`` what it does not compute; then it is no choice of its own."""
    measurement = tracer.measure(variant, batch=point[0], sequence=point[1], recompute=False, chunked=False)
    return any(interval.used for interval in measurement.forward.values())


def trace_points(sequence_length: int) -> list[tuple[int, int]]:
    return [(batch, sequence) for batch in BATCHES for sequence in trace_lengths(sequence_length)]


def trace_lengths(sequence_length: int) -> tuple[int, int, int]:
    """Three lengths up to the one asked for; a quadratic through them is exact between them."""
    return max(sequence_length // 4, 3), max(sequence_length // 2, 5), max(sequence_length, 8)


def chunked_points(sequence_length: int) -> list[tuple[int, int]]:
    """Of one to two chunks or little more, as few as may be: below a chunk the buffers are smaller than polynomials can say."""
    longest = max(min(sequence_length, CHUNKED_TRACE_LENGTH), 8)
    lengths = (longest // 2, longest * 3 // 4, longest)
    batch = max(-(-LOSS_CHUNK_TOKENS // lengths[0]), BATCHES[0])
    return [(rows, length) for rows in (batch, batch + 1) for length in lengths]


def _trace_steps(
    tracer: Tracer, variants: tuple[Variant, ...], sequence_length: int, *, chunking: bool, progress: Callable[[int, int], None]
) -> list[StepTrace]:
    chunked: dict[str, Segment] = {}  # by precision: the loss is the same beside any attention
    steps = []
    for number, variant in enumerate(variants):
        if chunking and variant.precision not in chunked:
            chunked[variant.precision] = _trace_chunked(tracer, variant, chunked_points(sequence_length))
        steps.append(_trace_step(tracer, variant, chunked.get(variant.precision), sequence_length))
        progress(number + 1, len(variants))
    return steps


def _trace_step(tracer: Tracer, variant: Variant, chunked_gap: Segment | None, sequence_length: int) -> StepTrace:
    """Plain, and with every layer recomputed where the model offers it."""
    recompute = tracer.base.supports_gradient_checkpointing
    # Block attention runs some ten operators a block: traced at lengths of a few blocks, it is as exact beyond.
    points = trace_points(min(sequence_length, BLOCK_TRACE_LENGTH) if variant.attention == NAME else sequence_length)
    plain, recomputed = [], []
    for batch, sequence in points:
        plain.append(tracer.measure(variant, batch=batch, sequence=sequence, recompute=False, chunked=False))
        if recompute:
            recomputed.append(tracer.measure(variant, batch=batch, sequence=sequence, recompute=True, chunked=False))

    def fit(measurements: list[Measurement], names: list[str]) -> tuple[Segment, ...]:
        return tuple(fit_segment(points, measurements, name) for name in names if measurements)

    layers = [[f"layer {n} {position}" for position in range(len(stack.kept))] for n, stack in enumerate(tracer.stacks)]
    gaps = [f"gap {number}" for number in range(len(tracer.stacks) + 1)]
    return StepTrace(
        precision=variant.precision,
        attention=variant.attention,
        masked=variant.masked,
        gaps=fit(plain, gaps),
        gaps_recomputed=fit(recomputed, gaps),
        chunked_gap=chunked_gap,
        stacks=tuple(StackTrace(plain=fit(plain, names), recomputed=fit(recomputed, names)) for names in layers),
    )


def _trace_chunked(tracer: Tracer, variant: Variant, points: list[tuple[int, int]]) -> Segment:
    """The last gap with the loss computed in chunks."""
    measurements = [tracer.measure(variant, batch=b, sequence=s, recompute=False, chunked=True) for b, s in points]
    return fit_segment(points, measurements, f"gap {len(tracer.stacks)}")


def _chunking(tracer: Tracer, point: tuple[int, int]) -> str | None:
    base = tracer.base  # made on the meta device, which is none for fake tensors
    with fake_masks(masked=False), tracer.fake:
        inputs = sample_inputs(base, tracer.objective, batch=point[0], sequence=point[1], masked=False)
        return why_not_chunked(base, inputs)


def _count_parameters(tracer: Tracer) -> Parameters:
    always_fp32 = 0
    if tracer.source.adapter is not None:  # peft casts what it adds to bf16 weights up
        trained = [p for p in tracer.whole(torch.bfloat16).parameters() if p.requires_grad]
        always_fp32 = sum(p.numel() for p in trained if p.dtype == torch.float32)
    paths = tuple(stack.path for stack in tracer.stacks)
    return count_parameters(tracer.whole(torch.float32), paths, always_fp32=always_fp32)


def _model_flops(tracer: Tracer, points: list[tuple[int, int]]) -> tuple[Polynomial, Polynomial]:
    """Of forward and backward, in evaluation mode with fused attention: dropout would decompose attention and hide that it
    is causal. What a fused backward computes again is left out."""
    model = tracer.model(torch.float32)
    if "sdpa" in attention_kernels(tracer.base):
        tracer.base.set_attn_implementation("sdpa")
    recompute_layers(model, 0)
    model.train(False)
    totals: dict[str, list[int]] = {"forward": [], "backward": []}
    for batch, sequence in points:
        with fake_masks(masked=False), tracer.fake, LiveTracker() as tracker:
            inputs = sample_inputs(tracer.base, tracer.objective, batch=batch, sequence=sequence, masked=False)
            with segment_borders(model, tracer.stacks, tracker) as borders:
                borders.start("forward")
                loss = model(**inputs).loss
                borders.start("backward")
                loss.backward()
                tracker.border(None)
        model.zero_grad(set_to_none=True)
        for phase, flops in totals.items():
            flops.append(
                sum(
                    (interval.matmul_flops + interval.attention_flops - interval.repeated_flops)
                    * _layers_like(tracer.stacks, name)
                    for name, interval in tracker.intervals
                    if name.startswith(phase)
                )
            )
    model.train()
    return fit_single(points, totals["forward"]), fit_single(points, totals["backward"])


def _layers_like(stacks: list[LayerStack], name: str) -> int:
    """How many layers of the full model an interval's layer stands for; 1 for a gap."""
    words = name.split()
    if words[1] != "layer":
        return 1
    return stacks[int(words[2])].assignment.count(int(words[3]))


def _kv_elements(tracer: Tracer, points: list[tuple[int, int]]) -> Polynomial | None:
    model = tracer.model(torch.float32)
    if not tracer.base.can_generate():
        return None
    totals = []
    model.train(False)
    for batch, sequence in points:
        with fake_masks(masked=False), tracer.fake, torch.no_grad():
            inputs = sample_inputs(tracer.base, tracer.objective, batch=batch, sequence=sequence, masked=False)
            cache = getattr(model(**inputs, use_cache=True), "past_key_values", None)
        if cache is None:
            return None
        cache = getattr(cache, "self_attention_cache", cache)
        stack = tracer.stacks[-1] if tracer.stacks else None
        per_layer = [
            sum(t.numel() for t in (getattr(layer, "keys", None), getattr(layer, "values", None)) if t is not None)
            for layer in cache.layers
        ]
        assigned = stack.assignment if stack and len(per_layer) == len(stack.kept) else range(len(per_layer))
        totals.append(sum(per_layer[index] for index in assigned))
    model.train()
    return fit_single(points, totals)
