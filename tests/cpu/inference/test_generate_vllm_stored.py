"""vLLM generates from quantized files as they are: the rules by a pretended engine, its numbers by a real one if there is one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_models import byte_level_tokenizer
from pretended_vllm import make_interpreter
from quantized_files import write_quantized
from test_generate_vllm import NEEDS_REAL, NEW, PROMPTS, REAL, SIZES, by_transformers, save
from transformers import AutoModelForCausalLM

import upshift
from upshift.errors import RequestError
from upshift.inference.generation.engines.vllm_worker import read_quantizations

NO_LIBRARY = pytest.mark.skipif(importlib.util.find_spec("gptqmodel") is not None, reason="transformers loads GPTQ here")


class Stored:
    """A quantized model whose layers add nothing, and a pretended engine that knows it."""

    def __init__(self, folder: Path, name: str) -> None:
        save(folder / "plain", layers=1, is_table=True)
        rounded = write_quantized(folder / "plain", folder / name, name)
        self.model = str(folder / name)
        self.expected = by_transformers(str(rounded), PROMPTS)
        with torch.no_grad():
            loaded = AutoModelForCausalLM.from_pretrained(rounded).eval()
            table = loaded(torch.arange(SIZES["vocab_size"])[:, None]).logits[:, 0].tolist()
        (folder / "engine").mkdir()
        self.folder = folder / "engine"
        self.python = make_interpreter(self.folder, table)

    def generator(self, **options: Any) -> upshift.Generator:
        return upshift.Generator(self.model, engine_python=self.python, **options)


def test_weights_that_both_load_race_and_exact_is_transformers_alone(tmp_path: Path) -> None:
    stored = Stored(tmp_path, "fp8")
    generator = stored.generator(engine="vllm", quality=0.99)
    assert [answer.tokens for answer in generator.generate(PROMPTS, max_new_tokens=NEW)] == stored.expected
    assert generator.race is not None and generator.race.chosen.label() == "vllm stored"
    (run,) = (run for run in generator.race.runs if run.setup.engine == "vllm")
    assert run.same_tokens == 1.0 and run.weight_bytes == (Path(stored.model) / "model.safetensors").stat().st_size
    assert '"dtype": "auto"' in (stored.folder / "start.json").read_text()
    with pytest.raises(RequestError, match="in 16 bits, and --quality exact compares fp32; give a cosine"):
        stored.generator(engine="vllm")
    exact = stored.generator()
    exact.generate(PROMPTS[:1], max_new_tokens=NEW)
    assert exact.race is not None and exact.race.chosen.label() == "torch stored"


@NO_LIBRARY
def test_weights_that_transformers_does_not_load_are_vllms_alone(tmp_path: Path) -> None:
    stored = Stored(tmp_path, "gptq")
    generator = stored.generator(quality=0.99)
    assert [answer.tokens for answer in generator.generate(PROMPTS, max_new_tokens=NEW)] == stored.expected
    assert generator.race is not None and generator.race.chosen.label() == "vllm stored" and not generator.race.runs
    for quality in ("exact", 0.999):
        with pytest.raises(RequestError, match=r"does not load .* allow it with --quality 0.99"):
            stored.generator(quality=quality)
    with pytest.raises(RequestError, match="does not load"):
        upshift.Generator(stored.model, engine="torch").generate(PROMPTS, max_new_tokens=NEW)


def test_a_format_that_vllm_does_not_list_is_refused_before_it_starts(tmp_path: Path) -> None:
    stored = Stored(tmp_path, "awq")
    with pytest.raises(RequestError, match="vLLM lists no 'awq'; --engine vllm cannot load them"):
        stored.generator(engine="vllm", quality=0.9)
    assert not (stored.folder / "start.json").exists()


@pytest.mark.parametrize(
    ("text", "expected"), [("A: b", None), ("A = (", None), ('QuantizationMethods = Literal["a", "b"]', ["a", "b"])]
)
def test_the_list_of_vllm_is_read_from_its_source(tmp_path: Path, text: str, expected: list[str] | None) -> None:
    assert read_quantizations(tmp_path) is None
    folder = tmp_path / "model_executor/layers/quantization"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(text)
    assert read_quantizations(tmp_path) == expected


@NEEDS_REAL
@pytest.mark.parametrize("name", ["gptq", "awq", "w4a16", "w8a8"])
def test_vllm_computes_the_rounded_weights(tmp_path: Path, name: str) -> None:
    """Each of its tokens is, for transformers with the same rounded weights, the likeliest or nearly so."""
    save(tmp_path / "plain", layers=2)
    rounded = write_quantized(tmp_path / "plain", tmp_path / name, name)
    generator = upshift.Generator(str(tmp_path / name), engine="vllm", engine_python=REAL, quality=0.99)
    answers = generator.generate(PROMPTS, max_new_tokens=NEW)
    reference = AutoModelForCausalLM.from_pretrained(rounded).eval()
    for prompt, answer in zip(byte_level_tokenizer(None)(PROMPTS).input_ids, answers, strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + answer.tokens])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        assert len(answer.tokens) == NEW and bool((logits.amax(1) - chosen < 0.1 * logits.std(1)).all()), name


@NEEDS_REAL
@pytest.mark.skipif("amx_tile" in Path("/proc/cpuinfo").read_text(), reason="vLLM has FP8 on CPUs with AMX")
def test_a_format_that_vllm_cannot_compute_here_is_one_line(tmp_path: Path) -> None:
    save(tmp_path / "plain", layers=1)
    write_quantized(tmp_path / "plain", tmp_path / "fp8", "fp8")
    generator = upshift.Generator(str(tmp_path / "fp8"), engine="vllm", engine_python=REAL, quality=0.99)
    with pytest.raises(RequestError, match="does not run in --engine vllm here .stored the engine vllm failed: ") as refused:
        generator.generate(PROMPTS, max_new_tokens=NEW)
    assert "\n" not in str(refused.value)
