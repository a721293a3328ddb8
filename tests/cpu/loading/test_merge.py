"""``upshift merge`` against peft's own ``merge_and_unload``, to the bit, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from command import Answer
from safetensors.torch import load_file, save_file

from upshift.inference.weights import find_weights

peft = pytest.importorskip("peft", reason="peft is not installed")

LLAMA = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "attention_bias": True,
}  # fmt: skip
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", LLAMA),
    "tied": ("LlamaConfig", "LlamaForCausalLM", LLAMA | {"tie_word_embeddings": True}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"vocab_size": 128, "n_embd": 64, "n_layer": 1, "n_head": 4}),
    "bert": (
        "BertConfig", "BertForSequenceClassification",
        {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96},
    ),
    "moe": (
        "Qwen3MoeConfig", "Qwen3MoeForCausalLM",
        LLAMA | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
    ),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {key: size for key, size in LLAMA.items() if "bias" not in key} | {
        "num_local_experts": 3,
    }),
}  # fmt: skip
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {"target_modules": ["q_proj", "v_proj"]}),
    "patterns": (
        "llama",
        {"target_modules": "all-linear", "use_rslora": True, "rank_pattern": {"q_proj": 3}, "alpha_pattern": {"v_proj": 33}},
    ),
    "dora": ("llama", {"target_modules": ["q_proj", "embed_tokens", "down_proj"], "use_dora": True}),
    "biases": ("llama", {"target_modules": ["q_proj", "o_proj"], "bias": "all"}),
    "bias of the adapter": ("llama", {"target_modules": ["q_proj"], "lora_bias": True}),
    "whole modules": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}),
    "parameters": ("llama", {"target_modules": ["k_proj"], "target_parameters": ["q_proj.weight"]}),
    "tied, both changed": ("tied", {"target_modules": ["embed_tokens", "lm_head"]}),
    "tied, the head trained whole": ("tied", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "tied, the embedding trained whole": ("tied", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
    "transposed": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "transposed dora": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "use_dora": True}),
    "a head": ("bert", {"target_modules": ["query"], "task_type": "SEQ_CLS"}),
    "beside experts": ("moe", {"target_modules": ["q_proj"]}),
    "experts": ("moe", {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}),
    "some experts' weights": ("mixtral", {"target_modules": [], "target_parameters": ["experts.down_proj"]}),
}  # fmt: skip
HALF = ("plain", "experts", "dora", "tied, both changed", "whole modules")


def made(folder: Path, model: str, options: dict[str, Any], dtype: torch.dtype = torch.float32) -> tuple[Path, Path]:
    """A base model in shards, and an adapter on it that has been trained."""
    config, kind, sizes = MODELS[model]
    torch.manual_seed(0)
    base = getattr(transformers, kind)(getattr(transformers, config)(**sizes)).to(dtype)
    base.save_pretrained(folder / "base", max_shard_size="100KB")
    (folder / "base" / "tokenizer.json").write_text("{}")
    base.config._name_or_path = base.name_or_path = str(folder / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied weights
        adapted = peft.get_peft_model(base, peft.LoraConfig(**({"task_type": "CAUSAL_LM"} | options)))
        for weight in adapted.parameters():
            if weight.requires_grad:
                weight.data += 0.1 * torch.randn_like(weight)
        adapted.save_pretrained(folder / "adapter")
    return folder / "base", folder / "adapter"


def merged_by_peft(base: Path, adapter: Path, model: str, output: Path) -> None:
    kind = getattr(transformers, MODELS[model][1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.PeftModel.from_pretrained(kind.from_pretrained(base, dtype="auto"), str(adapter))
        adapted.merge_and_unload().save_pretrained(output)


def stored_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def store(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """In place of what is there."""
    for file in (*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def compare(output: Path, wanted: Path) -> None:
    ours, theirs = stored_in(output), stored_in(wanted)
    assert ours.keys() == theirs.keys()
    different = {name: tensor.dtype for name, tensor in ours.items() if tensor.dtype != theirs[name].dtype}
    assert not different
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    said = [json.loads((folder / "config.json").read_text()) for folder in (output, wanted)]
    assert said[0] == said[1]


def test_a_reward_head_of_the_adapter_comes_with_its_label(tmp_path: Path, upshift: Any) -> None:
    """The base model is a language model, whose config says two labels."""
    base, _ = made(tmp_path, "llama", {"target_modules": ["q_proj"]})
    torch.manual_seed(1)
    rewarding = transformers.AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    adapted = peft.get_peft_model(rewarding, peft.LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj", "v_proj"]))
    for weight in adapted.parameters():
        if weight.requires_grad:
            weight.data += 0.1 * torch.randn_like(weight)
    adapted.save_pretrained(tmp_path / "adapter")
    answer = upshift("merge", tmp_path / "adapter", "-o", tmp_path / "merged")
    assert answer.code == 0, answer.err
    adapted.merge_and_unload().save_pretrained(tmp_path / "wanted")
    ours, theirs = stored_in(tmp_path / "merged"), stored_in(tmp_path / "wanted")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").config.num_labels == 1


@pytest.mark.parametrize("name", ADAPTERS)
def test_merged_is_what_peft_makes(upshift, tmp_path, name):
    model, options = ADAPTERS[name]
    base, adapter = made(tmp_path, model, options)
    answer = upshift("merge", adapter, "-o", tmp_path / "out", "--json")
    assert answer.code == 0, answer.err
    merged_by_peft(base, adapter, model, tmp_path / "theirs")
    compare(tmp_path / "out", tmp_path / "theirs")
    assert (tmp_path / "out" / "tokenizer.json").is_file()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", HALF)
def test_merged_in_half_precision(upshift, tmp_path, name, dtype):
    model, options = ADAPTERS[name]
    base, adapter = made(tmp_path, model, options, dtype)
    assert upshift("merge", adapter, "-o", tmp_path / "out").code == 0
    merged_by_peft(base, adapter, model, tmp_path / "theirs")
    compare(tmp_path / "out", tmp_path / "theirs")


@pytest.mark.parametrize("name", ["patterns", "dora", "transposed", "tied, both changed"])
def test_merged_by_blocks_of_rows(upshift, tmp_path, monkeypatch, name):
    """As large weights are."""
    from upshift.loading import lora

    monkeypatch.setattr(lora, "BLOCK_BYTES", 1)
    model, options = ADAPTERS[name]
    base, adapter = made(tmp_path, model, options)
    assert upshift("merge", adapter, "-o", tmp_path / "out").code == 0
    merged_by_peft(base, adapter, model, tmp_path / "theirs")
    compare(tmp_path / "out", tmp_path / "theirs")


def test_the_same_request_goes_on(upshift, tmp_path):
    _, adapter = made(tmp_path, *ADAPTERS["whole modules"])
    first = json.loads(upshift("merge", adapter, "-o", tmp_path / "out", "--json").out)
    again = json.loads(upshift("merge", adapter, "-o", tmp_path / "out", "--json").out)
    assert (again["kept_shards"], again["sha256"]) == (1, first["sha256"])


def test_weights_that_nobody_has_are_named(upshift, tmp_path):
    """A classifier on a language model: the pooler was drawn, and peft did not keep it."""
    base, adapter = made(tmp_path, *ADAPTERS["a head"])
    store(base, {name: tensor for name, tensor in stored_in(base).items() if "pooler" not in name})
    answer = upshift("merge", adapter, "-o", tmp_path / "out", "--json")
    assert "bert.pooler.dense.weight is in neither" in answer.err
    assert json.loads(answer.out)["noted"] == {"bert.pooler.dense.weight": 64 * 64, "bert.pooler.dense.bias": 64}


@pytest.mark.parametrize("same", [True, False])
def test_tied_weights_that_are_stored_twice(upshift, tmp_path, same):
    """Pickles keep both. transformers ties them where they are the same, whatever the config says."""
    base, adapter = made(tmp_path, "tied", {"target_modules": ["embed_tokens"]})
    stored = stored_in(base)
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"] + (0 if same else 1)
    store(base, stored)
    assert upshift("merge", adapter, "-o", tmp_path / "out").code == 0
    merged_by_peft(base, adapter, "tied", tmp_path / "theirs")
    ours, theirs = stored_in(tmp_path / "out"), stored_in(tmp_path / "theirs")
    assert torch.equal(ours["model.embed_tokens.weight"], theirs["model.embed_tokens.weight"])
    head = theirs["model.embed_tokens.weight" if same else "lm_head.weight"]
    assert torch.equal(ours["lm_head.weight"], head) and torch.equal(head, stored["lm_head.weight"]) != same


def refused(answer: Answer, *words: str) -> None:
    lines = [line for line in answer.err.splitlines() if line.startswith("upshift: ")]
    assert (answer.code, len(lines)) == (2, 1), answer.err
    for word in words:
        assert word in lines[0], lines[0]


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"peft_type": "PREFIX_TUNING"}, ("PREFIX_TUNING", "LORA")),
        ({"peft_type": "LOHA"}, ("LOHA", "LORA")),
        ({"init_lora_weights": "pissa"}, ("pissa", "path_initial_model_for_weight_conversion")),
        ({"alora_invocation_tokens": [1]}, ("alora_invocation_tokens",)),
        ({"layer_replication": [[0, 1], [0, 1]]}, ("layer_replication",)),
        ({"trainable_token_indices": [1]}, ("trainable_token_indices",)),
        ({"target_modules": ["nothing"]}, ("is not an adapter for", "nothing")),
        ({"target_modules": ["q_proj", "v_proj", "k_proj"]}, ("the adapter lacks", "k_proj")),
        ({"target_modules": ["q_proj"]}, ("the adapter has", "v_proj")),
        ({"r": 4}, ("is not an adapter for", "size mismatch")),
    ],
)
def test_refused_adapters(upshift, tmp_path, fields, words):
    _, adapter = made(tmp_path, *ADAPTERS["plain"])
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | fields))
    refused(upshift("merge", adapter, "-o", tmp_path / "out"), *words)
    assert not (tmp_path / "out").exists()


def test_refused_bases(upshift, tmp_path):
    base, adapter = made(tmp_path, *ADAPTERS["plain"])
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    refused(upshift("merge", adapter, "-o", tmp_path / "out"), "quantized")
    (base / "config.json").write_text(json.dumps(config | {"intermediate_size": 128, "hidden_size": 128}))
    refused(upshift("merge", adapter, "-o", tmp_path / "out"), "is not an adapter for")
    (base / "config.json").write_text(json.dumps(config))
    weights = adapter / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1])
    refused(upshift("merge", adapter, "-o", tmp_path / "out"), "truncated")
    weights.rename(adapter / "adapter_model.bin")
    refused(upshift("merge", adapter, "-o", tmp_path / "out"), "adapter_model.safetensors", "save the adapter again")
    shutil.rmtree(base)
    refused(upshift("merge", adapter, "-o", tmp_path / "out"), str(base), "does not exist")


def test_an_adapter_is_merged_before_anything_else(upshift, tmp_path):
    """What cannot use an adapter says a command that makes what it can use."""
    _, adapter = made(tmp_path, *ADAPTERS["plain"])
    (tmp_path / "texts.txt").write_text("a text\n")
    for command in (
        ("shard", adapter, "-o", tmp_path / "out"), ("generate", adapter, "--prompt", "a"), ("plan", adapter, "--generate"),
        ("encode", adapter, "-i", tmp_path / "texts.txt", "-o", tmp_path / "rows.npy"),
        ("quantize", adapter, "--bits", "8", "--texts", tmp_path / "texts.txt", "-o", tmp_path / "out"),
    ):  # fmt: skip
        answer = upshift(*command)
        refused(answer, f"upshift merge {adapter} --output DIR")
    words = re.search(r"upshift (merge \S+ --output) DIR", " ".join(answer.err.split())).group(1).split()
    assert upshift(*words, tmp_path / "merged").code == 0
    assert find_weights(str(tmp_path / "merged")).adapter is None
    save_file({}, tmp_path / "adapter.safetensors")
    refused(upshift("merge", tmp_path / "adapter.safetensors", "-o", tmp_path / "out"), "adapter_config.json")
