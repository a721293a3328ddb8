"""upshift.Trainer in a script that torchrun started: the losses, predictions and files of one process, whatever the layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from warm_processes import WarmProcesses

from upshift.planning.plan import Plan
from upshift.training.prepare import configure_process

HELPERS = Path(__file__).parents[1] / "helpers"

SCRIPT = HELPERS / "trainer_ranks.py"
TIMEOUT_SECONDS = 900
TENSOR = {"layout": {"tensor_parallel": 2}}
MEANS = {"arguments": {"average_tokens_across_devices": False}}  # transformers would multiply a mean over rows by the ranks
SMOOTHED = {"arguments": {"label_smoothing_factor": 0.1, "max_steps": 3}}
ALONE: dict[str, dict[str, Any]] = {"llama": {}, "bert": {"kind": "bert"} | MEANS, "smoothed": SMOOTHED}
SHARED: dict[str, dict[str, Any]] = {
    "whole copies": {},
    "fsdp": {"arguments": {"fsdp": "full_shard"}},
    "optimizer": {"layout": {"fully_shard": "optimizer", "shard_size": 2}},
    "tensor": TENSOR,
    "bert, whole copies": {"kind": "bert"} | MEANS,
    "bert, fsdp": {"kind": "bert", "arguments": MEANS["arguments"] | {"fsdp": True}},
    "smoothed in chunks": {"layout": {}, "loss_chunk_tokens": 16} | SMOOTHED,
    "own step": {"step": "by hand"},
    "own step, fsdp": {"step": "by hand", "arguments": {"fsdp": "full_shard"}},
    "two passes": {"step": "twice", "arguments": {"max_steps": 2}},
    "two passes, fsdp": {"step": "twice", "arguments": {"max_steps": 2, "fsdp": "full_shard"}},
    "own step and a plan": {"step": "by hand", "refused": True} | TENSOR,
    "unlabelled": {"unlabelled": True, "layout": {}, "arguments": {"max_steps": 3}},
    "unlabelled, overlapping": {"unlabelled": True, "overlaps": True, "layout": {}, "arguments": {"max_steps": 3}},
    "one runs out of memory": {"fails": True, "arguments": {"fsdp": True, "max_steps": 4}},
    "adapter": {"adapter": True, "refused": True} | TENSOR,
    "stages": {"layout": {"pipeline_parallel": 2}, "refused": True},
    "tokens": {"layout": {"tensor_parallel": 2, "sequence_parallel": True}, "refused": True},
    "processes": {"fixed": ["num_processes=2"], "refused": True},
    "whole models of parts": {"arguments": {"fsdp": "full_shard", "save_only_model": True}, "refused": True},
    "wrapping": {"arguments": {"fsdp": True, "fsdp_config": {"cpu_offload": True}}, "refused": True},
}
OTHERWISE = (  # trained otherwise than one process does
    "one runs out of memory", "two passes", "two passes, fsdp", "unlabelled", "unlabelled, overlapping", "smoothed in chunks",
)  # fmt: skip
AFTERWARDS = {  # of checkpoints that other numbers of ranks wrote, in another layout
    "alone from fsdp": (1, "fsdp", {}),
    "alone from tensor": (1, "tensor", {}),
    "tensor from alone": (2, "llama", TENSOR),
    "fsdp from tensor": (2, "tensor", {"arguments": {"fsdp": "shard_grad_op"}}),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, warm_processes: WarmProcesses) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ranks")
    later = {name: case | {"resume": str(folder / of / "checkpoint-5")} for name, (_, of, case) in AFTERWARDS.items()}
    worlds = {"alone": (1, ALONE), "shared": (2, SHARED)}
    for size in (1, 2):
        worlds[f"later-{size}"] = (size, {name: later[name] for name in later if AFTERWARDS[name][0] == size})
    seen = run(folder, worlds, warm_processes)
    results = {name: result for world in worlds for name, result in seen[world][0].items()}
    for name, result in seen["shared"][1].items():
        results[name]["other"] = result
    return results | {"folder": folder}


def run(
    folder: Path, worlds: dict[str, tuple[int, dict[str, Any]]], warm_processes: WarmProcesses
) -> dict[str, list[dict[str, Any]]]:
    """Return what each rank of each world saw."""
    (folder / "worlds.json").write_text(json.dumps(worlds))
    ended = warm_processes.run(SCRIPT, str(folder), timeout=TIMEOUT_SECONDS)
    assert ended.returncode == 0, ended.stderr[-4000:]
    for name, (_, cases) in worlds.items():
        logged = (folder / f"{name}.out").read_text().count("'train_runtime'")
        assert logged == sum("refused" not in case for case in cases.values()), "each run logs once"
    return {
        name: [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(size)]
        for name, (size, _) in worlds.items()
    }


def difference(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", [name for name in SHARED if name not in OTHERWISE and "refused" not in SHARED[name]])
def test_ranks_train_and_predict_as_one_process_does(name: str, found: dict[str, Any]) -> None:
    got, one = found[name], found["bert" if name.startswith("bert") else "llama"]
    assert difference(got["losses"], one["losses"]) < 1e-5
    assert difference(got["norms"], one["norms"]) < 1e-4
    assert abs(got["loss"] - one["loss"]) < 1e-5
    np.testing.assert_allclose(got["predicted"], one["predicted"], atol=1e-5)
    assert got["predicted"] == got["other"]["predicted"], "all ranks are given all predictions"
    assert (got["steps"], got["zero"]) == (10, True)
    assert (got["other"]["steps"], got["other"]["zero"]) == (10, False)


@pytest.mark.parametrize("name", ["two passes", "two passes, fsdp"])
def test_a_step_of_two_passes_has_twice_the_gradient(name: str, found: dict[str, Any]) -> None:
    assert abs(found[name]["norms"][0] - 2 * found["llama"]["norms"][0]) < 1e-4
    assert found[name]["predicted"] == found[name]["other"]["predicted"]


def test_smoothed_labels_in_chunks_count_the_labels_of_all_ranks(found: dict[str, Any]) -> None:
    ranks, one = found["smoothed in chunks"], found["smoothed"]
    assert difference(ranks["losses"], one["losses"]) < 1e-5
    assert difference(ranks["norms"], one["norms"]) < 1e-4


def test_a_rank_whose_rows_have_no_label_takes_part(found: dict[str, Any]) -> None:
    one, other = found["unlabelled"], found["unlabelled, overlapping"]
    assert one["losses"] == other["losses"] and one["norms"] == other["norms"] and one["steps"] == 3


def test_the_layout_is_the_one_asked_for(found: dict[str, Any]) -> None:
    labels = {name: found[name]["label"] for name in ("fsdp", "optimizer", "tensor")}
    assert ["zero3 2" in labels["fsdp"], "zero1 2" in labels["optimizer"], "tp 2" in labels["tensor"]] == [True] * 3, labels


@pytest.mark.parametrize("name", AFTERWARDS)
def test_a_checkpoint_goes_on_with_other_ranks(name: str, found: dict[str, Any]) -> None:
    assert found[name]["steps"] == 5
    assert difference(found[name]["losses"][-5:], found["llama"]["losses"][-5:]) < 1e-5


@pytest.mark.parametrize("name", ["whole copies", "fsdp", "optimizer", "tensor"])
def test_the_saved_model_is_whole(name: str, found: dict[str, Any]) -> None:
    one, got = (AutoModelForCausalLM.from_pretrained(found["folder"] / which / "final") for which in ("llama", name))
    assert got.config.architectures == ["LlamaForCausalLM"]
    for (key, whole), (_, other) in zip(one.state_dict().items(), got.state_dict().items(), strict=True):
        assert torch.allclose(whole, other, atol=1e-4), key


def test_all_ranks_halve_together_when_one_runs_out_of_memory(found: dict[str, Any]) -> None:
    got = found["one runs out of memory"]
    assert difference(got["losses"], found["llama"]["losses"][:4]) < 2e-2  # the schedule is another one
    assert difference(got["losses"][:2], found["llama"]["losses"][:2]) < 1e-5
    assert got["rows"] == got["other"]["rows"] == 2


@pytest.mark.parametrize(
    "name, words",
    [
        ("adapter", ("tensor_parallel=2", "adapter", "fully_shard=weights")),
        ("stages", ("pipeline_parallel", "upshift train")),
        ("tokens", ("sequence_parallel", "leave it out")),
        ("processes", ("num_processes=2", "torchrun")),
        ("whole models of parts", ("save_only_model", "leave it out")),
        ("wrapping", ("fsdp_config", "cpu_offload")),
        ("own step and a plan", ("own training_step", "leave out plan")),
    ],
)
def test_what_it_cannot_do_is_refused_before_the_first_step(name: str, words: tuple[str, ...], found: dict[str, Any]) -> None:
    for rank in (found[name], found[name]["other"]):
        assert all(word in rank["refused"] for word in words), rank["refused"]


def test_a_plan_leaves_each_rank_the_gpu_that_its_launcher_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers chooses it by LOCAL_RANK. With the first one in all ranks, NCCL would find a GPU twice."""
    chosen: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    plan = Plan(device="cuda", host="", model="", sequence_length=8, per_device_train_batch_size=1, num_processes=2)
    configure_process(plan)
    assert not chosen
