"""Profiles of decoders of any size, for tests that plan without torch.

The coefficients are those that tracing Llama's code gives: per token, in bytes, of the hidden size, the feed-forward size and the
size of the keys. They are exact for 34 M, 8 B, 70 B and 405 B parameters, in autocast and with weights gathered in bf16.
"""

from __future__ import annotations

from typing import NamedTuple

from made_profile import KERNELS

from upshift.models.profile import (
    Declares,
    Experts,
    Isolation,
    ModelProfile,
    Parameters,
    ParameterShape,
    PassCost,
    Polynomial,
    Segment,
    Stack,
    StackTrace,
    StepTrace,
    TensorParallel,
)

RANK = 16  # of an adapter


class Size(NamedTuple):
    """The sizes of a decoder."""

    hidden: int
    feed_forward: int
    layers: int
    heads: int
    keys: int  # heads of keys
    vocabulary: int = 128256
    experts: int = 1
    per_token: int = 1
    positions: int = 1 << 20

    @property
    def key_size(self) -> int:
        return self.hidden // self.heads * self.keys

    @property
    def attention(self) -> int:
        """Return the weights of a layer's attention."""
        return 2 * self.hidden * (self.hidden + self.key_size)

    @property
    def expert(self) -> int:
        return 3 * self.hidden * self.feed_forward

    @property
    def layer(self) -> int:
        return self.attention + self.experts * self.expert

    @property
    def outside(self) -> int:
        return self.hidden * self.vocabulary

    @property
    def total(self) -> int:
        return self.layers * self.layer + 2 * self.outside


class Bytes(NamedTuple):
    """Bytes a token in units of the hidden size, the feed-forward size and the size of keys, and kernels."""

    hidden: float
    feed_forward: float
    keys: float

    def of(self, size: Size, ranks: int, *, whole: float) -> float:
        """Return the bytes of one of ``ranks``. ``whole``: how much of the hidden size each of them has."""
        shared = (self.hidden - whole) * size.hidden + self.feed_forward * size.per_token * size.feed_forward
        return whole * size.hidden + (shared + self.keys * size.key_size) / ranks


class Coefficients(NamedTuple):
    kept: Bytes
    compiled: Bytes
    moved: Bytes
    moved_backward: Bytes
    kernels: tuple[int, int]
    input: float  # bytes of an element between layers
    whole: float  # of ``kept``
    whole_moved: float  # share of the hidden size's bytes that every rank moves


AUTOCAST = Coefficients(
    Bytes(30, 8, 4), Bytes(14, 6, 4), Bytes(154, 18, 44), Bytes(348, 18, 62), (55, 98), 4.0, 26.0, 0.8
)  # fmt: skip
GATHERED = Coefficients(
    Bytes(20, 8, 4), Bytes(12, 6, 4), Bytes(116, 18, 28), Bytes(250, 18, 36), (45, 82), 2.0, 16.0, 0.8
)  # fmt: skip
FP32 = Coefficients(Bytes(34, 16, 8), Bytes(24, 12, 8), Bytes(150, 36, 40), Bytes(330, 36, 60), (50, 90), 4.0, 26.0, 0.8)
PRECISIONS = {"bf16": AUTOCAST, "bf16-pure": GATHERED, "fp32": FP32}


def _cost(*, left: float, rise: float, flops: float, moved: float, kernels: int, attention: float = 0.0) -> PassCost:
    return PassCost(
        left=Polynomial(bs=left), released=Polynomial(), rise=(Polynomial(bs=rise),), matmul_flops=Polynomial(bs=flops),
        attention_flops=Polynomial(bss=attention), moved_bytes=Polynomial(bs=moved), matmul_bytes=Polynomial(bs=0.4 * moved),
        num_kernels=kernels,
    )  # fmt: skip


def _layer(size: Size, of: Coefficients, ranks: int, *, recomputed: bool, trained: bool) -> Segment:
    kept = of.kept.of(size, ranks, whole=of.whole)
    moved = of.moved.of(size, ranks, whole=of.whole_moved * of.moved.hidden)
    back = of.moved_backward.of(size, ranks, whole=of.whole_moved * of.moved_backward.hidden)
    active = size.attention + size.per_token * size.expert
    flops, attention = 2.0 * active / ranks, 2.0 * size.hidden / ranks  # causal: half of all pairs
    factor = 2.0 if trained else 1.0
    work = 4.0 * size.per_token * size.feed_forward / ranks
    left = of.input * size.hidden if recomputed else kept
    rise = 8.0 * size.hidden if recomputed else kept
    forward = _cost(left=left, rise=rise, flops=flops, moved=moved, kernels=of.kernels[0], attention=attention)
    again = 1.0 if recomputed else 0.0
    backward = _cost(
        left=-left, rise=work + again * kept, flops=(factor + again) * flops, moved=back + again * moved,
        kernels=of.kernels[1] + int(again) * of.kernels[0], attention=(2.5 + again) * attention,
    )  # fmt: skip
    compiled = None if recomputed else Polynomial(bs=of.compiled.of(size, ranks, whole=0.75 * of.compiled.hidden))
    return Segment(forward=forward, backward=backward, backward_accumulating=backward, compiled=compiled)


def _head(size: Size, ranks: int, *, trained: bool, chunked: bool) -> Segment:
    words, outside = size.vocabulary / ranks, size.outside / ranks
    flops = 2.0 * outside
    factor = 2.0 if trained else 1.0
    if not chunked:
        left = 4.0 * words + 6.0 * size.hidden
        forward = _cost(left=left, rise=10.0 * words, flops=flops, moved=23.0 * words, kernels=15)
        backward = _cost(left=-left, rise=8.0 * words, flops=factor * flops, moved=29.0 * words, kernels=26)
        return Segment(forward=forward, backward=backward, backward_accumulating=backward)
    forward = _cost(left=8.0 * size.hidden, rise=12.0 * size.hidden, flops=3.0 * flops, moved=outside / 32.0, kernels=200)
    forward = forward.changed(rise=(Polynomial(one=6.3 * outside if trained else 1e9, bs=12.0 * size.hidden),))
    backward = _cost(left=-8.0 * size.hidden, rise=0.0, flops=0.0, moved=100.0 * size.hidden, kernels=10)
    return Segment(forward=forward, backward=backward, backward_accumulating=backward)


def _step(size: Size, precision: str, ranks: int, *, adapted: bool) -> StepTrace:
    of = PRECISIONS[precision]
    trained = not adapted
    embedding = _cost(left=of.input * size.hidden, rise=of.input * size.hidden, flops=0.0, moved=4.0 * size.hidden, kernels=10)
    nothing = _cost(left=-of.input * size.hidden, rise=0.0, flops=0.0, moved=4.0 * size.hidden, kernels=2)
    first = Segment(forward=embedding, backward=nothing, backward_accumulating=nothing)
    gaps = (first, _head(size, ranks, trained=trained, chunked=False))
    plain, again = (_layer(size, of, ranks, recomputed=recomputed, trained=trained) for recomputed in (False, True))
    return StepTrace(
        precision=precision, attention="sdpa", masked=False, tensor_parallel=ranks, gaps=gaps,  # type: ignore[arg-type]
        gaps_recomputed={"full": gaps}, chunked_gap=_head(size, ranks, trained=trained, chunked=True),
        stacks=(StackTrace(plain=(plain,), recomputed={"full": (again,)}),),
    )  # fmt: skip


def _shapes(size: Size) -> tuple[ParameterShape, ...]:
    matrix = (size.feed_forward, size.hidden)
    experts = matrix if size.experts == 1 else (size.experts, *matrix)
    return (
        ParameterShape(shape=(size.hidden, size.hidden), count=2 * size.layers),
        ParameterShape(shape=(size.key_size, size.hidden), count=2 * size.layers),
        ParameterShape(shape=experts, count=3 * size.layers),
        ParameterShape(shape=(size.vocabulary, size.hidden), count=2),
    )


def decoder(size: Size, *, adapter: str = "", longest: int = 1 << 17) -> ModelProfile:
    """Return the profile of a decoder. ``adapter``: lora, or qlora with frozen weights of the layers in 4 bits; empty: none."""
    ends = 2 * (2 * size.hidden + 2 * size.key_size) + 6 * size.hidden + 3 * size.feed_forward
    added = RANK * ends if adapter else 0
    shapes = _shapes(size)
    trained = added if adapter else size.layer
    frozen = size.layers * size.layer if adapter == "qlora" else 0
    parameters = Parameters(
        total=size.total + size.layers * added, embedding=size.outside, layers=size.layers * (size.layer + added),
        head=size.outside, other=0, buffers_bytes=0, tied=False,
        trainable=size.layers * added if adapter else size.total, trainable_layers=size.layers * trained,
        trainable_head=0 if adapter else size.outside, always_fp32=size.layers * added, quantized=frozen,
        quantized_bytes=round(frozen * 0.516), always_bf16=size.total - frozen if adapter else 0,
        trainable_shapes=(ParameterShape(shape=(RANK, size.hidden), count=14 * size.layers),) if adapter else shapes,
        frozen_shapes=shapes if adapter else (),
    )  # fmt: skip
    kinds = [("fp32", 1)] + [(precision, ranks) for precision in ("bf16", "bf16-pure") for ranks in (1, 2)]
    mixture = size.experts > 1
    flops = 2.0 * (size.layers * (size.attention + size.per_token * size.expert) + size.outside)
    return ModelProfile(
        key="sized", model_hash=f"sized{size.total}{adapter}", architecture="DecoderForCausalLM", model_type="decoder",
        objective="causal-lm", versions={"torch": "1", "transformers": "2"}, vocab_size=size.vocabulary, hidden_size=size.hidden,
        max_positions=size.positions, parameters=parameters,
        declares=Declares(
            attention_kernels=("sdpa",), gradient_checkpointing=True, gradient_checkpointing_per_layer=True,
            pipeline_parallel_plan=("layers",), expert_parallel=mixture,
        ),
        isolation=Isolation(proven=True, reason="", packing=dict.fromkeys(KERNELS, ""), padding="unmasked"),
        stacks=(Stack(
            path="model.layers", traced_layers=(0,), assignment=(0,) * size.layers, layer_trainable=(trained,),
            layer_frozen=(size.layer,) if adapter else (0,),
        ),),
        steps=tuple(_step(size, precision, ranks, adapted=bool(adapter)) for precision, ranks in kinds),
        sequence_range=(512, longest), kv_elements=None,
        tensor_parallel=TensorParallel(divisor=size.keys, layers=size.layers * size.layer, outside=2 * size.outside),
        tensor_parallel_reason="the model declares which weights ranks share",
        experts=Experts(count=size.experts, parameters=size.layers * size.experts * size.expert, per_token=size.per_token)
        if mixture else None,
        heads=(size.heads, size.keys), chunked_loss_reason="", forward_flops=Polynomial(bs=flops),
        backward_flops=Polynomial(bs=2.0 * flops),
    )  # fmt: skip
