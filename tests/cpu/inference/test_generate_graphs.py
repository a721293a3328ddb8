"""What runs on a GPU alone, as far as a machine without one can show: steps over places that are there before they are needed,
and that a step asks the GPU for nothing before its logits. tests/gpu has the rest."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, BloomConfig, Gemma2Config, GPT2Config, LlamaConfig, MixtralConfig, PreTrainedConfig

from upshift.hardware import describe
from upshift.inference.generation.engines.base import DecoderBuild
from upshift.inference.generation.engines.torch_cuda_graphs import GraphStep, StaticKvCache, TorchaoDecoder, TorchGraphsDecoder
from upshift.inference.generation.engines.torch_decoder import TorchDecoder
from upshift.inference.race.types import cosines
from upshift.inference.registry import EngineSetup, Precision, contestants
from upshift.inference.weights import find_weights

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024,
}  # fmt: skip
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "gemma2": Gemma2Config(**SIZES, head_dim=8, sliding_window=8),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=2),
    "gpt2": GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=1024),
    "bloom": BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4),
}


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DecoderBuild]:
    found = {}
    for name, config in CONFIGS.items():
        folder = tmp_path_factory.mktemp(name)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        setup = EngineSetup(engine="torch", precision="fp32", threads=1, batch=2, hint="latency")
        found[name] = DecoderBuild(find_weights(str(folder)), setup, folder)
    return found


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1))
def test_steps_over_places_are_those_of_transformers(builds: dict[str, DecoderBuild], name: str, seed: int) -> None:
    """Rows come, go and change their order; there are more of them, and more tokens, than there was room for at first."""
    draw = random.Random(seed)
    plain, placed = TorchDecoder(builds[name]), TorchGraphsDecoder(builds[name])
    rows = 0
    for _ in range(5):
        if rows < 2 or draw.random() < 0.3:
            length = draw.choice((1, 5, 12, 254))  # over the least room soon
            prompts = [[draw.randrange(64) for _ in range(draw.randint(1, length))] for _ in range(draw.randint(1, 3))]
            expected, found = plain.admit(prompts), placed.admit(prompts)
            rows += len(prompts)
        elif draw.random() < 0.3:
            kept = draw.sample(range(rows), draw.randint(1, rows))
            plain.keep(kept)
            placed.keep(kept)
            rows = len(kept)
            continue
        for _ in range(3):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
            tokens = np.array([draw.randrange(64) for _ in range(rows)])
            expected, found = plain.step(tokens), placed.step(tokens)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_asks_the_gpu_for_nothing(builds: dict[str, DecoderBuild], name: str) -> None:
    """On the meta device, which has no values: one that the host asks for is an error there, as while a graph is captured."""
    decoder = TorchGraphsDecoder(builds[name])
    decoder.admit([[1, 2, 3], [4, 5]])
    with torch.device("meta"), torch.inference_mode():
        decoder.model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.bfloat16).eval()
        for layer in decoder.cache.layers:
            layer.keys, layer.values = (torch.empty(states.shape, dtype=torch.bfloat16) for states in (layer.keys, layer.values))
        logits = decoder._graph_logits(GraphStep(StaticKvCache(decoder.cache, rows=2, capacity=256), 2))
    assert logits.device.type == "meta" and tuple(logits.shape) == (2, 64)


def test_who_races_on_a_gpu(builds: dict[str, DecoderBuild]) -> None:
    source = builds["llama"].source

    def raced(on: str, *, exact: bool = False, reference: Precision = "fp32") -> list[str]:
        host = describe(on)
        found = contestants("generate", source, host, exact=exact, batch=1, hint="latency", reference=reference)
        assert {setup.device for setup in found} == {"cuda"}
        return [setup.label() for setup in found]

    everything = raced("1xh100")
    assert everything[0] == "torch fp32" and {"torch bf16", "torch-graphs fp16"} < set(everything)
    assert {"torchao int8-weights", "torchao int4-weights", "torchao fp8"} < set(everything)
    assert not any("bf16" in label or "torchao" in label for label in raced("1xt4"))
    assert "torchao int4-weights" in raced("1xa100-40gb") and "torchao fp8" not in raced("1xa100-40gb")
    assert set(raced("1xh100", exact=True)) == {"torch fp32", "torch tf32", "torch-graphs fp32", "torch-graphs tf32"}
    narrow = raced("1xh100", exact=True, reference="bf16")
    assert narrow == ["torch bf16", "torch-graphs bf16"]


def test_weights_rounded_as_they_are_loaded(builds: dict[str, DecoderBuild]) -> None:
    """8 bits, which torchao computes on a CPU, too; 4 bits and fp8 are in tests/gpu."""
    for name in ("llama", "gpt2"):
        plain = TorchDecoder(builds[name])
        setup = builds[name].setup.changed(engine="torchao", precision="int8-weights")
        rounded = TorchaoDecoder(builds[name]._replace(setup=setup))
        expected, found = ([decoder.admit([[1, 2, 3], [4, 5]]), decoder.step(np.array([6, 7]))] for decoder in (plain, rounded))
        agree = cosines(np.concatenate(found), np.concatenate(expected))
        assert 0.999 < agree.min() < 0.9999999
        assert rounded.weight_bytes < (0.6 if name == "llama" else 1.0) * plain.weight_bytes  # GPT-2's are no linear layers
