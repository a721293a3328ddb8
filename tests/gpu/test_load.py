"""Loading onto a GPU: through pinned memory, as it is stored and converted on the way; every tensor is that of transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from upshift.loading.load import load_model
from upshift.loading.tensors import PIECE_BYTES

SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip
LARGE = PIECE_BYTES // (2 * SIZES["hidden_size"]) + 1  # words: an embedding of more than two pieces in fp32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("experts", [False, True])
def test_tensors_on_a_gpu_are_those_of_transformers(experts, dtype, tmp_path):
    torch.manual_seed(0)
    model = (
        MixtralForCausalLM(MixtralConfig(vocab_size=96, num_local_experts=4, **SIZES))
        if experts
        else LlamaForCausalLM(LlamaConfig(vocab_size=LARGE, **SIZES))
    )
    model.save_pretrained(tmp_path)
    expected = type(model).from_pretrained(tmp_path, dtype=dtype).state_dict()
    loaded = load_model(str(tmp_path), dtype=dtype, device_map={"": 0})
    found = loaded.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.device.type == "cuda" and tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor.cpu(), expected[name]), name
    assert {buffer.device.type for buffer in loaded.buffers()} == {"cuda"}


def test_memory_of_the_gpu_is_the_model_and_two_pieces_for_each_reader(tmp_path):
    model = LlamaForCausalLM(LlamaConfig(vocab_size=LARGE, **SIZES))
    model.save_pretrained(tmp_path)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loaded = load_model(str(tmp_path), dtype="bfloat16", device_map={"": 0})
    held = sum(tensor.nbytes for tensor in (*loaded.parameters(), *loaded.buffers()))
    assert torch.cuda.max_memory_allocated() - before < held + 4 * PIECE_BYTES + 2**20
