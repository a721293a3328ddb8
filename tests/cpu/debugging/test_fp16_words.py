"""Weights from training in bf16 under fp16: told before the first step, with what to type, in the words of the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from upshift.cli.run_display import RunDisplay
from upshift.models.source import find_model
from upshift.planning.plan import Plan
from upshift.training.arguments import Arguments
from upshift.training.data.tokenizer import train_byte_level_bpe
from upshift.training.job.job import Job, prepare_data, run_job
from upshift.training.loop.events import Event

TEXT = "def add(first, second):\n    return first + second\n"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_of_bf16_under_fp16(dtype: torch.dtype, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A plan as one for a device with fp16 has it: most CPUs' own plans have none."""
    tokenizer = train_byte_level_bpe([TEXT * 20], 300)
    tokenizer.save_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    LlamaForCausalLM(config).to(dtype).save_pretrained(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps({"text": TEXT}) for _ in range(12)))
    source = find_model(str(tmp_path / "model"))
    data = prepare_data(source, tmp_path / "data.jsonl", sequence_length=16)
    plan = Plan(
        device="cpu", host="test", model=source.model_hash, sequence_length=16, per_device_train_batch_size=2, precision="fp16"
    )
    job = Job(
        model_reference=str(tmp_path / "model"), plan=plan, arguments=Arguments(max_steps=1), data=str(tmp_path / "data.jsonl"),
        global_batch=2, output=str(tmp_path / "out"),
    )  # fmt: skip
    order: list[str] = []
    with RunDisplay() as display:

        def show(event: Event) -> None:
            order.append(type(event).__name__)
            display.watcher.event(event)

        run_job(job, data, on_event=show)
    told = " ".join(capfd.readouterr().err.split())
    if dtype == torch.bfloat16:
        assert order.index("Doubted") < order.index("StepDone")
        assert "training in bf16, and fp16 is asked for" in told and "--set precision=bf16" in told
    else:
        assert "Doubted" not in order
