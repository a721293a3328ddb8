"""Generation and encoding on pretended GPUs: races, and replicas, give what the CPU gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from chat_models import byte_level_tokenizer
from pretended_gpus import Run

PROMPTS = ("the model writes", "a question about rivers and roads", "north", "every answer to the question")
ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}
ALONE = ("--engine", "torch")  # without a race of engines
TWO = ("--replicas", "2")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a decoder, an encoder, and a file of prompts."""
    import torch
    from transformers import AutoModel, AutoModelForCausalLM, BertConfig, LlamaConfig

    folder = tmp_path_factory.mktemp("models")
    tokenizer = byte_level_tokenizer()
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    sizes["vocab_size"] = len(tokenizer)
    torch.manual_seed(0)
    decoder = LlamaConfig(**sizes, max_position_embeddings=256, bos_token_id=tokenizer.bos_token_id, eos_token_id=None)
    AutoModelForCausalLM.from_config(decoder).save_pretrained(folder / "decoder")
    AutoModel.from_config(BertConfig(**sizes)).save_pretrained(folder / "encoder")
    for name in ("decoder", "encoder"):
        tokenizer.save_pretrained(folder / name)
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    return folder


def answers(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def test_races_and_replicas_answer_as_the_cpu_does(
    on_gpus: Run, keep_probe: Callable[[str], None], models: Path, tmp_path: Path
) -> None:
    command = (
        "-m", "upshift", "generate", str(models / "decoder"), "--prompts", str(models / "prompts.txt"), "--max-new-tokens", "6",
        "--output",
    )  # fmt: skip
    keep_probe("2xh100")
    for name, options, variables in (("cpu.jsonl", ALONE, ON_CPU), ("two.jsonl", TWO, {})):
        done = on_gpus("2xh100", *command, str(tmp_path / name), *options, **variables)
        assert done.returncode == 0, done.stderr[-3000:]
    on_cpu, on_two = (answers(tmp_path / f"{name}.jsonl") for name in ("cpu", "two"))
    assert len(on_cpu) == len(PROMPTS) and on_two == on_cpu


def test_encodings_are_those_of_the_cpu(
    on_gpus: Run, keep_probe: Callable[[str], None], models: Path, tmp_path: Path
) -> None:
    command = ("-m", "upshift", "encode", str(models / "encoder"), "--input", str(models / "prompts.txt"), "--output")
    keep_probe("2xh100")
    for name, options, variables in (("cpu.npy", ALONE, ON_CPU), ("two.npy", (*TWO, *ALONE), {})):
        done = on_gpus("2xh100", *command, str(tmp_path / name), *options, **variables)
        assert done.returncode == 0, done.stderr[-3000:]
    on_cpu, on_two = (np.load(tmp_path / name) for name in ("cpu.npy", "two.npy"))
    assert on_cpu.shape[0] == len(PROMPTS) and np.abs(on_cpu - on_two).max() < 1e-5
