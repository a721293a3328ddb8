"""Count FLOPs of a model's own mathematics, forward and backward, without what a plan recomputes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from upshift.models.build import LayerStack, sample_inputs
from upshift.models.describe import attention_kernels
from upshift.models.ops.activation_checkpointing import recompute_layers
from upshift.models.profile import Polynomial
from upshift.models.tracing.op_counter import LiveTracker
from upshift.models.tracing.polynomials import fit_single
from upshift.models.tracing.segments import Tracer, fake_masks, segment_borders
from upshift.models.tracing.symbolic_sizes import Counted, NotPolynomial, OfPrimes, prime_points
from upshift.models.tracing.trace import widths


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
