"""Models that are partly on the disk compute what they compute in memory, within their memory, or say why not."""

from __future__ import annotations

import gc
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch
from accelerate import infer_auto_device_map, init_empty_weights
from command import Command
from hypothesis import given
from hypothesis import strategies as st
from input_gradients import input_gradient
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    T5Config,
)  # fmt: skip

import upshift
from upshift.errors import JobFailed, NothingFits, RequestError
from upshift.loading.files.checkpoint import find_checkpoint
from upshift.loading.files.safetensors_header import StoredTensor
from upshift.loading.files.safetensors_writer import NewTensor, encode_header
from upshift.loading.load import build_empty, load_placed
from upshift.loading.offload import disk_store
from upshift.loading.offload.buffers import HostBufferPool, PagePool
from upshift.loading.offload.hooks import is_offloaded
from upshift.loading.offload.prefetch import PrefetchReader, make_groups
from upshift.loading.placement.apply import PlacementOptions
from upshift.loading.placement.modules import place_model, placement_units
from upshift.loading.placement.place import CPU, DISK, MemoryNeeds, place_units
from upshift.models.source import find_model

HELPERS = Path(__file__).parents[1] / "helpers"

SMALL = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 500}
LLAMA, TIED = LlamaConfig(**SMALL), LlamaConfig(**SMALL, tie_word_embeddings=True)
MODELS = {
    "untied": (LLAMA, AutoModelForCausalLM),
    "tied": (TIED, AutoModelForCausalLM),
    "fused linear, other names": (
        GPT2Config(n_layer=4, n_embd=64, n_head=4, vocab_size=500, bos_token_id=1, eos_token_id=2), AutoModelForCausalLM,
    ),
    "experts that are stored apart": (MixtralConfig(**SMALL, num_local_experts=4, num_key_value_heads=4), AutoModelForCausalLM),
    "encoder-decoder": (
        T5Config(d_model=64, d_ff=160, num_layers=3, num_heads=4, d_kv=16, vocab_size=500, decoder_start_token_id=0),
        AutoModelForSeq2SeqLM,
    ),
    "encoder": (BertConfig(**SMALL), AutoModelForMaskedLM),
}  # fmt: skip
Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Each model, saved once, its weights large enough to matter in what it says."""
    root = tmp_path_factory.mktemp("models")

    def saved(name: str) -> Path:
        path = root / name.replace(" ", "-")
        if not path.is_dir():
            torch.manual_seed(0)
            config, kind = MODELS[name]
            config.initializer_range = 0.2
            kind.from_config(config).save_pretrained(path, max_shard_size="300KB")
        return path

    return saved


def everything_on_disk(path: Path, dtype: str | None = None, offload_folder: Path | None = None) -> PreTrainedModel:
    return upshift.load_model(str(path), dtype=dtype, device_map={"": "disk"}, offload_folder=offload_folder)


def answers(model: PreTrainedModel) -> list[torch.Tensor]:
    ids = torch.arange(20).view(2, 10) + 3
    given = {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})
    with torch.no_grad():
        found = [model(**given).logits]
    if model.can_generate():
        found.append(model.generate(ids, max_new_tokens=8, do_sample=False))
    return found


def assert_same_answers(ours: PreTrainedModel, theirs: PreTrainedModel) -> None:
    for one, other in zip(answers(ours), answers(theirs), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_everything_on_the_disk_says_what_memory_says(name: str, dtype: str | None, folder: Folder, tmp_path: Path) -> None:
    kind = MODELS[name][1]
    theirs = kind.from_pretrained(folder(name), dtype=dtype or "auto").eval()
    converted = dtype is not None or name == "experts that are stored apart"
    ours = everything_on_disk(folder(name), dtype, tmp_path if converted else None)
    assert len(list(tmp_path.iterdir())) == converted
    assert_same_answers(ours, theirs)
    offload = ours._upshift_offload
    assert offload.reader.bytes_read > 0
    assert offload.reader.peak_bytes <= offload.reader.budget
    expected = theirs.state_dict()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in ours.state_dict().items())


def test_only_experts_that_are_chosen_are_read(folder: Folder, tmp_path: Path) -> None:
    name = "experts that are stored apart"
    ours = everything_on_disk(folder(name), None, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(folder(name)).eval()
    config, experts = theirs.config, ours._upshift_offload.experts
    each = sum(one.nbytes for one in theirs.model.layers[0].mlp.experts.parameters()) // config.num_local_experts
    assert len(experts) == config.num_hidden_layers
    with torch.no_grad():
        assert torch.equal(ours(torch.ones(1, 1, dtype=torch.long)).logits, theirs(torch.ones(1, 1, dtype=torch.long)).logits)
    assert [one.bytes_read for one in experts] == [config.num_experts_per_tok * each] * len(experts)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    placement = place_model(empty, device_map={"": "disk"}, max_memory={"cpu": "1GiB"})
    streamed = sum(group.nbytes for group in ours._upshift_offload.reader.groups)
    read = streamed + sum(one.bytes_read for one in experts)
    assert placement.disk_read == read


def test_tensors_need_not_be_aligned(folder: Folder, tmp_path: Path) -> None:
    """As in files that were written by hand: a header may have any length."""
    shutil.copytree(folder("untied"), tmp_path / "m")
    for file in (tmp_path / "m").glob("*.safetensors"):
        content = file.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        file.write_bytes((end - 7).to_bytes(8, "little") + content[8:end] + b" " + content[end:])
    theirs = AutoModelForCausalLM.from_pretrained(folder("untied")).eval()
    assert_same_answers(everything_on_disk(tmp_path / "m"), theirs)
    assert_same_answers(upshift.load_model(str(tmp_path / "m")), theirs)


def test_placed_by_memory_it_says_the_same_and_reads_what_was_said(folder: Folder) -> None:
    path = folder("untied")
    total = find_checkpoint(path).total_bytes
    where = PlacementOptions("auto", {"cpu": total // 2}, batch=2, sequence_length=18)
    ours = load_placed(find_model(str(path)), where)
    theirs = AutoModelForCausalLM.from_pretrained(path).eval()
    assert_same_answers(ours, theirs)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(LLAMA)
    placement = place_model(empty, max_memory={"cpu": total // 2}, batch=2, sequence_length=18)
    assert 0 < placement.disk_read < total
    ids = torch.arange(10)[None]
    passes = 20
    before = ours._upshift_offload.reader.bytes_read
    with torch.inference_mode():
        for _ in range(passes):
            ours(ids)
    read = (ours._upshift_offload.reader.bytes_read - before) / passes
    assert read <= 1.2 * placement.disk_read  # what is read ahead beyond the last pass


def test_gradients_pass_through_frozen_weights_that_are_read_again(folder: Folder) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(folder("tied")).requires_grad_(False)
    ours = everything_on_disk(folder("tied"))

    reader = ours._upshift_offload.reader
    for _ in range(3):
        assert torch.equal(input_gradient(ours), input_gradient(theirs))
    assert reader.peak_bytes <= reader.budget
    forward = sum(group.nbytes for group in reader.groups)
    assert reader.bytes_read >= 1.25 * 3 * forward  # not kept: each pass reads them forward, and most of them again backward


def test_weights_on_the_disk_cannot_be_trained(folder: Folder) -> None:
    ours = everything_on_disk(folder("untied"))
    assert is_offloaded(ours) and not any(weight.requires_grad for weight in ours.parameters())
    ours.model.layers[0].requires_grad_(True)
    with pytest.raises(RequestError, match="frozen"):
        ours(torch.ones(1, 3, dtype=torch.long))
    ours.requires_grad_(False)
    answers(ours)  # nothing was left half-done


def test_an_interrupted_forward_leaves_the_weights_where_they_were(folder: Folder) -> None:
    ours = everything_on_disk(folder("untied"))
    before = answers(ours)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    hook = ours.model.layers[1].self_attn.register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        ours(torch.ones(1, 3, dtype=torch.long))
    hook.remove()
    torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),), strict=False)  # no hook reads its fake tensors
    assert all(torch.equal(one, other) for one, other in zip(answers(ours), before, strict=True))


def test_the_reader_ends_with_its_model(folder: Folder) -> None:
    ours = everything_on_disk(folder("untied"))
    thread = ours._upshift_offload.reader.thread
    assert thread.is_alive()
    del ours
    gc.collect()
    thread.join(timeout=10)
    assert not thread.is_alive() and thread not in threading.enumerate()


def test_a_file_that_is_cut_short_later_is_one_error(folder: Folder, tmp_path: Path) -> None:
    devices = {"": "cpu", "model.layers": "disk"}
    ours = upshift.load_model(str(folder("untied")), dtype="bfloat16", device_map=devices, offload_folder=tmp_path)
    (file,) = tmp_path.iterdir()
    os.truncate(file, file.stat().st_size * 7 // 8)  # in the last layer, which is not read ahead yet
    with pytest.raises(JobFailed, match="shorter than it was"):
        ours(torch.ones(1, 3, dtype=torch.long))


# --- what stays on the disk converted ---------------------------------------------------------------------------------


def test_conversion_needs_a_folder_and_happens_once(folder: Folder, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="give an offload_folder"):
        everything_on_disk(folder("untied"), "bfloat16")
    everything_on_disk(folder("untied"), "bfloat16", tmp_path)
    (file,) = tmp_path.iterdir()
    written = file.stat().st_mtime_ns
    everything_on_disk(folder("untied"), "bfloat16", tmp_path)
    assert [file.stat().st_mtime_ns for file in tmp_path.iterdir()] == [written]


def test_a_full_disk_is_one_error_and_leaves_nothing(folder: Folder, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # the kernel's own refusal to write more
    try:
        with pytest.raises(JobFailed, match="nothing of it was kept"):
            everything_on_disk(folder("untied"), "bfloat16", tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_killed_while_it_converts(folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(path: Path, *_: object) -> None:
        path.write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    folder("untied")
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(disk_store, "write_file", die)
        try:
            everything_on_disk(folder("untied"), "bfloat16", tmp_path)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and [file.suffix for file in tmp_path.iterdir()] == [".part"]
    everything_on_disk(folder("untied"), "bfloat16", tmp_path)
    assert [file.suffix for file in tmp_path.iterdir()] == [".safetensors"]


# --- the reader ------------------------------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.integers(1_000, 400_000), st.booleans())
def test_groups_in_any_order_and_held_together_are_what_the_file_has(seed: int, budget: int, in_place: bool) -> None:
    """A view that somebody keeps after the release stays what it was: its memory is not used again."""
    random = Random(seed)
    with tempfile.NamedTemporaryFile() as file:
        content, groups, end = random.randbytes(1_000_000), [], 0
        file.write(content)
        file.flush()
        for group in range(random.randint(1, 8)):
            sizes = [random.randint(1, 20_000) for _ in range(random.randint(1, 6))]
            groups.append([])
            for number, size in enumerate(sizes):
                groups[-1].append(StoredTensor(f"{group}.{number}", "U8", (size,), Path(file.name), end, size))
                end += size + random.choice([0, 0, 17])
        made = make_groups(groups, budget, in_place=in_place)
        slots = (PagePool if in_place else HostBufferPool)([Path(file.name)], keep=random.random() < 0.5)
        reader = PrefetchReader(made, slots, budget=budget)
        held, kept = [], []
        for _ in range(30):
            held.append(random.randrange(len(groups)))
            for piece, memory in zip(made[held[-1]].chunks, reader.acquire(held[-1]), strict=True):
                for stored, start in zip(piece.tensors, piece.offsets, strict=True):
                    view = memory[start : start + stored.nbytes]
                    assert bytes(view.numpy()) == content[stored.offset : stored.offset + stored.nbytes]
                    kept += [(view, stored)] if random.random() < 0.05 else []
            while len(held) > random.randint(0, 2):
                reader.release(held.pop(random.randrange(len(held))))
        reader.close()
        reader.thread.join(timeout=10)
        assert not reader.thread.is_alive()
        assert all(bytes(view.numpy()) == content[one.offset : one.offset + one.nbytes] for view, one in kept)


# --- maps ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device_map", "problem"),
    [
        ({"": "cpu", "model.layer.0": "disk"}, "names 'model.layer.0', which the model has not"),
        ({"model.layers": "disk", "lm_head": "cpu"}, "no device for 'model.embed_tokens.weight'"),
        ({"": "gpu"}, "device 'gpu' is not here"),
        ({"": 0}, "device 0 is not here"),
        ("balanced", "device 'balanced' is not here"),
    ],
)
def test_maps_that_do_not_fit(device_map: str | dict[str, str], problem: str, folder: Folder) -> None:
    with pytest.raises(RequestError, match=problem):
        upshift.load_model(str(folder("untied")), device_map=device_map)


def test_limits_without_a_map_and_limits_that_are_too_small(folder: Folder) -> None:
    with pytest.raises(RequestError, match='give device_map="auto"'):
        upshift.load_model(str(folder("untied")), max_memory={"cpu": "1GiB"})
    with pytest.raises(NothingFits, match="one layer at a time takes"):
        upshift.load_model(str(folder("untied")), device_map="auto", max_memory={"cpu": "100KiB"})


@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"encoder"}))  # of its tied bias accelerate makes an IndexError
def test_no_more_is_read_from_the_disk_than_accelerate_leaves_there(name: str) -> None:
    config, kind = MODELS[name]
    with init_empty_weights():
        model = kind.from_config(config)
    model.tie_weights()
    units = placement_units(model)
    total, largest = sum(unit.nbytes for unit in units), max(unit.nbytes for unit in units)
    assert total == sum(weight.numel() * weight.element_size() for weight in model.parameters())
    for limit in range(largest, total + 2 * largest, (total + largest) // 12):
        theirs = infer_auto_device_map(model, {CPU: limit}, no_split_module_classes=model._no_split_modules)
        left = sum(
            weight.numel() * weight.element_size() for path, weight in model.named_parameters()
            if any(device == DISK and (f"{path}.".startswith(f"{module}.") or not module) for module, device in theirs.items())
        )  # fmt: skip
        assert place_units(units, {CPU: limit}, MemoryNeeds(1, 1)).disk_read <= left


# --- a model of one and a half times its memory -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_gigabytes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in fp32 and shards of 500 MB; its weights are parts of the same 64 MiB of random numbers."""
    folder = tmp_path_factory.mktemp("large")
    config = LlamaConfig(hidden_size=2048, intermediate_size=5632, num_hidden_layers=9, num_attention_heads=16, vocab_size=16_000)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    numbers = memoryview((0.02 * torch.randn(2**24, generator=torch.Generator().manual_seed(0))).numpy()).cast("B")
    shards: list[list[NewTensor]] = [[]]
    for name, weight in model.named_parameters():
        start = 4096 * len(name) * sum(map(len, shards))
        pieces = partial(cut, numbers, start % 2**25, 4 * weight.numel())
        if sum(tensor.nbytes for tensor in shards[-1]) > 450_000_000:
            shards.append([])
        shards[-1].append(NewTensor(name, "F32", tuple(weight.shape), pieces))
    names = [f"model-{number + 1:05}-of-{len(shards):05}.safetensors" for number in range(len(shards))]
    for name, tensors in zip(names, shards, strict=True):
        with (folder / name).open("wb", buffering=0) as file:
            file.write(encode_header(tensors, {"format": "pt"}))
            for tensor in tensors:
                for piece in tensor.chunks():
                    file.write(piece)
    of = {tensor.name: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": of}))
    return folder


def cut(numbers: memoryview, start: int, nbytes: int) -> Iterator[memoryview]:
    while nbytes:
        piece = numbers[start : start + nbytes]
        yield piece
        nbytes, start = nbytes - len(piece), 0


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA limits memory on Linux only")
def test_a_model_larger_than_its_memory_says_the_same(two_gigabytes: Path) -> None:
    checkpoint = find_checkpoint(two_gigabytes)
    assert checkpoint.total_bytes > 1_900_000_000
    limit = int(checkpoint.total_bytes / 1.5)
    command = [sys.executable, str(HELPERS / "larger_than_memory.py"), str(two_gigabytes), str(limit)]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
    assert found["limited"] == found["unlimited"]
    assert found["read"] > checkpoint.total_bytes  # five passes
    largest_shard = max(file.stat().st_size for file in checkpoint.files)
    assert found["loading"] <= largest_shard + 300_000_000
    assert found["running"] <= found["buffers"] + 300_000_000
    assert found["buffers"] <= limit // 2


# --- the command line -------------------------------------------------------------------------------------------------------


def test_inspect_placement(upshift: Command, folder: Folder, tmp_path: Path) -> None:
    asked = ("inspect", folder("untied"), "--placement", "--max-memory", "cpu=500KB", "--sequence-length", "16")
    answer = upshift(*asked)
    assert answer.code == 0 and max(map(len, answer.out.splitlines())) <= 80
    assert "model.layers." in answer.out and "disk" in answer.out and "to read" in answer.out
    document = json.loads(upshift(*asked, "--json").out)
    total = find_checkpoint(folder("untied")).total_bytes
    assert sum(document["totals"].values()) == sum(place["bytes"] for place in document["modules"]) == total
    assert document["peak_bytes"]["cpu"] <= 500_000
    config = tmp_path / "config.json"
    config.write_bytes((folder("untied") / "config.json").read_bytes())
    without = json.loads(upshift("inspect", config, *asked[2:], "--json").out)
    assert without["modules"] == document["modules"] and without["load_bytes"] is None
    halved = json.loads(upshift("inspect", config, *asked[2:], "--json", "--dtype", "bfloat16").out)
    assert sum(halved["totals"].values()) == total // 2
    wrong = upshift("inspect", config, "--max-memory", "cpu=1GB")
    assert wrong.code == 2 and "--placement" in wrong.err
    long = upshift("inspect", config, "--placement", "--sequence-length", 2049)
    assert long.code == 2 and "longer than the model's 2048 positions" in long.err


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_keys_and_values_of_experts(dtype: str) -> None:
    """PyTorch's grouped product has no fake for these dtypes; what is kept beside it is as in a dense model."""
    model = build_empty(MixtralForCausalLM, MixtralConfig(**SMALL, num_key_value_heads=4), getattr(torch, dtype))
    placement = place_model(model, device_map={"": "cpu"}, sequence_length=50)
    assert placement.cache == 2 * 4 * 50 * 64 * model.dtype.itemsize
