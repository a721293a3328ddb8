"""Profiles of models that generate or encode, written by hand, for tests that plan inference without torch."""

from __future__ import annotations

from math import prod

from upshift.models.profile import (
    CachedLayers,
    Declares,
    Experts,
    ModelProfile,
    Parameters,
    ParameterShape,
    Polynomial,
    Stack,
    TensorParallel,
)


def made_generator(
    shapes: dict[tuple[int, ...], int], *, layers: int, vocabulary: int, hidden: int, heads: tuple[int, int],
    cache: tuple[CachedLayers, ...], tied: bool = False, experts: Experts | None = None, generates: bool = True,
    positions: int = 8192,
) -> ModelProfile:  # fmt: skip
    """``shapes``: of the layers' parameters, with how many there are in the model."""
    in_layers = sum(prod(shape) * count for shape, count in shapes.items())
    embedding = vocabulary * hidden
    total = in_layers + embedding * (1 if tied else 2)
    entries = [ParameterShape(shape=shape, count=count) for shape, count in shapes.items()]
    return ModelProfile(
        key="", model_hash="", architecture="Decoder", model_type="", objective="causal-lm", versions={},
        vocab_size=vocabulary, hidden_size=hidden, max_positions=positions,
        parameters=Parameters(
            total=total, embedding=embedding, layers=in_layers, head=0 if tied else embedding, other=0, buffers_bytes=0,
            tied=tied, trainable=total, trainable_layers=in_layers, trainable_head=embedding, always_fp32=0,
            trainable_shapes=(*entries, ParameterShape(shape=(vocabulary, hidden), count=1 if tied else 2)),
        ),
        declares=Declares(can_generate=generates, pipeline_parallel_plan=("layers",)),
        stacks=(Stack(path="layers", traced_layers=(0,), assignment=(0,) * layers, layer_trainable=(1,)),),
        steps=(), sequence_range=(8, 128), kv_elements=None, cache=cache,
        tensor_parallel=TensorParallel(divisor=heads[1], layers=in_layers, outside=0), tensor_parallel_reason="declared",
        experts=experts, heads=heads, chunked_loss_reason="",
        forward_flops=Polynomial(bs=2.0 * in_layers, bss=2.0 * layers * hidden), backward_flops=Polynomial(),
    )  # fmt: skip


def attention_shapes(hidden: int, keys: int, layers: int) -> dict[tuple[int, ...], int]:
    shapes: dict[tuple[int, ...], int] = {(hidden, hidden): 2 * layers, (hidden,): 2 * layers}
    shapes[keys, hidden] = shapes.get((keys, hidden), 0) + 2 * layers
    return shapes


def cached(count: int, per_token: int, heads: int, window: int | None = None) -> CachedLayers:
    return CachedLayers(count=count, per_token=per_token, per_sequence=0, heads=heads, window=window)


# The sizes of Llama-3-8B: 8 heads of keys, each of 128.
LLAMA_8B = made_generator(
    {**attention_shapes(4096, 1024, 32), (14336, 4096): 64, (4096, 14336): 32},
    layers=32, vocabulary=128256, hidden=4096, heads=(32, 8), cache=(cached(32, 2048, 8),),
)  # fmt: skip
# Five of six layers see 1,024 tokens.
SLIDING = made_generator(
    {**attention_shapes(2560, 1024, 24), (10240, 2560): 48, (2560, 10240): 24},
    layers=24, vocabulary=262144, hidden=2560, heads=(8, 4), cache=(cached(20, 2048, 4, 1024), cached(4, 2048, 4)), tied=True,
    positions=131072,
)  # fmt: skip
# The sizes of Mixtral 8x7B.
MIXTURE = made_generator(
    {**attention_shapes(4096, 1024, 32), (8, 28672, 4096): 32, (8, 4096, 14336): 32, (8, 4096): 32},
    layers=32, vocabulary=32000, hidden=4096, heads=(32, 8), cache=(cached(32, 2048, 8),),
    experts=Experts(count=8, parameters=32 * 8 * 3 * 4096 * 14336, per_token=2),
)  # fmt: skip
ENCODER = made_generator(
    {(768, 768): 48, (3072, 768): 12, (768, 3072): 12, (768,): 96}, layers=12, vocabulary=30522, hidden=768, heads=(12, 12),
    cache=(), tied=True, generates=False, positions=512,
)  # fmt: skip
