"""Loading onto a GPU: through pinned memory, as it is stored and converted on the way; every tensor is that of transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from upshift.loading.files.tensors import CHUNK_BYTES
from upshift.loading.load import load_model

SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip
LARGE = CHUNK_BYTES // (2 * SIZES["hidden_size"]) + 1  # words: an embedding of more than two pieces in fp32


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
    assert torch.cuda.max_memory_allocated() - before < held + 4 * CHUNK_BYTES + 2**20


def answers(model):
    ids = torch.arange(20, device="cuda").view(2, 10)
    with torch.no_grad():
        return [model(input_ids=ids).logits, model.generate(ids, max_new_tokens=4, do_sample=False)]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shares", [(0.4, 0.3), (0.3, 1.0), (0.3, 0.0)])
def test_divided_between_the_gpu_the_host_and_the_disk(shares, tied, tmp_path):
    """The same answers, and no more of the GPU than its limit."""
    torch.manual_seed(0)
    sizes = SIZES | {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 12}
    config = LlamaConfig(vocab_size=1024, tie_word_embeddings=tied, initializer_range=0.1, **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path, max_shard_size="20MB")
    whole = load_model(str(tmp_path), device_map={"": 0})
    expected, total = answers(whole), sum(weight.nbytes for weight in whole.parameters())
    del whole
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    largest = 4 * (4 * 512 * 512 + 3 * 512 * 1024) + 2**22
    limits = {0: int(shares[0] * total) + largest, "cpu": int(shares[1] * total) + largest}
    model = load_model(str(tmp_path), device_map="auto", max_memory=limits)
    for one, other in zip(answers(model), expected, strict=True):
        assert torch.equal(one, other)
    assert model._upshift_offload.reader.bytes_read > 0
    assert torch.cuda.max_memory_allocated() - before <= limits[0] + 4 * CHUNK_BYTES + 2**21
    states = torch.randn(1, 6, 512, device="cuda", requires_grad=True)
    model(inputs_embeds=states, labels=torch.ones(1, 6, dtype=torch.long, device="cuda")).loss.backward()
    assert states.grad.isfinite().all()
