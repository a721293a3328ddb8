"""A model that is larger than the memory: its precision, its conversion on the disk, and the memory limits that it takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_generate import SMALL, by_transformers, ids_of, save
from transformers import LlamaConfig, MixtralConfig

import upshift
from upshift.errors import NothingFits, RequestError
from upshift.hardware import detect
from upshift.hardware.spec import Gpu, Host
from upshift.inference.computing_device import available_memory
from upshift.inference.generation import generator as generator_module
from upshift.inference.generation.model import check_max_memory
from upshift.inference.weights import find_weights

NEW_TOKENS = 14  # as by_transformers generates
DEEP = {**SMALL, "hidden_size": 128, "num_hidden_layers": 8}
LARGE = {
    "layers": LlamaConfig(**DEEP, intermediate_size=512),
    "experts that are stored one by one": MixtralConfig(
        **DEEP, intermediate_size=96, num_key_value_heads=2, num_local_experts=5, num_experts_per_tok=2
    ),
}


@pytest.mark.parametrize("declared", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", LARGE)
def test_a_model_on_the_disk_computes_in_the_precision_of_its_files(kind: str, declared: str, tmp_path: Path) -> None:
    model = save(tmp_path, LARGE[kind])
    expected = by_transformers(model, ids_of(["one two"], model))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": declared}))
    generator = upshift.Generator(model, max_memory={"cpu": "3MiB"})
    (completion,) = generator.generate(["one two"], max_new_tokens=NEW_TOKENS)
    assert generator.race is not None and "It runs in fp32" in (generator.race.divided or "")
    computing: Any = generator.decoder
    assert {parameter.dtype for parameter in computing.model.parameters()} == {torch.float32}
    assert any(parameter.device.type == "cpu" and not parameter.requires_grad for parameter in computing.model.parameters())
    assert [completion.tokens] == expected


GPU_HOST = detect().changed(gpu=Gpu(name="GPU X", memory_bytes=2**34, free_memory_bytes=2**34), gpus_per_node=1)
TWO_LIMITS = {"cpu": "1GiB", " CPU": "2GiB"}


@pytest.mark.parametrize(
    ("host", "limits", "message"),
    [
        (GPU_HOST, {"cpu": "8GiB"}, "limits a model that runs on the CPU, and .* runs on GPU X here, as a whole; leave it out"),
        (GPU_HOST, {0: "8GiB"}, "limits a model that runs on the CPU, and .* runs on GPU X here"),
        (detect().cpu_alone(), {"disk": "8GiB"}, "leave out the disk"),
        (detect().cpu_alone(), {0: "8GiB"}, "device 0 is not here"),
        (detect().cpu_alone(), {"cpu": "eight"}, "'eight' is no size of memory"),
        (detect().cpu_alone(), TWO_LIMITS, "max_memory gives cpu 1.00 GiB and 2GiB; give it one of them"),
    ],
)
def test_a_memory_limit_that_limits_nothing_is_refused(
    host: Host, limits: dict[str | int, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save(tmp_path, LlamaConfig(**SMALL, intermediate_size=64))
    monkeypatch.setattr(generator_module, "computing_host", lambda stored: host)
    with pytest.raises(RequestError, match=message):
        upshift.Generator(model, max_memory=limits)


def test_quantized_weights_keep_their_limit_or_are_refused(tmp_path: Path) -> None:
    """They are loaded whole, so a limit below their size cannot be kept."""
    source = find_weights(save(tmp_path, LlamaConfig(**SMALL, intermediate_size=64)))
    quantized = source.changed(config={**source.config, "quantization_config": {"quant_method": "torchao"}})
    host = detect().cpu_alone()
    check_max_memory(quantized, host, {"cpu": "1GiB"})
    assert available_memory(host, {"cpu": "1GiB"}) == 2**30
    with pytest.raises(NothingFits, match=r"quantized and are loaded whole, which takes .*KiB, and --max-memory gives 1.00 KiB"):
        check_max_memory(quantized, host, {"cpu": "1KiB"})
    check_max_memory(source, host, {"cpu": "1KiB"})  # runs from the disk
