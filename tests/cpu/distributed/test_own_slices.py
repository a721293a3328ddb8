"""Ranks that share a model have the same weights as if each had loaded all of it, in less memory; a plan that does not fit the
model's layers is known before a rank starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from parallel_runs import Case, a_config, a_plan
from warm_processes import WarmProcesses

from upshift.models.source import find_model
from upshift.training.distributed import parallelize
from upshift.training.distributed.parallelize import Rehearsals

HELPERS = Path(__file__).parents[1] / "helpers"

LAYOUTS = {
    "tensor": {"tensor_parallel": 2},
    "weights": {"fully_shard": "weights", "shard_size": 2},
    "stages": {"pipeline_parallel": 2},
}
WIDE = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4096}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: tmp_path_factory.mktemp(name) for name in ("tied", "untied")}
    for name, path in found.items():
        torch.manual_seed(0)
        config = transformers.Qwen2Config(num_hidden_layers=4, tie_word_embeddings=name == "tied", **WIDE)
        transformers.Qwen2ForCausalLM(config).bfloat16().save_pretrained(path)
    return found


@pytest.mark.parametrize("which, layout", [("untied", "tensor"), ("tied", "weights"), ("tied", "stages")])
def test_ranks_read_what_they_keep(which: str, layout: str, folders: dict[str, Path], warm_processes: WarmProcesses) -> None:
    script = HELPERS / "own_slices_ranks.py"
    ended = warm_processes.run(script, str(folders[which]), json.dumps(LAYOUTS[layout]), timeout=200)
    assert ended.returncode == 0, ended.stderr[-3000:]
    got = json.loads(ended.stdout.splitlines()[-1])
    assert got["same"] and got["tensors"] > 10, got
    assert got["sliced"] < 0.75 * got["whole"], got


def test_a_plan_that_does_not_fit_its_layers_is_refused(tmp_path: Path) -> None:
    """It adds the mask of all heads to the scores of a rank's own."""
    widths: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    transformers.DogeConfig(vocab_size=96, num_hidden_layers=2, intermediate_size=64, **widths).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["DogeForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = a_plan(Case(world=2, layout=LAYOUTS["tensor"]))
    problem = Rehearsals(find_model(str(tmp_path))).why_not(plan)
    assert problem is not None and all(word in problem for word in ("tensor_parallel=2", "does not fit", "fully_shard=weights"))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("model", ["llama", "mixture", "phi3", "apertus"])
def test_one_that_fits_is_not(model: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan for GPUs runs on fake tensors like another, also where there is no GPU."""
    config = a_config(model)
    config.architectures = [type(config).__name__.removesuffix("Config") + "ForCausalLM"]
    config.save_pretrained(tmp_path)
    tried: list[str | None] = []
    fails = parallelize._rehearsal_error
    monkeypatch.setattr(parallelize, "_rehearsal_error", lambda *given: tried.append(fails(*given)) or tried[-1])
    rehearsals = Rehearsals(find_model(str(tmp_path)))
    plan = a_plan(Case(world=2, layout=LAYOUTS["tensor"] | {"sequence_parallel": True})).changed(device=device)
    assert rehearsals.why_not(plan) is None
    assert tried == [None], "the divided layers ran"


def test_threads_of_a_rank_may_begin_together(warm_processes: WarmProcesses) -> None:
    """A forked rank's pool of threads was made by its first operation; of four at the same time some found none (94 of 100)."""
    ended = warm_processes.run(HELPERS / "threads_in_ranks.py", timeout=200)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert json.loads(ended.stdout.splitlines()[-1]) == []
