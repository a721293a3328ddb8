"""Compute the bytes of a sequence's cached keys and values, and what attention computes over them.

Layers with a sliding window keep and read no more than the window.
"""

from __future__ import annotations

from upshift.models.profile import CachedLayers, ModelProfile
from upshift.planning.inference.formats import CACHE_BYTES, CACHE_SCALE_BYTES, CachePrecision


def cached_bytes(profile: ModelProfile, precision: CachePrecision, tokens: int, *, ranks: int = 1) -> float:
    """Return the bytes of a sequence of ``tokens`` in all layers, on one of ``ranks`` tensor-parallel devices."""
    return sum(layers.count * _bytes(layers, precision, min(tokens, layers.window or tokens), ranks) for layers in profile.cache)


def mean_read_bytes(profile: ModelProfile, precision: CachePrecision, start: int, steps: int, *, ranks: int = 1) -> float:
    """Return the ``cached_bytes`` that a decode step reads, in the mean of ``steps`` steps that begin with ``start`` tokens."""
    return sum(
        layers.count * _bytes(layers, precision, mean_visible(layers.window, start, steps), ranks) for layers in profile.cache
    )


def mean_visible(window: int | None, start: int, steps: int) -> float:
    """Return how many tokens a new one sees, in the mean of steps over which the sequence grows from ``start`` by one each."""
    end = start + max(steps, 1)
    if window is None or end <= window:
        return (start + end) / 2
    if start >= window:
        return float(window)
    growing = window - start
    return (growing * (start + window) / 2 + (end - window) * window) / (end - start)


def prompt_attention_flops(profile: ModelProfile, tokens: int) -> float:
    """Return the FLOPs of attention over a prompt; one multiply-add = 2 FLOPs.

    They are as the trace counted them, with causal attention as half. Models with windows are counted from the cached elements:
    kernels skip what is outside a window, and a trace of few tokens does not reach that far.
    """
    if not _has_windows(profile):
        return profile.forward_flops.bss * tokens * tokens
    return sum(
        layers.count * _pair_flops(profile, layers) * tokens * mean_visible(layers.window, 0, tokens) for layers in profile.cache
    )


def decode_attention_flops(profile: ModelProfile, start: int, steps: int) -> float:
    """Return the FLOPs of attention for one token, in the mean of ``steps``."""
    if not _has_windows(profile):
        return 2.0 * profile.forward_flops.bss * mean_visible(None, start, steps)
    return sum(
        layers.count * _pair_flops(profile, layers) * mean_visible(layers.window, start, steps) for layers in profile.cache
    )


def _has_windows(profile: ModelProfile) -> bool:
    return any(layers.window is not None for layers in profile.cache)


def _pair_flops(profile: ModelProfile, layers: CachedLayers) -> float:
    """Return the FLOPs for a query token and a cached one: every query head multiplies one head of keys and one of values."""
    queries = profile.heads[0] if profile.heads else layers.heads
    return 2.0 * layers.per_token * queries / layers.heads


def _bytes(layers: CachedLayers, precision: CachePrecision, tokens: float, ranks: int) -> float:
    """Return the bytes of one layer's cache on a rank.

    Ranks share heads. A single head, such as the compressed keys and values of latent attention, is on each of them.
    """
    vectors = 2 * layers.heads * tokens * (CACHE_SCALE_BYTES.get(precision, 0.0) if layers.per_token else 0.0)
    # States of recurrences are summed into at every step: they stay in 16 bits beside a quantized cache.
    state = layers.per_sequence * max(CACHE_BYTES[precision], 2.0)
    return (layers.per_token * tokens * CACHE_BYTES[precision] + vectors) / min(ranks, layers.heads) + state / ranks
