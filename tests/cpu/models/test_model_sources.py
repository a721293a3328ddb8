"""What a user may call a model, and what is no model: one line with the next step, never a traceback."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from command import Answer, Command
from transformers import CLIPConfig, LlamaConfig, MambaConfig, WhisperConfig

from upshift.errors import RequestError
from upshift.models.profile import Variant
from upshift.models.source import AdapterOptions, find_model, find_model_to_train
from upshift.models.tracing.profile_model import profile_model


@pytest.mark.parametrize(
    "name",
    ["no such/model", "modèle/llama", "a/\0", "models/llama\n", "my--models/llama", "llama/a.git", "~/llama", "models/", "/x"],
)  # fmt: skip
def test_a_mistyped_path_does_not_exist(name: str) -> None:
    with pytest.raises(RequestError, match="does not exist; give a Hugging Face directory") as refused:
        find_model(name)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["org/name", "org-2/Model_7B-v0.1"])
def test_the_hub_is_asked_for_its_ids(name: str) -> None:
    with pytest.raises(RequestError, match="not in the local hub cache"):
        find_model(name)


@pytest.mark.parametrize("name", ["x" * 5000, "folder/" + "x" * 5000])
def test_a_name_that_is_too_long(name: str) -> None:
    with pytest.raises(RequestError, match="cannot be read: File name too long; give") as refused:
        find_model(name)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("base", ["adapter", "other"])
def test_an_adapter_around_an_adapter(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, around in (("adapter", base), ("other", "adapter")):
        os.mkdir(name)
        config = {"peft_type": "LORA", "base_model_name_or_path": around}
        Path(name, "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(RequestError, match="names '(adapter|other)' as its model, which is an adapter, too"):
        find_model("adapter")


LLAMA = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip


def one_line(answer: Answer, *words: str) -> None:
    lines = [line for line in answer.err.splitlines() if line.startswith("upshift: ")]
    assert answer.code == 2 and len(lines) == 1 and "Traceback" not in answer.err, answer.err
    for word in words:
        assert word in lines[0], lines[0]


@pytest.mark.parametrize("wrong", [{"hidden_size": 0}, {"hidden_size": -32}, {"vocab_size": 0}], ids=str)
def test_sizes_of_no_model(wrong: dict[str, int], upshift: Command, tmp_path: Path) -> None:
    LlamaConfig(**LLAMA, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | wrong))
    one_line(upshift("inspect", tmp_path, "--sequence-length", 8), "check the config's sizes")
    if min(wrong.values()) < 0:
        one_line(upshift("inspect", tmp_path, "--placement", "--sequence-length", 8), "check the config's sizes")


def test_a_model_that_takes_no_adapter(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    MambaConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4, architectures=["MambaForCausalLM"]
    ).save_pretrained(tmp_path)
    with pytest.raises(RequestError, match="around MambaForCausalLM.*target_modules"):
        profile_model(find_model_to_train(str(tmp_path), AdapterOptions(lora_rank=4)), sequence_length=8, variants=())


def test_a_model_of_two_embeddings(upshift: Command, tmp_path: Path) -> None:
    part = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text, vision = {**part, "vocab_size": 64}, {**part, "image_size": 8, "patch_size": 4}
    CLIPConfig(text_config=text, vision_config=vision, architectures=["CLIPModel"]).save_pretrained(tmp_path)
    one_line(upshift("inspect", tmp_path, "--sequence-length", 8), "(CLIPModel) has no loss that Upshift trains")
    answer = upshift("inspect", tmp_path, "--placement", "--sequence-length", 8, "--json")
    assert answer.code == 0 and "text_model.embeddings" in answer.out, answer.err


def test_a_class_that_is_not_trained_is_placed(upshift: Command, tmp_path: Path) -> None:
    part = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    WhisperConfig(
        vocab_size=64, d_model=16, encoder_ffn_dim=16, decoder_ffn_dim=16, **part, pad_token_id=0, eos_token_id=1, bos_token_id=1,
        architectures=["WhisperForConditionalGeneration"],
    ).save_pretrained(tmp_path)  # fmt: skip
    one_line(upshift("inspect", tmp_path), "WhisperForConditionalGeneration", f"upshift inspect {tmp_path} --placement")


def test_a_cache_that_cannot_be_used(
    upshift: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Even root writes no file there."""
    LlamaConfig(**LLAMA, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path / "model")
    (tmp_path / "file").touch()
    monkeypatch.setenv("UPSHIFT_CACHE", str(tmp_path / "file"))
    variants = (Variant("fp32", "eager", masked=False),)
    assert profile_model(find_model(str(tmp_path / "model")), sequence_length=8, variants=variants).num_layers == 2
    assert [record.message for record in caplog.records if "UPSHIFT_CACHE" in record.message] == [
        f"what was traced is not kept in {tmp_path / 'file'}: Not a directory; UPSHIFT_CACHE names another folder"
    ]
    torch.save({}, tmp_path / "model" / "pytorch_model.bin")
    one_line(upshift("shard", tmp_path / "model", "-o", tmp_path / "out"), "set UPSHIFT_CACHE")


def test_the_demo_writes_into_a_folder(upshift: Command, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    one_line(upshift("demo", "-o", tmp_path / "file"), f"--output {tmp_path / 'file'} is a file", "give a folder")
