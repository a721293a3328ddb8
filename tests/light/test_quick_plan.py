"""Quick plans: from the config and the header of the weights alone; other models than decoders of the known kind are refused."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import upshift
from upshift.cli.main import app
from upshift.errors import RequestError

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip


def write_model(folder: Path, *, parameters: int | None = None, **changed: Any) -> str:
    """Write a config, and a header of files whose tensors have so many parameters. The tensors themselves are a hole."""
    (folder / "config.json").write_text(json.dumps(CONFIG | changed))
    if parameters is not None:
        header = {"weight": {"dtype": "BF16", "shape": [parameters], "data_offsets": [0, 2 * parameters]}}
        text = json.dumps(header).encode()
        with (folder / "model.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + 2 * parameters)
    return str(folder)


def plan(model: str, *options: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    app(["plan", model, "--quick", "--json", *options], standalone_mode=False)
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


TOTAL = 16 * (2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192 + 2 * 2048) + 2048 + 2 * 32000 * 2048


def test_a_plan_needs_the_config_and_the_header_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {*sys.modules}
    model = write_model(tmp_path, parameters=TOTAL)
    found = plan(model, "--on", "h100", "--sequence-length", "2048", "--global-batch", "32", capsys=capsys)
    assert found["model"]["parameters"]["total"] == TOTAL and found["model"]["is_estimated"]
    assert found["plans"][0]["plan"]["precision"] == "bf16"
    low, high = found["plans"][0]["predicted"]["interval"]
    assert low < 0.7 and high > 1.45  # those of a trace
    assert not {"torch", "transformers"} & ({*sys.modules} - before)


def test_python_plans_as_quickly_as_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path)
    found = plan(model, "--on", "h100", "--sequence-length", "1024", "--global-batch", "16", capsys=capsys)
    asked: dict[str, Any] = {"sequence_length": 1024, "global_batch": 16, "on": "h100", "quick": True}
    document = upshift.plan(model, **asked).document(num_plans=len(found["plans"]))
    assert json.loads(json.dumps(document))["plans"] == found["plans"]
    with pytest.raises(RequestError, match="4096 positions in the config"):
        upshift.plan(model, **(asked | {"sequence_length": 8192}))
    with pytest.raises(RequestError, match="quick=True does not work with images"):
        upshift.plan(model, **asked, images=2)


REFUSED_BEFORE_TORCH = """
import sys
import upshift
from upshift.cli.main import app
from upshift.errors import RequestError
model = sys.argv[1]
options = ["--on", "h100", "--quick", "--lora-rank", "8", "--lora-target", "q_proj"]
for ask in (
    lambda: upshift.plan(model, sequence_length=64, global_batch=1, on="h100", quick=True, lora_rank=8, lora_target=("q_proj",)),
    lambda: app(["plan", model, *options], standalone_mode=False),
):
    try:
        ask()
    except RequestError as error:
        print(error)
print(sorted({"torch", "transformers", "peft"} & {*sys.modules}))
"""


def test_an_adapter_without_formulas_is_refused_before_anything_is_imported(tmp_path: Path) -> None:
    command = [sys.executable, "-c", REFUSED_BEFORE_TORCH, write_model(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    from_python, from_the_command, imported = done.stdout.splitlines()
    assert from_python == from_the_command and "only for LoRA around all linear layers, not with target_modules" in from_python
    assert imported == "[]"


def test_adapters_and_generation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path)
    adapted = plan(model, "--on", "rtx-4090", "--lora-rank", "8", "--load-in-4bit", "--global-batch", "4", capsys=capsys)
    assert adapted["model"]["parameters"]["quantized"] == TOTAL - 16 * 2 * 2048 - 2048 - 2 * 32000 * 2048
    served = plan(model, "--generate", "--on", "h100", "--prompt-length", "64", "--output-length", "64", capsys=capsys)
    assert served["plans"][0]["plan"]["tensor_parallel"] == 1


@pytest.mark.parametrize(
    ("program", "host", "options"),
    [("deepspeed", "8xh100", ()), ("axolotl", "rtx-4090", ("--lora-rank", "8")), ("accelerate", "2xh100", ())],
)
def test_a_program_gets_the_best_plan_that_it_can_run(
    program: str, host: str, options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the batch of the request. Choices that the request fixes stay, or the command stops."""
    model, path = write_model(tmp_path), tmp_path / "written.json"
    asked = ("--on", host, "--global-batch", "64", "--sequence-length", "4096", *options)
    app(["plan", model, "--quick", "--json", *asked, "--write", f"{program}={path}"], standalone_mode=False)
    said = capsys.readouterr()
    words = " ".join(said.err.split())
    written = json.loads(path.read_text())
    assert json.loads(said.out)["plans"][0]["plan"]["torch_compile"] == "layer" and "Wrote" in words
    if program != "accelerate":
        assert f"configuration of {program} cannot express torch_compile=layer" in words
        assert f"the best plan that {program} can run" in words
        again = ("--set", "torch_compile=layer", "--write", f"{program}={tmp_path / 'again.json'}")
        with pytest.raises(RequestError, match="cannot express torch_compile=layer.*--set torch_compile=off"):
            app(["plan", model, "--quick", "--json", *asked, *again], standalone_mode=False)
    if program == "deepspeed":
        assert written["train_batch_size"] == 64
    if program == "axolotl":
        assert written["micro_batch_size"] * written["gradient_accumulation_steps"] == 64


OTHER_MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "a mixture": ({"num_local_experts": 8}, "num_local_experts"),
    "an encoder": ({"architectures": ["LlamaModel"]}, "LlamaModel"),
    "plain layers": ({"rms_norm_eps": None}, "no rms_norm_eps"),
    "latent attention": ({"kv_lora_rank": 512}, "kv_lora_rank"),
    "other files": ({"parameters": 2 * TOTAL}, "expects .* parameters"),
}


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_other_models_are_refused(name: str, tmp_path: Path) -> None:
    changed, reason = OTHER_MODELS[name]
    with pytest.raises(RequestError, match=f"a quick plan .*{reason}.*leave out --quick, or quick=True in Python"):
        app(["plan", write_model(tmp_path, **changed), "--quick", "--on", "h100"], standalone_mode=False)


@pytest.mark.parametrize("options", ["--data x", "--objective dpo", "--lock l.json", "--largest batch"])
def test_what_needs_a_trace_is_refused(options: str) -> None:
    with pytest.raises(RequestError, match=f"--quick does not use {options.split()[0]}"):
        app(["plan", "/no/such/model", "--quick", *options.split()], standalone_mode=False)


def test_lengths_are_those_of_the_config(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="longer than the 4096 positions in the config; use at most 4096"):
        app(["plan", write_model(tmp_path), "--quick", "--on", "h100", "--sequence-length", "4097"], standalone_mode=False)
