"""What ``upshift plan`` prints, at the 80 columns of a pipe: every column, what is unknown, and images as images."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import Command
from transformers import LlamaConfig, ViTConfig


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("decoder")
    LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=256, architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    ViTConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8,
        architectures=["ViTForImageClassification"],
    ).save_pretrained(folder)  # fmt: skip
    return folder


@pytest.mark.parametrize("task", ["--generate --prompt-length 64 --output-length 64", "--encode --sequence-length 64"])
def test_memory_is_in_the_table_of_80_columns(upshift: Command, decoder: Path, task: str) -> None:
    code, out, err = upshift("plan", decoder, *task.split(), "--on", "8xh100")
    assert code == 0, err
    head = next(line for line in out.splitlines() if "TTFT ms" in line)
    assert head.split()[-1] == "GiB" and len(head) <= 80
    assert "plans that fit" in out


@pytest.mark.parametrize("task", ["--sequence-length 64", "--generate --prompt-length 64 --output-length 64"])
def test_memory_that_is_unknown_is_said(upshift: Command, decoder: Path, task: str) -> None:
    code, out, err = upshift("plan", decoder, *task.split(), "--on", "epyc-9654")
    words = " ".join(out.split())
    assert code == 0, err
    assert "The memory of epyc-9654 is unknown" in words and "as in epyc-9654-768gb" in words
    assert "that fit" not in words


def test_images_are_planned_as_images(upshift: Command, pictures: Path) -> None:
    code, out, err = upshift("plan", pictures, "--on", "1xh100")
    assert code == 0, err
    assert "global batch 8 images" in out and "images/s" in out and "tok" not in out
    code, out, err = upshift("plan", pictures, "--on", "1xh100", "--largest", "batch", "--set", "torch_compile=off")
    assert code == 0 and "images at once" in out, err
    assert "evaluation does not: needs" in " ".join(out.split())  # the step would fit
    code, out, err = upshift("plan", pictures, "--compare", "1xh100", "--tokens", "1e9")
    assert code == 2 and "takes images; use --steps" in err
