"""A profile written by hand, for tests that plan without torch: a Llama-like decoder of 1.7 B parameters."""

from __future__ import annotations

from upshift.models.profile import (
    Declares,
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

KERNELS = ("sdpa", "block", "eager", "flex_attention", "flash_attention_2", "flash_attention_3")
HIDDEN, FEED_FORWARD, VOCABULARY, LAYERS = 2048, 8192, 32000, 24
LAYER = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * FEED_FORWARD
OUTSIDE = HIDDEN * VOCABULARY


def cost(*, left: float, rise: float, flops: float, moved: float, attention: float = 0.0) -> PassCost:
    """Bytes and FLOPs a token; attention FLOPs a pair of tokens."""
    return PassCost(
        left=Polynomial(bs=left), released=Polynomial(), rise=(Polynomial(bs=rise),), matmul_flops=Polynomial(bs=flops),
        attention_flops=Polynomial(bss=attention), moved_bytes=Polynomial(bs=moved), matmul_bytes=Polynomial(bs=moved),
        num_kernels=20,
    )  # fmt: skip


def segment(*, kept: float, work: float, flops: float, attention: float = 0.0) -> Segment:
    backward = cost(left=-kept, rise=work, flops=2 * flops, moved=2 * kept, attention=2 * attention)
    forward = cost(left=kept, rise=kept + work, flops=flops, moved=kept, attention=attention)
    return Segment(forward=forward, backward=backward, backward_accumulating=backward)


def step(precision: str, ranks: int, *, size: int) -> StepTrace:
    """``size``: bytes of an activation."""
    hidden, flops = 1.0 * size * HIDDEN, 2.0 * LAYER / ranks
    plain = segment(kept=17.0 * hidden / ranks, work=size * FEED_FORWARD, flops=flops, attention=2.0 * HIDDEN)
    remade = segment(kept=hidden, work=18.0 * hidden, flops=1.5 * flops, attention=3.0 * HIDDEN)
    gaps = (
        segment(kept=size * HIDDEN, work=0.0, flops=0.0),
        segment(kept=6.0 * VOCABULARY / ranks, work=8.0 * VOCABULARY / ranks, flops=2.0 * OUTSIDE / ranks),
    )
    return StepTrace(
        precision=precision, attention="sdpa", masked=False, tensor_parallel=ranks, gaps=gaps,  # type: ignore[arg-type]
        gaps_recomputed={"full": gaps}, chunked_gap=None,
        stacks=(StackTrace(plain=(plain,), recomputed={"full": (remade,)}),),
    )  # fmt: skip


def make_profile(*, max_positions: int | None = 1 << 20, longest: int = 4096) -> ModelProfile:
    """A Llama-like decoder of 1.7 B parameters."""
    total = LAYERS * LAYER + 2 * OUTSIDE
    parameters = Parameters(
        total=total, embedding=OUTSIDE, layers=LAYERS * LAYER, head=OUTSIDE, other=0, buffers_bytes=0, tied=False,
        trainable=total, trainable_layers=LAYERS * LAYER, trainable_head=OUTSIDE, always_fp32=0,
        trainable_shapes=(
            ParameterShape(shape=(HIDDEN, HIDDEN), count=4 * LAYERS),
            ParameterShape(shape=(FEED_FORWARD, HIDDEN), count=3 * LAYERS),
            ParameterShape(shape=(VOCABULARY, HIDDEN), count=2),
        ),
    )  # fmt: skip
    steps = [step("fp32", 1, size=4)]
    steps += [step(precision, ranks, size=2) for precision in ("bf16", "bf16-pure") for ranks in (1, 2)]
    return ModelProfile(
        key="test", model_hash="feed", architecture="TestForCausalLM", model_type="test", objective="causal-lm",
        versions={"torch": "1", "transformers": "2"}, vocab_size=VOCABULARY, hidden_size=HIDDEN, max_positions=max_positions,
        parameters=parameters,
        declares=Declares(
            attention_kernels=("sdpa",), gradient_checkpointing=True, gradient_checkpointing_per_layer=True,
            pipeline_parallel_plan=("layers",),
        ),
        isolation=Isolation(proven=True, reason="", packing=dict.fromkeys(KERNELS, ""), padding="unmasked"),
        stacks=(Stack(path="model.layers", traced_layers=(0,), assignment=(0,) * LAYERS, layer_trainable=(LAYER,)),),
        steps=tuple(steps), sequence_range=(longest // 4, longest), kv_elements=None,
        tensor_parallel=TensorParallel(divisor=8, layers=LAYERS * LAYER, outside=2 * OUTSIDE),
        tensor_parallel_reason="the model declares which weights ranks share", experts=None, heads=(16, 16),
        chunked_loss_reason="not traced here", forward_flops=Polynomial(bs=2.0 * total),
        backward_flops=Polynomial(bs=4.0 * total),
    )  # fmt: skip
