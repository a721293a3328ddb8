"""What the ranks of a plan read, put together again, is the whole; and each reads about its share of the bytes."""

from __future__ import annotations

import pytest
import torch
import transformers

from upshift.errors import RequestError
from upshift.loading.files.checkpoint import find_checkpoint
from upshift.loading.fill_model import Filling
from upshift.loading.key_mapping import map_names
from upshift.loading.load import build_empty, load_model
from upshift.loading.rank_shards import Rank, Share, bytes_read, rank_slices, read_slices
from upshift.models.tensor_parallel_plan import declared_plan, divided_dimension

WIDTH = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 128,
    "num_hidden_layers": 5,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
MODELS = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"tie_word_embeddings": False}),
    "llama, tied": ("LlamaConfig", "LlamaForCausalLM", {"tie_word_embeddings": True}),
    "qwen2, biases": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3-moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", EXPERTS | {"num_experts": 4}),
    "phi3, fused": ("Phi3Config", "Phi3ForCausalLM", {"pad_token_id": 0}),
}  # fmt: skip


@pytest.fixture(scope="module")
def fillings(tmp_path_factory):
    made: dict[str, tuple[Filling, dict[str, torch.Tensor]]] = {}

    def filling(name: str) -> tuple[Filling, dict[str, torch.Tensor]]:
        if name not in made:
            config_class, architecture, more = MODELS[name]
            path, kind = tmp_path_factory.mktemp("model"), getattr(transformers, architecture)
            torch.manual_seed(0)
            model = kind(getattr(transformers, config_class)(**WIDTH | more))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_()
            model.save_pretrained(path)
            checkpoint = find_checkpoint(path)
            empty = build_empty(kind, model.config, torch.float32)
            names = map_names(empty, checkpoint.tensors)
            made[name] = Filling(empty, checkpoint.tensors, names, dtype=torch.float32), load_model(str(path)).state_dict()
        return made[name]

    return filling


def together(parts: list[torch.Tensor], dimension: int | None, *, packed: bool = False) -> torch.Tensor:
    if dimension is None:
        assert all(torch.equal(part, parts[0]) for part in parts)
        return parts[0]
    if not packed:
        return torch.cat(parts, dimension)
    halves = [part.chunk(2, dimension) for part in parts]
    return torch.cat([half[side] for side in (0, 1) for half in halves], dimension)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("degree", [2, 4])
def test_tensor_parallel_slices_are_the_whole(name, degree, fillings):
    filling, whole = fillings(name)
    readings = [rank_slices(filling, Rank(tensor=Share(number, degree))) for number in range(degree)]
    found = [dict(read_slices(filling, reading)) for reading in readings]
    plan, divided = declared_plan(filling.model), 0
    for weight, parameter in filling.model.named_parameters():
        if weight not in found[0]:
            continue
        how = divided_dimension(weight, parameter, plan)
        parts = [one[weight] for one in found]
        assert torch.equal(together(parts, how and how[0], packed=bool(how and how[1])), whole[weight]), weight
        divided += 0 if how is None else parameter.numel()
    everything = sum(stored.nbytes for stored in filling.tensors.values())
    left = everything - 4 * divided  # on every rank
    for reading in readings:
        assert bytes_read(reading) == pytest.approx(left + (everything - left) / degree, rel=0.01)
    if "fused" not in name:
        assert left < 0.35 * everything


@pytest.mark.parametrize("name", MODELS)
def test_fully_sharded_slices_are_the_whole_and_equal_shares(name, fillings):
    filling, whole = fillings(name)
    readings = [rank_slices(filling, Rank(shard=Share(number, 4))) for number in range(4)]
    found = [dict(read_slices(filling, reading)) for reading in readings]
    for weight in found[0]:
        assert torch.equal(torch.cat([one[weight] for one in found]), whole[weight]), weight
    everything = sum(stored.nbytes for stored in filling.tensors.values())
    assert [bytes_read(reading) for reading in readings] == pytest.approx([everything / 4] * 4, rel=0.01)


@pytest.mark.parametrize("name", MODELS)
def test_pipeline_stages_are_the_whole(name, fillings):
    filling, whole = fillings(name)
    found = [dict(read_slices(filling, rank_slices(filling, Rank(stage=Share(number, 2))))) for number in range(2)]
    stored = {group.target for group in filling.names.groups}
    assert found[0].keys() | found[1].keys() == stored
    both = {"model.embed_tokens.weight"} if "tied" in name else set()
    assert found[0].keys() & found[1].keys() == both
    for one in found:
        assert all(torch.equal(tensor, whole[weight]) for weight, tensor in one.items())
    layers = [{int(weight.split(".")[2]) for weight in one if weight.startswith("model.layers.")} for one in found]
    assert layers == [{0, 1, 2}, {3, 4}] and "model.norm.weight" in found[1]


def test_all_three_at_once(fillings):
    filling, whole = fillings("qwen3-moe")
    shares = [Share(number, 2) for number in (0, 1)]
    ranks = [Rank(stage, tensor, shard) for stage in shares for tensor in shares for shard in shares]
    found = [dict(read_slices(filling, rank_slices(filling, rank))) for rank in ranks]
    plan = declared_plan(filling.model)
    for first in (0, 4):
        for weight in found[first]:
            tensor_ranks = [torch.cat([found[first + 2 * tensor + shard][weight] for shard in (0, 1)]) for tensor in (0, 1)]
            how = divided_dimension(weight, filling.model.get_parameter(weight), plan)
            assert torch.equal(together(tensor_ranks, how and how[0], packed=bool(how and how[1])), whole[weight]), weight


def test_every_weight_of_the_files_is_on_some_rank(tmp_path):
    """Also weights without dimensions: BatchNorm counts its batches in one, and CLIP scales its logits by one."""
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic")
    model = transformers.ResNetForImageClassification(config)
    model.save_pretrained(tmp_path)
    checkpoint = find_checkpoint(tmp_path)
    empty = build_empty(type(model), config, torch.float32)
    filling = Filling(empty, checkpoint.tensors, map_names(empty, checkpoint.tensors), dtype=torch.float32)
    scalars = {name for name, tensor in model.state_dict().items() if not tensor.ndim}
    targets = {name for group in filling.names.groups for name in filling.filled_shapes(group)}
    assert scalars and scalars <= targets
    for kind in ("shard", "stage", "tensor"):
        whole_rank = dict(read_slices(filling, rank_slices(filling, Rank(**{kind: Share(0, 1)}))))
        assert whole_rank.keys() == targets
    found = [dict(read_slices(filling, rank_slices(filling, Rank(shard=Share(number, 2))))) for number in range(2)]
    assert found[0].keys() == found[1].keys() == targets
    assert all(torch.equal(one[name], model.state_dict()[name]) for one in found for name in scalars)


def test_byte_ranges_are_where_the_slice_lies(fillings):
    filling, _ = fillings("llama")
    readings = list(rank_slices(filling, Rank(tensor=Share(1, 4))))
    assert readings and all(reading.sources for reading in readings)
    for reading in readings:
        for _, piece in reading.sources:
            ranges = list(piece.byte_ranges())
            content = piece.stored.file.read_bytes()
            joined = b"".join(content[begin : begin + size] for begin, size in ranges)
            assert joined == piece.read().numpy().tobytes() and len(joined) == piece.nbytes
            columns = piece.intervals[-1] != ((0, piece.stored.shape[-1]),)
            assert len(ranges) == (piece.stored.shape[0] if columns and len(piece.stored.shape) > 1 else 1)


def test_what_cannot_be_divided_is_an_error(fillings, tmp_path):
    filling, _ = fillings("llama")
    with pytest.raises(RequestError, match="rank 2 of 2 is not possible"):
        Share(2, 2)
    with pytest.raises(RequestError, match="6 pipeline stages cannot share"):
        rank_slices(filling, Rank(stage=Share(0, 6)))
    config = transformers.GPT2Config(n_embd=16, n_head=2, n_layer=2, vocab_size=32)
    model = build_empty(transformers.GPT2LMHeadModel, config, torch.float32)
    with pytest.raises(RequestError, match="GPT2LMHeadModel declares no tensor-parallel plan"):
        rank_slices(Filling(model, {}, map_names(model, []), dtype=torch.float32), Rank(tensor=Share(0, 2)))
