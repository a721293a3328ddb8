"""A mixture's experts per token, and tables of embeddings, as the traced model has them, whatever its config calls them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import every_model, every_tiny

from upshift.errors import RequestError
from upshift.models.build import build_model, find_stacks
from upshift.models.describe import count_parameters
from upshift.models.profile import Variant
from upshift.models.profile_cache import SegmentStore
from upshift.models.source import find_model
from upshift.models.tracing.mixtures import expert_matrices, experts_per_token
from upshift.models.tracing.segments import Tracer
from upshift.models.tracing.trace import _count_experts, trace_model

# Fields that say it, in the order tried: read by this test alone.
SAID = ("moe_topk", "top_k_experts", "num_experts_per_tok", "moe_k")
SIZES = {"vocab_size": 96, "hidden_size": 32, "num_attention_heads": 2}


def is_mixture(config: Any, name: str) -> bool:
    with torch.device("meta"):
        model = getattr(transformers, name)(config)
    return any(expert_matrices(module) for module in model.modules())


def test_every_mixture_of_transformers(tmp_path: Path) -> None:
    """Of those that can be made tiny and traced. A router may send a token to all experts and weigh them with zeros (Llama 4):
    what is computed is counted."""
    right, dense, untraced = [], [], []
    for _, model_type, name in every_model("causal"):
        if not re.search("moe|mix|gpt_oss|experts|deepseek|hunyuan", f"{model_type} {vars(config_of(model_type))}"):
            continue
        try:
            config = next(every_tiny(model_type, name))
        except Exception:  # each class has its own kinds for sizes that it refuses
            continue
        said = next((value for key in SAID if isinstance(value := getattr(config.get_text_config(), key, None), int)), None)
        if said is None or not is_mixture(config, name):
            continue
        config.save_pretrained(tmp_path / model_type)
        try:
            found = _count_experts(Tracer(find_model(str(tmp_path / model_type))))
        except Exception:  # a router that looks at numbers: inspect and plan refuse it, naming the module
            untraced.append(model_type)
            continue
        assert found is not None, model_type
        (right if found.per_token == said else dense).append(model_type)
        assert found.per_token in (said, found.count), (model_type, found, said)
    print(f"{len(right)} as their configs say, all experts in {dense}, not traced {untraced}")
    assert len(right) >= 15 and len(dense) <= 3


def config_of(model_type: str) -> Any:
    try:
        return transformers.CONFIG_MAPPING[model_type]()
    except Exception:  # needs parts
        return transformers.PretrainedConfig()


def test_a_field_that_no_other_config_has_is_not_needed(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(
        **SIZES, intermediate_size=48, num_hidden_layers=2, num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=3,
        architectures=["MixtralForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    found = _count_experts(Tracer(find_model(str(tmp_path))))
    assert found is not None and (found.count, found.per_token) == (8, 3)
    assert found.parameters == 2 * 8 * 3 * 32 * 48


def test_a_dense_model_has_no_experts(tmp_path: Path) -> None:
    transformers.MambaConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=2, architectures=["MambaForCausalLM"]
    ).save_pretrained(tmp_path)
    assert _count_experts(Tracer(find_model(str(tmp_path)))) is None


def test_matrices_of_heads_are_no_experts(tmp_path: Path) -> None:
    """Each gate of a recurrent layer has a matrix for each head, stacked as experts are. No token chooses among them."""
    transformers.RecurrentGemmaConfig(
        **SIZES | {"num_attention_heads": 4}, intermediate_size=48, num_hidden_layers=3, lru_width=32, attention_window_size=8,
        architectures=["RecurrentGemmaForCausalLM"],
    ).save_pretrained(tmp_path)
    tracer = Tracer(find_model(str(tmp_path)))
    assert any(expert_matrices(module) for module in tracer.base.modules())
    assert _count_experts(tracer) is None


ROUTED = {"intermediate_size": 48, "num_hidden_layers": 2, "num_key_value_heads": 2, "pad_token_id": 0}
MIXTURES: dict[str, Any] = {
    "MixtralForCausalLM": transformers.MixtralConfig(**SIZES, **ROUTED, num_local_experts=5, num_experts_per_tok=3),
    "GptOssForCausalLM": transformers.GptOssConfig(
        **SIZES, **ROUTED, head_dim=16, num_local_experts=6, num_experts_per_tok=2, sliding_window=8
    ),
    "Qwen2MoeForCausalLM": transformers.Qwen2MoeConfig(
        **SIZES, **ROUTED, num_experts=6, num_experts_per_tok=4, moe_intermediate_size=24, shared_expert_intermediate_size=24
    ),
    "GraniteMoeForCausalLM": transformers.GraniteMoeConfig(**SIZES, **ROUTED, num_local_experts=4, num_experts_per_tok=1),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXTURES)
def test_the_experts_of_a_token_are_those_that_learn_from_it(name: str, tmp_path: Path) -> None:
    """A forward pass of one token, with weights: the gradient says which experts it used."""
    config = MIXTURES[name]
    config.architectures = [name]
    config.save_pretrained(tmp_path)
    counted = _count_experts(Tracer(find_model(str(tmp_path))))
    assert counted is not None
    torch.manual_seed(0)
    model = getattr(transformers, name)(config)
    model(input_ids=torch.tensor([[7]])).logits.square().sum().backward()
    used = []
    for module in model.modules():
        matrices = expert_matrices(module)
        if matrices:
            assert matrices[0].grad is not None
            used.append(int(matrices[0].grad.flatten(1).abs().sum(1).gt(0).sum()))
    assert used == [counted.per_token] * 2
    weights = sum(weight.numel() for module in model.modules() for weight in expert_matrices(module))
    assert counted.parameters == weights


@pytest.mark.parametrize(("tied", "tables"), [(True, {(64, 32)}), (False, {(96, 32), (64, 32)})])
def test_tables_are_no_products(tied: bool, tables: set[tuple[int, ...]]) -> None:
    """GPT-2's positions stand outside the layers, as Gemma 3n's embeddings of each layer do."""
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=2, vocab_size=96, n_positions=64, tie_word_embeddings=tied, architectures=["GPT2LMHeadModel"]
    )
    model = build_model(config, transformers.GPT2LMHeadModel, dtype=torch.float32)
    counted = count_parameters(model, tuple(path for path, _ in find_stacks(model)), always_fp32=0)
    assert {entry.shape for entry in counted.looked_up} == tables
    products = {entry.shape: entry.count for entry in counted.product_shapes}
    assert (64, 32) not in products and products[96, 32] == 1, "the head"


T5 = {"d_model": 32, "d_ff": 48, "num_heads": 2, "d_kv": 16, "vocab_size": 96, "decoder_start_token_id": 0}


@pytest.mark.parametrize(("encoder", "decoder"), [(1, 1), (1, 3), (2, 1)])
def test_stacks_of_one_layer(encoder: int, decoder: int, tmp_path: Path) -> None:
    config = transformers.T5Config(
        **T5, num_layers=encoder, num_decoder_layers=decoder, architectures=["T5ForConditionalGeneration"]
    )
    config.save_pretrained(tmp_path)
    variants = (Variant("fp32", "sdpa", False),)
    store = SegmentStore(tmp_path / "kept")
    profile = trace_model(find_model(str(tmp_path)), key="", versions={}, sequence_length=16, variants=variants, store=store)
    assert [len(stack.assignment) for stack in profile.stacks] == [encoder, decoder]


@pytest.mark.parametrize("depth", [{"num_layers": 0}, {"num_layers": 2, "num_decoder_layers": 0}])
def test_no_layers_are_refused(depth: dict[str, int], tmp_path: Path) -> None:
    transformers.T5Config(**T5, **depth, architectures=["T5ForConditionalGeneration"]).save_pretrained(tmp_path)
    with pytest.raises(RequestError, match="layers=0, a model without layers; give 1 or more"):
        Tracer(find_model(str(tmp_path)))


def test_a_number_for_each_head_is_no_matrix_of_an_expert() -> None:
    """Swin 2 has a scale [heads, 1, 1] for each attention, and no token ids to count by."""
    config = transformers.Swinv2Config(
        image_size=32, patch_size=4, embed_dim=16, depths=[1], num_heads=[2], window_size=4, num_channels=3
    )
    with torch.device("meta"):
        model = transformers.Swinv2ForImageClassification(config)
        images = {"pixel_values": torch.ones(2, 3, 32, 32)}
    assert any(weight.ndim == 3 and weight.shape[0] == 2 for weight in model.parameters())
    assert not any(expert_matrices(module) for module in model.modules())
    assert experts_per_token(model, lambda: images) == {}


def test_stacked_matrices_of_a_model_without_token_ids_are_no_experts() -> None:
    class Stacked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.nn.Parameter(torch.ones(2, 8, 8))

        def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
            return pixel_values @ self.weights

    assert experts_per_token(Stacked(), lambda: {"pixel_values": torch.ones(2, 4, 8)}) == {}  # type: ignore[arg-type]
