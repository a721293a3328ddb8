"""GGUF files: every tensor as transformers reads it, from values and from blocks, and damaged files refused in one line."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Form
from transformers import AutoModelForCausalLM, PreTrainedModel

from upshift.errors import MissingExtra, RequestError
from upshift.loading import gguf as gguf_file
from upshift.loading.gguf import open_gguf
from upshift.loading.load import load_model
from upshift.loading.rewrite.convert import convert

WIDTH, LAYERS, TOKENS = 64, 2, 48
SIZES = {
    "vocab_size": TOKENS, "hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 768}  # transformers reads no other width
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # by GGUF's name of the architecture: transformers' name, and a tiny config
    "llama": ("llama", SIZES),
    "qwen2": ("qwen2", SIZES | {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", SIZES | {"head_dim": 16}),
    "gpt2": ("gpt2", {"vocab_size": TOKENS, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4}),
    "qwen3moe": ("qwen3_moe", SIZES | EXPERTS | {"head_dim": 128}),
}  # fmt: skip


def write(file: Path, architecture: str, form: Form = Form.F32, *, leave: str = "none", extra: Iterable[Any] = ()) -> None:
    """A model of random weights, in GGUF's names and shapes; the values are what they are, as nothing is computed with them."""
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(128 if architecture == "qwen3moe" else 16)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_layer_norm_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_expert_count(EXPERTS["num_experts"])
    writer.add_expert_used_count(EXPERTS["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(EXPERTS["moe_intermediate_size"])
    writer.add_token_list([f"token {number}" for number in range(TOKENS)])
    for add, *arguments in extra:
        getattr(writer, add)(*arguments)
    generator = np.random.default_rng(0)
    for name, shape in shapes(architecture).items():
        if name == leave:
            continue
        content = generator.standard_normal(shape, np.float32)
        blocks = form if len(shape) > 1 else Form.F32
        stored = gguf.quants.quantize(content, blocks)
        writer.add_tensor(name, stored, raw_dtype=blocks)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def shapes(architecture: str) -> dict[str, tuple[int, ...]]:
    kind, sizes = MODELS[architecture]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **sizes))
    number = next(known for known, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, LAYERS)
    found: dict[str, tuple[int, ...]] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        shape = tuple(tensor.shape)
        if name.endswith("experts.gate_up_proj"):
            layer = name.split(".")[2]
            half = (shape[0], shape[1] // 2, shape[2])
            found |= {f"blk.{layer}.ffn_{part}_exps.weight": half for part in ("gate", "up")}
            continue
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if known is None:  # experts
            known = f"{names.get_name(name)}.weight"
        transposed = architecture == "gpt2" and name.endswith(".weight") and ".c_" in name
        found[known] = shape[::-1] if transposed else shape
    return found


def same(one: PreTrainedModel, other: PreTrainedModel) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("architecture", MODELS)
def test_every_tensor_is_that_of_transformers(architecture: str, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", architecture)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf")
    seen: list[tuple[int, int]] = []
    same(load_model(str(tmp_path / "m.gguf"), progress=lambda done, total: seen.append((done, total))), theirs)
    total = sum(tensor.n_bytes for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors)
    assert len(seen) > LAYERS and seen == sorted(seen) and seen[-1] == (total, total)


@pytest.mark.parametrize("form", [Form.F16, Form.BF16, Form.Q8_0, Form.Q4_0, Form.Q5_1])
def test_blocks_are_unpacked_as_transformers_does(form: Form, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "llama", form)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.bfloat16)
    same(load_model(str(tmp_path / "m.gguf"), dtype="bfloat16"), theirs)


def test_it_is_converted_to_safetensors(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "llama", Form.Q8_0)
    convert(str(tmp_path / "m.gguf"), tmp_path / "out", dtype="float16", progress=lambda done, total: None)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    same(ours, load_model(str(tmp_path / "m.gguf"), dtype="float16"))


def test_one_tensor_is_read_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "m.gguf", "llama")
    found, read = open_gguf(tmp_path / "m.gguf"), []
    monkeypatch.setattr(gguf, "dequantize", lambda data, form: read.append(data.size) or data.view(np.float32))
    assert found.read("model.norm.weight").shape == (WIDTH,) and read == [WIDTH]


def rewritten(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def changed(file: Path) -> None:
        write(file, "llama")
        file.write_bytes(change(file.read_bytes()))

    return changed


def with_counts(tensors: int, keys: int) -> Callable[[Path], None]:
    return rewritten(lambda content: content[:8] + struct.pack("<QQ", tensors, keys) + content[24:])


def endless_array(file: Path) -> None:
    key = b"general.architecture"
    file.write_bytes(
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, 5) + b"llama"
        + struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, 0, 2**60)
    )  # fmt: skip


DAMAGED: dict[str, tuple[Callable[[Path], None], str]] = {
    "nothing": (lambda file: file.touch(), "cannot be read"),
    "text": (lambda file: file.write_text("weights\n" * 100) and None, "magic"),
    "only the magic": (lambda file: file.write_bytes(b"GGUF") and None, "cannot be read"),
    "a truncated header": (rewritten(lambda content: content[:200]), "cannot be read"),
    "truncated tensors": (rewritten(lambda content: content[:-1000]), "cannot be read"),
    "another version": (rewritten(lambda content: content[:4] + b"\x63" + content[5:]), "v99"),
    "2**60 tensors": (with_counts(2**60, 3), "cannot be read"),
    "2**60 keys": (with_counts(3, 2**60), "cannot be read"),
    "an array of 2**60": (endless_array, "cannot be read"),
    "an unknown architecture": (rewritten(lambda content: content.replace(b"llama", b"lambs")), "architecture lambs is not"),
    "no architecture": (rewritten(lambda content: content.replace(b"general.arch", b"general.arcs")), "general.architecture"),
    "a missing tensor": (lambda file: write(file, "llama", leave="blk.1.ffn_up.weight"), "'model.layers.1.mlp.up_proj.weight'"),
    "another size": (rewritten(lambda content: content.replace(struct.pack("<I", 96), struct.pack("<I", 80), 1)), "shape"),
    "a tensor twice": (rewritten(lambda content: content.replace(b"blk.1.ffn_up", b"blk.0.ffn_up")), "ffn_up"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_refused_in_one_line(damage: str, tmp_path: Path) -> None:
    make, words = DAMAGED[damage]
    make(tmp_path / "m.gguf")
    with pytest.raises(RequestError) as caught:
        load_model(str(tmp_path / "m.gguf"))
    message = str(caught.value)
    assert words in message and "m.gguf" in message and message.isprintable() and len(message) < 600, message


def test_what_cannot_be_done_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "m.gguf"
    with pytest.raises(RequestError, match="there is no file"):
        load_model(str(file))
    with pytest.raises(RequestError, match="upshift convert"):
        load_model(str(file), quantize="int8")
    with pytest.raises(RequestError, match="dtype 'int3'"):
        load_model(str(file), dtype="int3")
    monkeypatch.setattr(gguf_file, "installed_version", lambda _: None)
    with pytest.raises(MissingExtra, match=r"pip install '.*\[gguf\]'"):
        load_model(str(file))
