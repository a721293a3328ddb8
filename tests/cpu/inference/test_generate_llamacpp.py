"""llama.cpp computes what transformers does, of every family that a GGUF file is written of; what it does not is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from upshift.errors import RequestError
from upshift.inference import registry
from upshift.inference.generation.engines.base import DecoderBuild
from upshift.inference.generation.engines.gguf_families import FAMILIES, family_of
from upshift.inference.race.types import cosines
from upshift.inference.registry import EngineSetup, is_installed
from upshift.inference.weights import find_weights

BUILT = pytest.mark.skipif(not is_installed("llamacpp"), reason="llama-cpp-python is not installed, which compiles for minutes")
SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GEMMA = {**SIZES, "head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 16}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
GLOBAL = {"rope_type": "linear", "rope_theta": 100_000.0, "factor": 8.0}
LOCAL = {"rope_type": "default", "rope_theta": 10_000.0}
EXACT, TABLE = 1e-5, 3e-3  # of the largest logit; llama.cpp looks up GELU in a table of 16-bit values
MADE: dict[str, tuple[Any, float]] = {
    "llama": (LlamaConfig(**SIZES), EXACT),
    "llama, tied, biases, factors of llama3": (
        LlamaConfig(**SIZES, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3), EXACT
    ),
    "llama, stretched positions": (LlamaConfig(**SIZES, rope_parameters=LINEAR), EXACT),
    "mistral, wide heads": (MistralConfig(**SIZES, head_dim=32, sliding_window=None), EXACT),
    "qwen2": (Qwen2Config(**SIZES), EXACT),
    "qwen3": (Qwen3Config(**SIZES, head_dim=32), EXACT),
    "phi3, half of a head rotated": (Phi3Config(**SIZES, rope_parameters={**LOCAL, "partial_rotary_factor": 0.5}), EXACT),
    "gemma": (GemmaConfig(**SIZES, head_dim=32), TABLE),
    "gemma2, a window of 16": (Gemma2Config(**GEMMA), TABLE),
    "gemma3, a window of 16": (
        Gemma3TextConfig(
            **GEMMA, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters={"full_attention": GLOBAL, "sliding_attention": LOCAL}, final_logit_softcapping=20.0,
        ), TABLE
    ),
    "gpt2": (GPT2Config(vocab_size=320, n_embd=64, n_layer=3, n_head=4, n_positions=128, n_inner=96), TABLE),
}  # fmt: skip
PROMPTS = [[(place * place + 3 * row) % 320 for place in range(5 + 20 * row)] for row in range(3)]


def save(folder: Path, config: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # norms and biases begin as ones and zeros, which hide what is left out
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.05)
    model.save_pretrained(folder)
    return find_weights(str(folder))


def decoder_of(source: Any, folder: Path, engine: Any, precision: Any = "fp32") -> Any:
    setup = EngineSetup(engine=engine, precision=precision, threads=1, batch=1)
    return registry.build_engine("generate", engine, DecoderBuild(source, setup, folder))


def followed(decoder: Any, prompts: list[list[int]]) -> np.ndarray:
    """The logits of prompts, and of six tokens behind each."""
    found = [decoder.admit(prompts)]
    for step in range(6):
        found.append(decoder.step(np.array([(17 * step + row) % 320 for row in range(len(prompts))])))
    return np.concatenate(found)


@BUILT
@pytest.mark.parametrize("kind", MADE)
def test_every_family_computes_what_transformers_does(kind: str, tmp_path: Path) -> None:
    config, tolerance = MADE[kind]
    source = save(tmp_path / "model", config)
    expected, found = (followed(decoder_of(source, tmp_path / engine, engine), PROMPTS) for engine in ("torch", "llamacpp"))
    assert np.abs(found - expected).max() < tolerance * np.abs(expected).max()
    assert found.argmax(1).tolist() == expected.argmax(1).tolist()


def test_every_family_is_tested() -> None:
    assert {config.model_type for config, _ in MADE.values()} == set(FAMILIES)


@BUILT
def test_rows_come_and_go_beside_a_prefix(tmp_path: Path) -> None:
    """More rows and tokens than there was room for, in any order, with a prefix that changes while rows of the last are there."""
    source = save(tmp_path / "model", MADE["gemma3, a window of 16"][0])
    decoders = [decoder_of(source, tmp_path / engine, engine) for engine in ("torch", "llamacpp")]
    said: list[list[np.ndarray]] = []
    for decoder in decoders:
        first, second = decoder.compute(PROMPTS[2][:30]), decoder.compute(PROMPTS[1][:7])
        logits = [decoder.admit([PROMPTS[2][:30] + [row, row + 1] for row in range(3)], first)]
        logits.append(decoder.step(np.array([1, 2, 3])))
        decoder.keep([2, 0])
        logits.append(decoder.step(np.array([4, 5])))
        logits.append(decoder.admit([PROMPTS[1][:7] + [row] * (row + 1) for row in range(40)], second))
        logits.append(decoder.step(np.arange(42)))
        decoder.keep([41, 0, 20])
        logits.append(decoder.admit(PROMPTS))
        logits += [decoder.step(np.arange(6) + step) for step in range(40)]
        decoder.keep([])
        logits.append(decoder.admit(PROMPTS[:1]))
        said.append(logits)
    for expected, found in zip(*said, strict=True):
        assert np.abs(found - expected).max() < TABLE * np.abs(expected).max()


@BUILT
def test_a_prompt_of_several_calls(tmp_path: Path) -> None:
    config = LlamaConfig(**{**SIZES, "max_position_embeddings": 8192})
    source = save(tmp_path / "model", config)
    prompts = [[place % 317 for place in range(length)] for length in (2100, 10, 2050)]
    expected, found = (decoder_of(source, tmp_path / engine, engine).admit(prompts) for engine in ("torch", "llamacpp"))
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


@BUILT
@pytest.mark.parametrize(("precision", "least", "size"), [("fp16", 0.9999, 0.52), ("int8", 0.998, 0.35), ("int4", 0.8, 0.3)])
def test_rounded_weights(precision: str, least: float, size: float, tmp_path: Path) -> None:
    source = save(tmp_path / "model", LlamaConfig(**{**SIZES, "hidden_size": 256, "intermediate_size": 512}))
    plain, rounded = (decoder_of(source, tmp_path / "gguf", "llamacpp", kind) for kind in ("fp32", precision))
    assert rounded.weight_bytes < size * plain.weight_bytes
    cosine = cosines(followed(rounded, PROMPTS), followed(plain, PROMPTS))
    assert least < cosine.min() < 0.9999999


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (LlamaConfig(hidden_act="gelu"), "a 'llama' with hidden_act='gelu'"),
        (Qwen2Config(rope_parameters=LLAMA3), "rope_type='llama3'"),
        (MistralConfig(sliding_window=4096), "sliding_window=4096"),
        (Gemma2Config(final_logit_softcapping=None), "final_logit_softcapping=None"),
        (GPT2Config(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx=True"),
    ],
)
def test_what_llamacpp_does_not_compute_is_refused(config: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        family_of(config)
