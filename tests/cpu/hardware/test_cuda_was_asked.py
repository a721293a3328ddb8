"""Runs and trials on a machine where an import asks CUDA something, as torchao's does: no fork of that process can compute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

# Python imports it when it starts. In a fork of a process that has torch, every product fails as the first use of a GPU would.
SITE = """
import os
import sys

def lost():
    torch = sys.modules.get("torch")
    if torch is None:
        return
    def fail(*_, **__):
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
    torch.cuda._is_in_bad_fork = lambda: True
    torch.nn.functional.linear = fail

os.register_at_fork(after_in_child=lost)
"""


CHEAP = ("--set", "torch_compile=off", "--set", "precision=fp32", "--set", "attention=sdpa")  # little is traced


@pytest.mark.parametrize("options", [("--nproc", "2", "--trial-seconds", "0"), ("--trial-seconds", "6")])
def test_processes_that_compute_begin_anew(options: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITE)
    rows = [json.dumps({"input_ids": [*range(number, number + 16)]}) for number in range(64)]
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 320}
    LlamaConfig(**sizes, max_position_embeddings=64, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path / "model")
    command = (
        "train", tmp_path / "model", "--from-config", "--data", tmp_path / "data.jsonl", "-o", tmp_path / "out",
        "--sequence-length", "16", "--global-batch", "4", "--max-steps", "2", "--json", *CHEAP, *options,
    )  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-m", "upshift", *map(str, command)], capture_output=True, text=True, env=environment, timeout=500,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0 and (tmp_path / "out" / "model.safetensors").is_file(), done.stderr
    assert "no plan ran" not in done.stderr and "CUDA" not in done.stderr, done.stderr
