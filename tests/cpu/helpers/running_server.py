"""``upshift serve`` as a process, until the test is over."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from upshift.training.data.tokenizer import train_byte_level_bpe

WORDS = "the quick brown fox jumps over a lazy dog while seven wizards watch the moon".split()  # noqa: SIM905
CHAT = (
    "{% for message in messages %}{% if message.content == 'broken' %}{{ 1 / 0 }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
)
START_SECONDS = 300.0
KEY = {"Authorization": "Bearer second"}


@dataclass
class Running:
    url: str
    process: subprocess.Popen[str]
    log: Path

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="second", max_retries=0, timeout=60)

    def engine(self, model: str = "tiny") -> dict[str, Any]:
        found: dict[str, Any] = httpx2.get(f"{self.url}/health").json()["models"][model]
        return found

    def post(self, path: str, body: Any, **more: Any) -> httpx2.Response:
        return httpx2.post(f"{self.url}{path}", json=body, **{"timeout": 60, "headers": KEY, **more})


def write_models(folder: Path) -> Path:
    """``tiny`` talks, ``enc`` gives embeddings -> the folder."""
    chance = np.random.default_rng(0)
    tokenizer = train_byte_level_bpe([" ".join(chance.choice(WORDS, size=12)) for _ in range(50)], 300)
    tokenizer.chat_template = CHAT
    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 320}
    tokenizer.save_pretrained(folder / "tiny")
    config = LlamaConfig(**small, eos_token_id=tokenizer.eos_token_id, max_position_embeddings=256)
    LlamaForCausalLM(config).save_pretrained(folder / "tiny")
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder / "enc")
    BertModel(BertConfig(**small, max_position_embeddings=64)).save_pretrained(folder / "enc")
    return folder


def wait(until: Callable[[], Any], seconds: float = START_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@contextmanager
def serving(models: Path, log: Path, *options: str) -> Iterator[Running]:
    command = [sys.executable, "-m", "upshift.cli.main", "serve", *options]
    quiet = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with log.open("w") as file:
        process = subprocess.Popen(command, stderr=file, stdout=file, text=True, env=quiet, cwd=models)
    try:
        wait(lambda: process.poll() is not None or "Serving at" in log.read_text())
        assert process.poll() is None, log.read_text()
        found = re.search(r"http://\S+:\d+", log.read_text())
        assert found is not None
        yield Running(found[0], process, log)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
