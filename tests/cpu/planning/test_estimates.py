"""A profile that is estimated from sizes has the numbers of a trace, for a decoder to which nothing was fitted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from upshift.models.estimation.estimate import estimate_profile
from upshift.models.profile import ModelProfile, Polynomial, Segment, Variant
from upshift.models.source import AdapterOptions, find_model_to_train
from upshift.models.tracing.profile_model import profile_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 96, "intermediate_size": 272,
    "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 640, "hidden_act": "silu",
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
}  # fmt: skip
LENGTH = 128
POINTS = ((1, 128), (7, 96))
PASSES = ("forward", "backward", "backward_accumulating")
EXACT = ("left", "released", "matmul_flops", "attention_flops", "moved_bytes", "matmul_bytes")


def both(folder: Path, *, tied: bool, rank: int | None) -> tuple[ModelProfile, ModelProfile]:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": tied}))
    source = find_model_to_train(str(folder), AdapterOptions(lora_rank=rank) if rank else None)
    traced = profile_model(source, sequence_length=LENGTH, variants=(Variant("bf16", "sdpa", False),))
    return traced, estimate_profile(source, sequence_length=LENGTH, shapes={})


def check_segment(traced: Segment, estimated: Segment, passes: tuple[str, ...] = PASSES) -> None:
    for name in passes:
        cost, other = getattr(traced, name), getattr(estimated, name)
        for field in EXACT:
            for point in POINTS:
                size: Polynomial = getattr(cost, field)
                assert getattr(other, field).at(*point) == pytest.approx(size.at(*point), rel=1e-3, abs=64), (name, field)
        assert other.num_kernels == cost.num_kernels


@pytest.mark.parametrize(("tied", "rank"), [(True, None), (False, 3)])
def test_an_estimate_has_the_numbers_of_a_trace(tied: bool, rank: int | None, tmp_path: Path) -> None:
    traced, estimated = both(tmp_path, tied=tied, rank=rank)
    left_out = {"buffers_bytes", "looked_up"}
    assert estimated.parameters.model_dump(exclude=left_out) == traced.parameters.model_dump(exclude=left_out)
    for name in ("heads", "cache", "num_layers", "kv_elements"):
        assert getattr(estimated, name) == getattr(traced, name), name
    for point in POINTS:
        # Below an adapter, nothing asks for the gradient of the embedding, which the first layer would make.
        assert estimated.train_flops(*point) == pytest.approx(traced.train_flops(*point), rel=0.03 if rank else 1e-6)
        assert estimated.forward_flops.at(*point) == pytest.approx(traced.forward_flops.at(*point))
    step, other = (profile.step(precision="bf16", attention="sdpa", masked=False) for profile in (traced, estimated))
    assert step is not None and other is not None
    check_segment(step.stacks[0].plain[1], other.stacks[0].plain[0])
    check_segment(step.stacks[0].recomputed["full"][1], other.stacks[0].recomputed["full"][0])
    check_segment(step.gaps[0], other.gaps[0], PASSES[:2])  # a tied gradient that exists is made anew: the last pass differs
