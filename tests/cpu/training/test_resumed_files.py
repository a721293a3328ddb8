"""A run that was resumed writes the files of one that never stopped, to the byte, whether its checkpoint is whole or in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_train import a_job, home  # noqa: F401  fixtures
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig

from upshift.models.source import find_model
from upshift.training.checkpoint.checkpoint import newest_checkpoint
from upshift.training.checkpoint.model import MODEL_LIST_NAME, model_files
from upshift.training.checkpoint.sharded import is_sharded
from upshift.training.data.dataset import TrainingData, prepare_data
from upshift.training.loop import save
from upshift.training.loop.loop import train
from upshift.training.loop.signals import StopRequest
from upshift.training.loop.state import open_run

GENERATION: dict[str, Any] = {"do_sample": True, "temperature": 0.3, "top_p": 0.9, "eos_token_id": [1, 2], "max_new_tokens": 7}
CLASSES = {"llama": AutoModelForCausalLM, "t5": AutoModelForSeq2SeqLM}


def a_model(kind: str, home: Path) -> tuple[str, TrainingData]:  # noqa: F811
    """Return the name and the data of a model with weights, generation options and a chat template."""
    folder = home / f"{kind} with files"
    torch.manual_seed(0)
    made = CLASSES[kind].from_config(AutoConfig.from_pretrained(home / kind))
    made.save_pretrained(folder)
    GenerationConfig(**GENERATION).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(home / kind)
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(folder)
    return folder.name, prepare_data(find_model(str(folder)), home / "data.jsonl", sequence_length=32)


def final_files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in [*model_files(folder), MODEL_LIST_NAME]}


def run(
    home: Path,  # noqa: F811
    model: tuple[str, TrainingData],
    output: Path,
    *,
    from_config: bool,
    **fields: Any,
) -> dict[str, bytes]:
    name, data = model
    output.mkdir(exist_ok=True)
    job = open_run(a_job(home, output, model=name, max_steps=2, **fields).changed(from_config=from_config), data)
    train(job, data, on_event=lambda event: None, stop=StopRequest())
    return final_files(output)


CASES: dict[str, tuple[str, tuple[bool, bool], bool]] = {  # model; first and resumed run in parts; from_config
    "in parts": ("llama", (True, True), False),
    "whole from parts": ("llama", (True, False), False),
    "in parts from a whole one": ("llama", (False, True), False),
    "whole": ("llama", (False, False), False),
    "in parts, from the config": ("llama", (True, True), True),
    "an encoder and a decoder, whole from parts": ("t5", (True, False), False),
}


@pytest.mark.parametrize("case", CASES)
def test_files_are_those_of_a_run_that_never_stopped(
    case: str,
    home: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind, in_parts, from_config = CASES[case]
    model = a_model(kind, home)
    expected = run(home, model, tmp_path / "whole", from_config=from_config)
    monkeypatch.setattr(save, "has_shards", lambda optimizer, mesh: in_parts[0])
    run(home, model, tmp_path / "resumed", from_config=from_config, save_steps=1, stop_after_tokens=1)
    checkpoint = newest_checkpoint(tmp_path / "resumed")
    assert checkpoint is not None and checkpoint.name == "checkpoint-1" and is_sharded(checkpoint) is in_parts[0]
    monkeypatch.setattr(save, "has_shards", lambda optimizer, mesh: in_parts[1])
    found = run(home, model, tmp_path / "resumed", from_config=from_config, resume=True)
    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []
    if not from_config:
        written = GenerationConfig.from_pretrained(tmp_path / "resumed")
        assert {name: getattr(written, name) for name in GENERATION} == GENERATION
