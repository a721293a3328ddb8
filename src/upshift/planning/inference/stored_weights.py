"""Plan for weights that are quantized already: their precision and groups, as the model's config declares them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from upshift.hardware.spec import Host
from upshift.planning.inference.plan import WEIGHTS, InferenceWorkload, WeightPrecision
from upshift.planning.inference.space import legal_weights

ONE_GROUP = 2**31  # more inputs than a matrix has: each output has one scale


class StoredWeights(NamedTuple):
    """The precision of quantized weights, and how many of them share a scale. ``group_size`` is None for other than 4 bits."""

    weights: WeightPrecision
    group_size: int | None = None


def read_stored_weights(config: Mapping[str, Any]) -> StoredWeights | None:
    """Return the precision of a model's quantized weights, or None if they are plain, or if the planner has no such precision."""
    stored = config.get("quantization_config") or {}
    groups = stored.get("config_groups")  # of compressed-tensors
    if isinstance(groups, Mapping):
        kinds = {_precision_of_weights((group or {}).get("weights") or {}) for group in groups.values()}
        return kinds.pop() if len(kinds) == 1 else None
    if "fp8" in str(stored.get("quant_method")):
        return StoredWeights("fp8")
    bits = stored.get("bits") or 4 * bool(stored.get("load_in_4bit")) or 8 * bool(stored.get("load_in_8bit"))
    return _precision_of_weights({"num_bits": bits, "group_size": stored.get("group_size")})


def _precision_of_weights(weights: Mapping[str, Any]) -> StoredWeights | None:
    bits = weights.get("num_bits")
    is_float = weights.get("type") == "float"
    if bits == 8:
        return StoredWeights("fp8" if is_float else "int8")
    if bits != 4 or is_float:
        return None
    size = weights.get("group_size")
    return StoredWeights("int4", size if isinstance(size, int) and size > 0 else ONE_GROUP)


def fix_stored_weights(
    config: Mapping[str, Any], host: Host, workload: InferenceWorkload, fixed: tuple[str, ...]
) -> tuple[InferenceWorkload, tuple[str, ...]] | None:
    """Return the workload and the fixed fields for weights as they are stored.

    Return None if the weights are plain, if the user fixes other weights, or if the host cannot compute with the stored ones."""
    stored = read_stored_weights(config)
    if stored is None or any(text.partition("=")[0] in ("weights", "group_size") for text in fixed):
        return None
    allow = WEIGHTS[stored.weights].allow
    allowed = workload if allow is None or allow in workload.allow else workload.changed(allow=(*workload.allow, allow))
    if stored.weights not in legal_weights(host, allowed):
        return None
    groups = () if stored.group_size is None else (f"group_size={stored.group_size}",)
    return allowed, (*fixed, f"weights={stored.weights}", *groups)
