"""Define the formats of weights and of cached keys and values: bytes with their scales, compute precision, read speed."""

from __future__ import annotations

from typing import Literal, NamedTuple

from upshift.hardware.spec import Precision as MatrixPrecision

WeightPrecision = Literal["fp32", "bf16", "fp16", "fp8", "int8", "int4"]
CachePrecision = Literal["fp32", "bf16", "fp16", "fp8", "int8"]

# Choices that change the mathematics, by the name the user allows them with.
CHANGES_MATHEMATICS: dict[str, str] = {
    "fp8-weights": "matrix products of the layers in fp8, weights scaled by output, activations by token",
    "int8-weights": "weights of the layers' matrices rounded to 8 bits, scaled by output",
    "int4-weights": "weights of the layers' matrices rounded to 4 bits, scaled by group",
    "fp8-kv": "cached keys and values in fp8",
    "int8-kv": "cached keys and values in 8 bits, scaled by token and head",
}


class WeightFormat(NamedTuple):
    weight_bytes: float  # of one weight of a layer's matrix, without its scale
    scale_bytes: float  # of one scale, zero point included
    grouped: bool  # one scale for a group of inputs of an output; else one for an output
    computes: MatrixPrecision
    read_share: float  # of the bandwidth that plain weights reach
    product_share: float  # of the matrix products' efficiency in ``computes``
    allow: str | None


# Shares of what plain weights reach.
# fp8: vLLM 0.13's prefill of Llama-3.1-8B on an H100 is 1.46 times as fast in fp8 (rowwise) as in bf16, with twice the peak
# (torchao README, commit 36027d8): 0.73, the scaling of activations included.
# int8, int4, read: gpt-fast's Llama-2-7B at batch 1 on an A100 takes 0.674 of bf16's time with 8 bits and 0.533 with 4 bits
# (groups of 32, 5 bits a weight with scale and zero point): 0.75 and 0.59 of the bytes a second.
# int8, int4, products: weights are dequantized to bf16 on their way. 0.9 is assumed, for kernels that fuse this; the one
# measurement at hand, vLLM's int8 without fusing at 128 sequences, is less than half as fast as predicted with it.
WEIGHTS: dict[WeightPrecision, WeightFormat] = {
    "fp32": WeightFormat(4.0, 0.0, False, "fp32", 1.0, 1.0, None),
    "bf16": WeightFormat(2.0, 0.0, False, "bf16", 1.0, 1.0, None),
    "fp16": WeightFormat(2.0, 0.0, False, "fp16", 1.0, 1.0, None),
    "fp8": WeightFormat(1.0, 4.0, False, "fp8", 1.0, 0.73, "fp8-weights"),
    "int8": WeightFormat(1.0, 2.0, False, "bf16", 0.75, 0.9, "int8-weights"),
    "int4": WeightFormat(0.5, 4.0, True, "bf16", 0.59, 0.9, "int4-weights"),
}

CACHE_BYTES: dict[CachePrecision, float] = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0}
CACHE_SCALE_BYTES: dict[CachePrecision, float] = {"int8": 4.0}  # of one vector: a head's keys, or values, of one token
CACHE_ALLOW: dict[CachePrecision, str] = {"fp8": "fp8-kv", "int8": "int8-kv"}


def plain_bytes(weights: WeightPrecision) -> int:
    """Return the bytes of one activation, and of one weight that is not quantized: embedding, head, norms and biases."""
    return 4 if weights == "fp32" else 2
