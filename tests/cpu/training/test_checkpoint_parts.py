"""The parts that a checkpoint is made of, each by itself: values in JSON, files of limited size, copies, pieces and seeds."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import MarianConfig, MarianMTModel

from upshift.errors import JobFailed, RequestError
from upshift.training.checkpoint import async_save, directory
from upshift.training.checkpoint import optimizer as checkpoint_optimizer
from upshift.training.checkpoint.async_save import BackgroundWriter, HostCopies, has_room
from upshift.training.checkpoint.directory import check_room, find_checkpoints, remove_older, step_of, write_latest, writing
from upshift.training.checkpoint.model import read_weights
from upshift.training.checkpoint.optimizer import (
    decode,
    describe_optimizer,
    encode,
    optimizer_bytes,
    optimizer_content,
    parameter_names,
    place_state,
    plain_name,
    read_optimizer,
    restore_options,
    write_optimizer,
)
from upshift.training.checkpoint.rng import capture_rng, read_rng, restore_rng, seed_rng, write_rngs
from upshift.training.checkpoint.sharded import Piece, copy_overlap, load_weights, piece_of
from upshift.training.checkpoint.state import Manifest, seal, unseal

CPU = torch.device("cpu")


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, 0.5, "text", torch.bfloat16, torch.Size([2, 3]), torch.tensor(1.5), torch.tensor(7, dtype=torch.int16),
        {"a": [1, {"b": torch.float16}], "c": {}}, [], [[1, 2], []],
    ],
    ids=str,
)  # fmt: skip
def test_values_come_back_from_json(value: Any) -> None:
    found = decode(json.loads(json.dumps(encode(value))))
    assert type(found) is type(value) and found == value
    if isinstance(value, Tensor):
        assert found.dtype == value.dtype


def test_values_without_a_form_in_json_are_refused() -> None:
    assert encode((1, (2, 3))) == [1, [2, 3]]
    for value in ({1: "a"}, {"a": 1, 2: "b"}, {"a": object()}, torch.ones(2), nn.Parameter(torch.tensor(1.0)), 1j):
        with pytest.raises(TypeError, match="cannot be written as JSON"):
            encode(value)


# --- an optimizer ----------------------------------------------------------------------------------------------------


def trained(steps: int = 1, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    groups = [{"params": [model[0].weight, model[1].weight], "weight_decay": 0.1}, {"params": [model[0].bias, model[1].bias]}]
    optimizer = torch.optim.AdamW(groups, lr=0.1, **options)
    for _ in range(steps):
        model(torch.ones(5, 4)).sum().backward()
        optimizer.step()
    return model, optimizer


def test_the_state_is_in_as_many_files_as_the_limit_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors stay whole; one above the limit has a file of its own. There are two moments and a count of each parameter."""
    model, optimizer = trained()
    elements = 12 + 6 + 3 + 2
    everything = 4 * (2 * elements + 4)
    assert optimizer_bytes(optimizer) == everything
    for limit, num_files in ((4 * 10**9, 1), (everything, 1), (everything - 1, 2), (1, 12), (100, 2), (99, 3)):
        folder = tmp_path / str(limit)
        folder.mkdir()
        monkeypatch.setattr(checkpoint_optimizer, "MAX_FILE_BYTES", limit)
        saved = write_optimizer(folder, optimizer_content(optimizer, model))
        files = sorted(path.name for path in folder.iterdir())
        assert len(files) == num_files
        names = [f"optimizer-{number:05d}-of-{num_files:05d}.safetensors" for number in range(1, num_files + 1)]
        assert files == (["optimizer.safetensors"] if num_files == 1 else names)
        other_model, other = trained(0)
        read_optimizer(folder, saved, other, other_model)
        assert len(other.state) == len(optimizer.state) == 4
        for first, second in zip(model.parameters(), other_model.parameters(), strict=True):
            state = optimizer.state[first]
            assert state.keys() == other.state[second].keys()
            assert all(torch.equal(value, other.state[second][key]) for key, value in state.items())
    monkeypatch.undo()
    assert checkpoint_optimizer.MAX_FILE_BYTES == 4_000_000_000


def test_options_come_back_but_for_how_a_step_is_computed(tmp_path: Path) -> None:
    model, optimizer = trained(fused=True)
    optimizer.param_groups[1]["lr"] = torch.tensor(0.3)
    saved = describe_optimizer(optimizer, parameter_names(model))
    assert all("fused" not in group.options and "params" not in group.options for group in saved.groups)
    other_model, other = trained(0, foreach=True)
    rate = torch.tensor(9.0)
    other.param_groups[1]["lr"] = rate
    restore_options(tmp_path, saved, other, parameter_names(other_model))
    assert other.param_groups[0]["weight_decay"] == 0.1 and other.param_groups[0]["foreach"] is True
    assert other.param_groups[1]["lr"] is rate and float(rate) == pytest.approx(0.3)
    assert other.param_groups[0]["betas"] == (0.9, 0.999)


def test_groups_of_another_run_are_refused_unless_a_rank_has_some_of_them(tmp_path: Path) -> None:
    model, optimizer = trained()
    saved = describe_optimizer(optimizer, parameter_names(model))
    names = parameter_names(model)
    fewer = torch.optim.AdamW([{"params": [model[0].weight]}])
    one_group = torch.optim.AdamW([{"params": [model[0].weight, model[1].weight]}])
    mixed = torch.optim.AdamW([{"params": [model[0].weight, model[0].bias]}])
    for other in (fewer, one_group, mixed):
        with pytest.raises(RequestError, match="has other parameter groups"):
            restore_options(tmp_path, saved, other, names)
    for other in (fewer, one_group, optimizer):
        restore_options(tmp_path, saved, other, names, allow_subset=True)
    assert fewer.param_groups[0]["weight_decay"] == one_group.param_groups[0]["weight_decay"] == 0.1
    with pytest.raises(RequestError, match="has other parameter groups"):
        restore_options(tmp_path, saved, mixed, names, allow_subset=True)


def test_state_is_laid_out_as_its_parameter() -> None:
    parameter = nn.Parameter(torch.arange(6.0).view(2, 3).t())
    state = torch.arange(6.0, dtype=torch.float64).view(3, 2)
    placed = place_state(state, "exp_avg", parameter, {})
    assert placed.stride() == parameter.stride() and torch.equal(placed, state) and placed.dtype == torch.float64
    assert not placed.requires_grad
    step = torch.tensor(3.0)
    assert place_state(step, "step", parameter, {"fused": False}) is step
    assert plain_name("_orig_mod.layers.0._orig_mod.weight") == "layers.0.weight"


# --- saves in the background -----------------------------------------------------------------------------------------


def test_a_writer_does_one_thing_at_a_time_and_raises_its_error_once() -> None:
    writer = BackgroundWriter()
    assert writer.check() and not writer.is_working and not writer.has_failed
    gate = threading.Event()
    writer.start(gate.wait)
    assert writer.is_working and not writer.check() and not writer.has_failed
    gate.set()
    writer.wait()
    assert writer.check()

    for error in (OSError("no\nroom"), AttributeError("no room"), KeyError("no room"), RuntimeError("no room")):
        writer.start(partial(fail, error))
        assert writer._thread is not None
        writer._thread.join()
        assert writer.has_failed
        with pytest.raises(JobFailed, match=f"{type(error).__name__}.*no room.* resume from the newest") as raised:
            writer.check()
        assert "\n" not in str(raised.value) and raised.value.__cause__ is error
        assert not writer.has_failed and writer.check()
    refusal = RequestError("another disk")
    writer.start(partial(fail, refusal))
    with pytest.raises(RequestError, match="^another disk$"):
        writer.wait()


def fail(error: Exception) -> None:
    raise error


def test_a_copy_needs_room_beside_what_the_process_may_need_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 bytes are free, of which 950 may be used; the process held 100 more at its peak."""
    monkeypatch.setattr(async_save, "resident_peak_bytes", lambda: 500)
    monkeypatch.setattr(async_save, "resident_bytes", lambda: 400)
    monkeypatch.setattr(async_save, "free_memory_bytes", lambda: 1000)
    assert has_room(850) and not has_room(851)
    monkeypatch.setattr(async_save, "resident_peak_bytes", lambda: 300)
    assert has_room(950) and not has_room(951)


def test_tensors_that_share_memory_share_it_in_their_copies() -> None:
    copies = HostCopies()
    tensor = torch.arange(6.0).view(2, 3)
    first = copies.copy(tensor)
    assert torch.equal(first, tensor) and first.data_ptr() != tensor.data_ptr()
    assert copies.copy(tensor) is first and copies.copy(tensor.view(2, 3)) is first
    assert copies.copy(tensor.t()) is not first and copies.copy(tensor.view(torch.int32)) is not first
    empty = [copies.copy(torch.empty(0)) for _ in range(2)]
    assert empty[0] is not empty[1]
    large = torch.ones(async_save.SMALLEST_MAPPED_BYTES // 4)
    copied = copies.copy(large)
    large.zero_()
    assert bool((copied == 1).all())
    assert async_save._should_map(large) and not async_save._should_map(large[1:]) and not async_save._should_map(tensor)
    assert async_save.SMALLEST_MAPPED_BYTES == 65536


# --- random numbers --------------------------------------------------------------------------------------------------


def draws() -> tuple[float, float, float]:
    return float(torch.rand(1)), random.random(), float(np.random.random())


def test_generators_of_each_rank_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = []
    expected = []
    for rank in range(2):
        seed_rng(5, rank)
        draws()
        states.append(capture_rng(CPU))
        expected.append(draws())
    assert expected[0] != expected[1]
    on_gpu = replace(states[0], cpu=states[0].cpu.clone(), cuda=states[1].cpu.clone())
    write_rngs(tmp_path, [*states, on_gpu])
    for rank in range(2):
        state = read_rng(tmp_path, rank=rank)
        assert state is not None and state.cuda is None
        restore_rng(state, CPU)
        assert draws() == expected[rank]
    with_gpu = read_rng(tmp_path, rank=2)
    assert with_gpu is not None and with_gpu.cuda is not None
    on_device: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: on_device.append(state))
    restore_rng(with_gpu, CPU)  # a process without a GPU leaves that generator alone
    assert draws() == expected[0] and on_device == []
    restore_rng(with_gpu, torch.device("cuda"))
    assert [state.tolist() for state in on_device] == [states[1].cpu.tolist()]
    assert read_rng(tmp_path, rank=3) is None


def test_seeds_are_a_hash_of_all_numbers() -> None:
    found = set()
    for numbers in ((1, 2), (2, 1), (1, 2, 3), (12,)):
        seed_rng(*numbers)
        first = draws()
        seed_rng(*numbers)
        assert draws() == first
        found.add(first)
    assert len(found) == 4


# --- pieces ----------------------------------------------------------------------------------------------------------


def test_elements_of_pieces() -> None:
    """Rows 1 and 2, and 5, of eight; columns 0 to 3 of six."""
    piece = Piece(shape=(8, 6), kept={0: ((1, 3), (5, 6)), 1: ((0, 4),)})
    assert piece.numel == 3 * 4
    assert (Piece(shape=(8, 6)).numel, Piece(shape=()).numel, Piece(shape=(4,), kept={0: ()}).numel) == (48, 1, 0)
    whole = torch.arange(48.0).view(8, 6)
    assert piece_of(whole) == Piece(shape=(8, 6))
    assert piece_of(whole, rows=(2, 5)) == Piece(shape=(8, 6), kept={0: ((2, 5),)})
    assert piece_of(torch.tensor(1.0), rows=(0, 1)) == Piece(shape=())


def test_what_two_pieces_share_is_copied() -> None:
    whole = torch.arange(48.0).view(8, 6)
    rows = {0: ((1, 3), (5, 8))}
    source_piece = Piece(shape=(8, 6), kept=rows)
    source = torch.cat([whole[1:3], whole[5:8]])
    target_piece = Piece(shape=(8, 6), kept={0: ((2, 6),), 1: ((0, 2), (4, 6))})
    target = torch.full((4, 4), -1.0)
    assert copy_overlap(target, target_piece, source, source_piece) == 2 * 4  # rows 2 and 5
    columns = [0, 1, 4, 5]
    assert target.tolist() == [whole[2, columns].tolist(), [-1.0] * 4, [-1.0] * 4, whole[5, columns].tolist()]
    nothing = Piece(shape=(8, 6), kept={0: ((3, 5),)})
    assert copy_overlap(torch.zeros(2, 6), nothing, source, source_piece) == 0


@pytest.mark.parametrize("load", [load_weights, read_weights])
def test_weights_that_a_class_never_saves_are_left_as_they_are(load: Callable[[Path, nn.Module], None], tmp_path: Path) -> None:
    """Marian computes its positions anew. Another weight that is not there is an error, also if its name holds such a name."""
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 16, "vocab_size": 32}
    config = MarianConfig(**sizes, **heads, pad_token_id=0, decoder_start_token_id=0)
    saved: Any = MarianMTModel(config)
    loaded: Any = MarianMTModel(config)
    saved.save_pretrained(tmp_path)
    assert not any("embed_positions" in name for name in load_file(tmp_path / "model.safetensors"))
    load(tmp_path, loaded)
    state = loaded.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in saved.state_dict().items())
    loaded._keys_to_ignore_on_save = {"embed_positions", "weight"}
    with pytest.raises(RequestError, match=r"has no (weight )?model\.\w+\.embed_positions"):
        load(tmp_path, loaded)


# --- folders ---------------------------------------------------------------------------------------------------------


def make_checkpoint(folder: Path, step: int, *, whole: bool = True, suffix: str = "") -> Path:
    path = folder / f"checkpoint-{step}{suffix}"
    path.mkdir(parents=True)
    (path / "numbers.txt").write_text("x" * step)
    (path / "whole").write_text(str(whole))
    return path


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is whole if its mark says so."""

    def describe(path: Path, *, contents: bool = False) -> str | None:
        return None if (path / "whole").read_text() == "True" else f"{path.name} is damaged; and more"

    monkeypatch.setattr(directory, "describe_damage", describe)


def test_the_newest_whole_checkpoint_is_found_with_the_damaged_ones_before_it(marked: None, tmp_path: Path) -> None:
    assert find_checkpoints(tmp_path / "none").newest is None
    make_checkpoint(tmp_path, 5)
    make_checkpoint(tmp_path, 10)
    make_checkpoint(tmp_path, 100, whole=False)
    (tmp_path / "checkpoint-900").write_text("a file")
    found = find_checkpoints(tmp_path)
    assert found.newest == tmp_path / "checkpoint-10"
    assert found.damaged == ((tmp_path / "checkpoint-100", "checkpoint-100 is damaged; and more"),)
    assert directory.newest_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    (tmp_path / "checkpoint-5" / "whole").write_text("False")
    (tmp_path / "checkpoint-10" / "whole").write_text("False")
    with pytest.raises(RequestError, match=r"is whole \(checkpoint-100 is damaged; checkpoint-10 is damaged; checkpoint-5"):
        directory.newest_checkpoint(tmp_path)
    assert (step_of(tmp_path / "checkpoint-10"), step_of(tmp_path / "other")) == (10, None)


@pytest.mark.parametrize(
    ("keep", "best", "left"),
    [
        (2, None, [30, 40, 50]), (3, None, [20, 30, 40, 50]), (1, None, [30, 40, 50]), (2, 10, [10, 30, 40, 50]),
        (9, None, [10, 20, 30, 40, 50]),
    ],
)  # fmt: skip
def test_older_checkpoints_are_removed(marked: None, tmp_path: Path, keep: int, best: int | None, left: list[int]) -> None:
    """40 is the newest of this run, 50 is of a later step and left alone. At least two stay."""
    for step in (10, 20, 30, 40, 50):
        make_checkpoint(tmp_path, step)
    remove_older(tmp_path, newest=tmp_path / "checkpoint-40", keep=keep, best_step=best)
    assert sorted(step_of(path) or 0 for path in tmp_path.iterdir()) == left


def test_damaged_checkpoints_do_not_count_and_go(marked: None, tmp_path: Path) -> None:
    for step in (10, 20, 30):
        make_checkpoint(tmp_path, step, whole=step != 20)
    remove_older(tmp_path, newest=tmp_path / "checkpoint-30", keep=2)
    assert sorted(step_of(path) or 0 for path in tmp_path.iterdir()) == [10, 30]
    write_latest(tmp_path, "checkpoint-30")
    assert (tmp_path / directory.LATEST_NAME).read_text() == "checkpoint-30\n"


def test_room_on_the_disk_is_looked_at_before_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory.shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    check_room(tmp_path, name="checkpoint-1", need=100)
    with pytest.raises(JobFailed, match="checkpoint-1 needs 101 B and .* has 100 B free; there is no earlier checkpoint"):
        check_room(tmp_path, name="checkpoint-1", need=101)


def test_what_a_failed_write_leaves_is_removed(tmp_path: Path) -> None:
    for error, words in (
        (OSError(28, "No space left on device"), "the disk is full"), (OSError(5, "Input/output error"), "Input/output error"),
    ):  # fmt: skip
        temporary = tmp_path / "new.tmp"
        temporary.mkdir()
        with pytest.raises(JobFailed, match=words), writing(tmp_path, name="checkpoint-1", temporary=temporary):
            raise error
        assert not temporary.exists()
    kept = tmp_path / "shared.tmp"
    kept.mkdir()
    with pytest.raises(JobFailed), writing(tmp_path, name="checkpoint-1", temporary=None):
        raise OSError(5, "Input/output error")
    assert kept.exists()
    with pytest.raises(KeyboardInterrupt), writing(tmp_path, name="checkpoint-1", temporary=kept):
        raise KeyboardInterrupt
    assert not kept.exists()


# --- the manifest ----------------------------------------------------------------------------------------------------


def test_a_sealed_document_comes_back_unless_a_byte_changed() -> None:
    document = json.dumps({"a": 1, "b": ["x"]}, indent=1)
    sealed = seal(document)
    assert unseal(sealed.encode()) == document.encode() and set(json.loads(sealed)) == {"a", "b", "checksum"}
    assert unseal(sealed.replace('"x"', '"y"').encode()) is None
    assert unseal(document.encode()) is None
    with pytest.raises(ValueError, match="printed with an indent"):
        seal(json.dumps({"a": 1}))


def test_checksums_that_are_known_are_not_computed_again(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("22")
    Manifest(files={"a": 1, "b": 2}).write(tmp_path)
    plain = Manifest.read(tmp_path).checksums
    assert set(plain) == {"a", "b"} and plain["a"] != plain["b"]
    Manifest(files={"a": 1, "b": 2}).write(tmp_path, earlier_checksums={"a": "known"})
    assert Manifest.read(tmp_path).checksums == {"a": "known", "b": plain["b"]}
