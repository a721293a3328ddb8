"""Estimate the profile of a decoder from its sizes: the table says how each cost of a layer grows with them.

The table (decoder.json) was fitted to traces of eight decoders (benchmarks/estimation/fit.py). FLOPs, bytes that stay and traffic
follow from the sizes exactly; the highest moment inside a layer does so roughly.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from math import gcd, prod
from pathlib import Path
from typing import Any

from upshift.errors import RequestError
from upshift.models.estimation.sizes import LEAVE_OUT, DecoderSizes, positions_in_config, sizes_of
from upshift.models.profile import (
    CachedLayers,
    Declares,
    Isolation,
    ModelProfile,
    Parameters,
    ParameterShape,
    Polynomial,
    Stack,
    StepTrace,
    TensorParallel,
)
from upshift.models.source import ModelSource

TABLE = Path(__file__).parent / "decoder.json"
SHORTEST = 64  # tokens; from there on the costs are polynomials
NF4_BYTES = 0.516  # of a weight in 4 bits with its scales
SUM = "+"  # marks a sum in the table
TOLERATED = 0.01  # difference of the parameters in the files: biases, and norms of queries and keys
UNTESTED = "a quick plan does not test it"


def estimate_profile(source: ModelSource, *, sequence_length: int, shapes: Mapping[str, Sequence[int]]) -> ModelProfile:
    """Return the profile of the source's model.

    Raise RequestError for a model that the table is not for. ``shapes``: of the tensors in its files; empty: there are none.
    """
    sizes = sizes_of(source)
    _check_files(sizes, shapes, source.reference)
    kind = "full" if source.adapter is None else "lora" if source.quantized_from is None else "qlora"
    table = _table()[kind]
    steps = tuple(StepTrace.model_validate(_step(step, sizes)) for step in table)
    layers = sizes.layers
    config = source.config
    return ModelProfile(
        key="estimated",
        model_hash=source.model_hash,
        architecture=str(config["architectures"][0]),
        model_type=str(config.get("model_type", "")),
        objective="causal-lm",
        versions={},
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        max_positions=positions_in_config(source),
        parameters=_parameters(sizes, kind),
        declares=Declares(
            attention_kernels=("sdpa",),
            gradient_checkpointing=True,
            gradient_checkpointing_per_layer=True,
            pipeline_parallel_plan=("layers",),
            can_generate=True,
        ),
        isolation=Isolation(reason=UNTESTED, left_padding=UNTESTED, padding="unmasked"),
        stacks=(
            Stack(
                path="model.layers",
                traced_layers=(0,),
                assignment=(0,) * layers,
                layer_trainable=(sizes.adapter if sizes.rank else sizes.matrices + 2 * sizes.hidden,),
                layer_frozen=(_frozen(sizes, kind),),
            ),
        ),
        steps=steps,
        sequence_range=(min(SHORTEST, sequence_length), sequence_length),
        kv_elements=Polynomial(bs=2.0 * layers * sizes.keys),
        cache=(CachedLayers(count=layers, per_token=2 * sizes.keys, per_sequence=0, heads=sizes.key_heads),),
        tensor_parallel=_division(sizes, kind),
        tensor_parallel_reason="adapters are not divided" if kind != "full" else "the layers of such decoders can be divided",
        experts=None,
        heads=(sizes.heads, sizes.key_heads),
        chunked_loss_reason="the head of such decoders is a plain linear layer",
        forward_flops=_flops(sizes, 1.0, 1.0, 1.0),
        backward_flops=_flops(sizes, 1.0 if sizes.rank else 2.0, 2.0, 2.0),
        is_estimated=True,
    )


def _check_files(sizes: DecoderSizes, shapes: Mapping[str, Sequence[int]], reference: str) -> None:
    """Raise RequestError if the tensors in the model's files are not those that the sizes give. ``shapes``: by name."""
    stored = sum(prod(shape) for shape in shapes.values())
    if shapes and abs(stored / sizes.total - 1) > TOLERATED:
        raise RequestError(
            f"a quick plan expects {sizes.total:,} parameters from the sizes in the config, and the files of {reference!r} have "
            f"{stored:,}; {LEAVE_OUT}"
        )


@cache
def _table() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(TABLE.read_text())
    return document


def _step(entry: dict[str, Any], sizes: DecoderSizes) -> dict[str, Any]:
    """Return the numbers of a step. A tied head makes the embedding's gradient, to which the embedding then adds its own."""
    step: dict[str, Any] = _values(entry, sizes.features)
    if sizes.tied and not sizes.rank:
        for gaps in (step["gaps"], *step["gaps_recomputed"].values()):
            gaps[0]["backward"] = gaps[0]["backward_accumulating"]
    return step


def _values(entry: Any, features: Mapping[str, float]) -> Any:
    """Return an entry of the table with each sum, a dictionary of factors by feature, replaced by its value."""
    if isinstance(entry, list):
        return [_values(part, features) for part in entry]
    if not isinstance(entry, dict):
        return entry
    if SUM in entry:
        return sum(factor * features[name] for name, factor in entry[SUM].items())
    values = {name: _values(part, features) for name, part in entry.items()}
    return values | {name: round(number) for name, number in values.items() if name == "num_kernels"}


def _flops(sizes: DecoderSizes, frozen: float, trained: float, attention: float) -> Polynomial:
    """Return the model's FLOPs of a pass. The arguments: how often its products, its adapter and its attention are computed."""
    weights = sizes.layers * sizes.matrices + sizes.embedding
    products = 2.0 * (frozen * weights + trained * sizes.layers * sizes.adapter)
    return Polynomial(bs=products, bss=2.0 * attention * sizes.layers * sizes.queries)  # causal: half of all pairs


def _shapes(sizes: DecoderSizes) -> tuple[ParameterShape, ...]:
    """Return the shapes of the model without its adapter."""
    counts: Counter[tuple[int, ...]] = Counter(shape for shape in sizes.linear_shapes for _ in range(sizes.layers))
    counts[sizes.hidden,] = 2 * sizes.layers + 1
    counts[sizes.vocabulary, sizes.hidden] += 1 if sizes.tied else 2
    return tuple(ParameterShape(shape=shape, count=count) for shape, count in sorted(counts.items()))


def _adapter_shapes(sizes: DecoderSizes) -> tuple[ParameterShape, ...]:
    counts: Counter[tuple[int, int]] = Counter()
    for outputs, inputs in sizes.linear_shapes:
        counts[sizes.rank, inputs] += sizes.layers
        counts[outputs, sizes.rank] += sizes.layers
    return tuple(ParameterShape(shape=shape, count=count) for shape, count in sorted(counts.items()))


def _parameters(sizes: DecoderSizes, kind: str) -> Parameters:
    base = sizes.layers * (sizes.matrices + 2 * sizes.hidden)
    added = sizes.layers * sizes.adapter
    quantized = sizes.layers * sizes.matrices if kind == "qlora" else 0
    is_whole = kind == "full"
    looked_up = (ParameterShape(shape=(sizes.vocabulary, sizes.hidden), count=1),)
    return Parameters(
        total=sizes.total + added,
        embedding=sizes.embedding,
        layers=base + added,
        head=0 if sizes.tied else sizes.embedding,
        other=sizes.hidden,
        buffers_bytes=4 * sizes.head_width,
        tied=sizes.tied,
        trainable=sizes.total if is_whole else added,
        trainable_layers=base if is_whole else added,
        trainable_head=sizes.embedding if is_whole else 0,
        always_fp32=added,
        always_bf16=0 if is_whole else sizes.total - quantized,
        quantized=quantized,
        quantized_bytes=round(NF4_BYTES * quantized),
        trainable_shapes=_shapes(sizes) if is_whole else _adapter_shapes(sizes),
        frozen_shapes=() if is_whole else _shapes(sizes),
        looked_up=looked_up if is_whole and not sizes.tied else (),
    )


def _frozen(sizes: DecoderSizes, kind: str) -> int:
    """Return the stored elements of a layer that are not trained. Two weights in 4 bits are one element."""
    if kind == "full":
        return 0
    return (sizes.matrices // 2 if kind == "qlora" else sizes.matrices) + 2 * sizes.hidden


def _division(sizes: DecoderSizes, kind: str) -> TensorParallel | None:
    if kind != "full":
        return None
    divisor = gcd(sizes.heads, sizes.key_heads, sizes.feed_forward)
    outside = sizes.embedding * (1 if sizes.tied else 2)
    return TensorParallel(divisor=divisor, layers=sizes.layers * sizes.matrices, outside=outside)
