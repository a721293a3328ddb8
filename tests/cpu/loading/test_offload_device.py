"""Weights on their way to a GPU: the scheduling that a GPU runs, driven by a stand-in whose copies and products end late.

The stand-in's memory is the CPU's; its copies are made by a thread of their own after a while, and what was computed with a
buffer ends a while after it was said to. A copy that did not wait for either gives other numbers, or fails here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
import torch
from input_gradients import input_gradient
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedModel

import upshift
from upshift.errors import JobFailed, NothingFits, RequestError
from upshift.loading.files.checkpoint import find_checkpoint
from upshift.loading.key_mapping import map_names
from upshift.loading.offload.hooks import register_offload_hooks
from upshift.loading.placement.apply import check_loose_parameters
from upshift.loading.placement.modules import placement_units
from upshift.loading.placement.place import CPU, DISK, MemoryNeeds, Placement, PlacementUnit, place_units

GPU = "cuda:0"
SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 6, "num_attention_heads": 4, "vocab_size": 300}
MODELS = {
    "untied": LlamaConfig(**SIZES),
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "gpt2": GPT2Config(n_layer=6, n_embd=64, n_head=4, vocab_size=300, bos_token_id=1, eos_token_id=2),
}


class StandIn:
    """Lanes to a made-up device. Its events are futures."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._stream = ThreadPoolExecutor(1)
        self._random = Random(0)
        self._used: set[int] = set()
        self.sent = 0

    def pin(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def empty(self, nbytes: int) -> torch.Tensor:
        memory = torch.zeros(nbytes, dtype=torch.uint8)
        self._used.discard(memory.data_ptr())
        return memory

    def copy(self, content: torch.Tensor, memory: torch.Tensor, after: Future[None] | None) -> Future[None]:
        assert after is not None or memory.data_ptr() not in self._used, "a buffer is overwritten while it may be in use"
        return self._stream.submit(self._copy, content, memory, after)

    def _copy(self, content: torch.Tensor, memory: torch.Tensor, after: Future[None] | None) -> None:
        if after is not None:
            after.result()
        time.sleep(self._random.random() / 500)
        memory.copy_(content)
        self.sent += len(content)

    def wait(self, event: Future[None], memory: torch.Tensor) -> None:
        event.result()
        self._used.add(memory.data_ptr())

    def mark(self) -> Future[None]:
        ends: Future[None] = Future()
        threading.Timer(0.001, ends.set_result, [None]).start()
        return ends

    def finish(self, event: Future[None]) -> None:
        event.result()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def folder(name: str) -> Path:
        path = tmp_path_factory.getbasetemp() / f"device-{name}"
        if not path.is_dir():
            torch.manual_seed(0)
            config = MODELS[name]
            config.initializer_range = 0.2
            AutoModelForCausalLM.from_config(config).save_pretrained(path, max_shard_size="300KB")
        return path

    return folder


def divided(path: Path, shares: tuple[float, float]) -> tuple[PreTrainedModel, Placement, StandIn]:
    """With these shares of its weights on the device and on the host; the rest is on the disk."""
    model = upshift.load_model(str(path))
    units, lanes = placement_units(model), StandIn()
    total, largest = sum(unit.nbytes for unit in units), max(unit.nbytes for unit in units)
    limits = {GPU: int(shares[0] * total) + largest, CPU: int(shares[1] * total) + largest}
    placement = place_units(units, limits, MemoryNeeds(1, 1))
    checkpoint = find_checkpoint(path)
    names = map_names(model, checkpoint.tensors)
    stored = {group.target: checkpoint.tensors[group.sources[0][1]] for group in names.groups}
    register_offload_hooks(model, placement, stored, copy_stream=lanes)
    return model, placement, lanes


def answers(model: PreTrainedModel) -> list[torch.Tensor]:
    ids = torch.arange(20).view(2, 10) + 3
    with torch.no_grad():
        return [model(input_ids=ids).logits, model.generate(ids, max_new_tokens=2, do_sample=False)]


@pytest.mark.parametrize(
    ("name", "shares"),
    [("untied", (0.3, 0.3)), ("untied", (0.0, 1.0)), ("untied", (0.2, 0.0)), ("tied", (0.3, 0.3)), ("gpt2", (0.3, 0.3))],
)
def test_divided_between_a_device_the_host_and_the_disk(name: str, shares: tuple[float, float], saved) -> None:
    expected = answers(upshift.load_model(str(saved(name))))
    model, placement, lanes = divided(saved(name), shares)
    devices = {place.device for place in placement.modules if place.read}
    assert devices >= ({GPU, CPU, DISK} if shares == (0.3, 0.3) else {CPU} if shares[1] else {DISK})
    for one, other in zip(answers(model), expected, strict=True):
        assert torch.equal(one, other)
    reader = model._upshift_offload.reader
    assert reader.bytes_read > 0 and lanes.sent > 0
    assert reader.peak_bytes <= max(reader.budget, placement.stream_bytes[GPU])


def test_gradients_pass_through_weights_that_are_sent_again(saved) -> None:
    theirs = upshift.load_model(str(saved("untied"))).requires_grad_(False)
    ours, _, _ = divided(saved("untied"), (0.2, 0.3))
    for _ in range(2):
        assert torch.equal(input_gradient(ours), input_gradient(theirs))


def test_weights_that_wait_are_frozen_and_errors_of_the_disk_are_one_error(saved, monkeypatch: pytest.MonkeyPatch) -> None:
    model, placement, _ = divided(saved("untied"), (0.0, 0.4))
    waiting = next(place.name for place in placement.modules if place.device == CPU and place.read)
    model.get_submodule(waiting).requires_grad_(True)
    with pytest.raises(RequestError, match="frozen"):
        model(input_ids=torch.ones(1, 3, dtype=torch.long))
    model.requires_grad_(False)
    answers(model)

    def broken(*_: object) -> None:
        raise JobFailed("the disk is gone")

    monkeypatch.setattr("upshift.loading.offload.buffers._read_views", broken)
    with pytest.raises(JobFailed, match="the disk is gone"):
        for _ in range(3):
            model(input_ids=torch.ones(1, 3, dtype=torch.long))


def test_parameters_between_modules_are_on_the_main_device() -> None:
    lone, layers = PlacementUnit(("scale",), 10, 10, streams=False), [PlacementUnit((f"layers.{i}",), 40, 40) for i in range(4)]
    placement = place_units([*layers, lone], {GPU: 60, "cuda:1": 40, CPU: 200}, MemoryNeeds(1, 1))
    assert placement.device_of("scale") == GPU
    with pytest.raises(NothingFits):
        place_units([PlacementUnit(("scale",), 70, 70, streams=False), *layers], {GPU: 60, CPU: 200}, MemoryNeeds(1, 1))
    apart = placement.modules[-1].changed(device=CPU)
    with pytest.raises(RequestError, match="scale is used by code between modules"):
        check_loose_parameters(placement.changed(modules=(*placement.modules[:-1], apart)))
