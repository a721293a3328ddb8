"""What ``upshift plan`` prints, at the 80 columns of a pipe: every column, what is unknown, and images as images."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import Command
from transformers import DebertaV2Config, LlamaConfig, Qwen3MoeConfig, ViTConfig


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("decoder")
    LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=512, architectures=["LlamaForCausalLM"],
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
    assert ("TPOT ms" in head) == ("--generate" in task)
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


@pytest.mark.parametrize("on", ["h100", "2xh100", "epyc-9654-768gb"])
def test_a_model_without_fused_attention_is_planned_with_its_own(upshift: Command, tmp_path: Path, on: str) -> None:
    DebertaV2Config(
        hidden_size=64, num_attention_heads=2, num_hidden_layers=1, intermediate_size=96, vocab_size=300,
        architectures=["DebertaV2ForMaskedLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    code, out, err = upshift("plan", tmp_path, "--on", on, "--sequence-length", 384, "--json")
    assert code == 0, err
    assert json.loads(out)["plans"][0]["plan"]["attention"] == "eager"


def test_long_rows_are_planned_with_eager_attention_on_request(upshift: Command, decoder: Path) -> None:
    arguments = ("plan", decoder, "--on", "v100-16gb", "--sequence-length", 384, "--json")
    code, out, err = upshift(*arguments, "--set", "attention=eager")
    assert code == 0, err
    assert json.loads(out)["plans"][0]["plan"]["attention"] == "eager"
    code, out, err = upshift(*arguments)
    assert code == 0 and json.loads(out)["plans"][0]["plan"]["attention"] == "sdpa", err


def test_a_model_that_cannot_be_trained_on_pairs_is_not_planned_for_them(upshift: Command, tmp_path: Path) -> None:
    """Router losses are of all tokens of a batch, so they belong to no answer."""
    Qwen3MoeConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
        intermediate_size=32, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, output_router_logits=True,
        router_aux_loss_coef=1.0, architectures=["Qwen3MoeForCausalLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    code, out, err = upshift("plan", tmp_path, "--objective", "dpo", "--sequence-length", 64, "--on", "1xh100")
    assert code == 2 and out == "" and "Traceback" not in err
    assert "its loss is not the log-probability of its labels alone; use another model" in " ".join(err.split())
