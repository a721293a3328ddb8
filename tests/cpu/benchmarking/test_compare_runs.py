"""Runs that should agree and do not: the first step and the tensors are named; and runs that do agree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from upshift.errors import RequestError
from upshift.training.arguments import Arguments
from upshift.training.compare_runs import GROUPS, REQUEST_FIELDS, compare_runs, read_run
from upshift.training.loop.state import Run as Written

NAMES = ("model.layers.0.w", "model.layers.2.w", "model.layers.10.w")


def run(
    folder: Path, *, losses: list[float], weights: dict[int, dict[str, float]], precision: str = "fp32", **asked: Any
) -> Path:
    """``weights``: by step, what is added to one number of a tensor."""
    folder.mkdir()
    arguments = {"learning_rate": 5e-5, "max_steps": len(losses)}
    document = {"model": "m", "data": "d", "global_batch": 8, "sequence_length": 16, "arguments": arguments} | asked
    (folder / "upshift_run.json").write_text(json.dumps(document))
    for step, added in weights.items():
        checkpoint = folder / f"checkpoint-{step}"
        checkpoint.mkdir()
        train = {"step": step, "plan": {"precision": precision}, "loss_curve": losses[:step]}
        (checkpoint / "upshift_state.json").write_text(json.dumps({"train": train}))
        tensors = {name: torch.full((4, 4), 2.0) for name in NAMES}
        for name, much in added.items():
            tensors[name][1, 1] += much
        save_file(tensors, checkpoint / "model.safetensors")
    return folder


LOSSES = [3.0, 2.5, 2.25, 2.125]


def test_runs_that_agree(tmp_path: Path) -> None:
    one = run(tmp_path / "a", losses=LOSSES, weights={2: {}, 4: {}})
    other = run(tmp_path / "b", losses=[loss * (1 + 1e-6) for loss in LOSSES], weights={2: {}, 4: {NAMES[1]: 1e-5}})
    found = compare_runs(one, other)
    assert (found.first_step, found.first_checkpoint, found.tensors) == (None, None, ())
    assert [finding.severity for finding in found.findings] == ["ok"] * 3
    assert found.findings[-1].what == "agree in checkpoints 2, 4"
    assert NAMES[1] in found.findings[-1].evidence


def test_the_first_step_and_tensor_that_differ(tmp_path: Path) -> None:
    one = run(tmp_path / "a", losses=LOSSES, weights={2: {}, 4: {}})
    other = run(tmp_path / "b", losses=[3.0, 2.5, 2.26, 2.0], weights={2: {}, 4: {NAMES[2]: 0.5, NAMES[1]: 0.1}})
    found = compare_runs(one, other)
    assert (found.first_step, found.first_checkpoint) == (3, 4)
    assert [item.name for item in found.tensors] == [NAMES[2], NAMES[1]]  # the worst first
    assert found.tensors[0].relative == pytest.approx(0.25)
    loss, weights = found.findings[-2:]
    assert "differs first at step 3: 2.250000 and 2.260000" in loss.what
    assert f"by name first in {NAMES[1]} (5.0e-02)" in weights.what  # 2 before 10
    assert "the same in checkpoint 2" in weights.evidence
    assert compare_runs(one, other, tolerance=0.5).first_step is None


def test_what_was_asked_differently_comes_first(tmp_path: Path) -> None:
    one = run(tmp_path / "a", losses=LOSSES, weights={4: {}})
    other = run(tmp_path / "b", losses=LOSSES, weights={4: {}}, precision="bf16", global_batch=16)
    found = compare_runs(one, other)
    assert found.findings[0].subject == "global_batch" and "the global_batch of the other" in (found.findings[0].fix or "")
    assert found.findings[1].subject == "plans" and "precision fp32 and bf16" in found.findings[1].evidence
    assert found.tolerance == 1e-3


def test_only_what_was_asked_is_a_setting(tmp_path: Path) -> None:
    """The results in a run file, such as those of a preference run, are no settings. An object is compared by its names."""
    rows = ("rewards", "evaluation_rewards", "kl_terms", "tokens", "evaluations", "logged_steps", "lost_steps")
    results: dict[str, dict[str, Any]] = {name: {row: [[name]] for row in rows} | {"id": name} for name in ("a", "b")}
    runs = [
        run(tmp_path / name, losses=LOSSES, weights={4: {}}, data_options={"text_column": name, "split": None}, **fields)
        for name, fields in results.items()
    ]
    different = [finding for finding in compare_runs(*runs).findings if finding.severity == "warning"]
    assert [(finding.subject, finding.what.partition(":")[0]) for finding in different] == [("text_column", "a and b")]
    assert set(Written.model_fields) == {*REQUEST_FIELDS, *GROUPS, *rows, "id", "finished"}  # a new field is one or the other


def test_nan_differs_from_numbers_and_not_from_nan(tmp_path: Path) -> None:
    nan = float("nan")
    one = run(tmp_path / "a", losses=[3.0, nan], weights={2: {}})
    assert compare_runs(one, run(tmp_path / "b", losses=[3.0, nan], weights={2: {}})).first_step is None
    worse = compare_runs(one, run(tmp_path / "c", losses=[3.0, 2.0], weights={2: {NAMES[0]: nan}}))
    assert (worse.first_step, worse.first_checkpoint) == (2, 2)


def runs_of_transformers(tmp_path: Path) -> None:
    for name, loss in (("a", 2.0), ("b", 2.1)):
        (tmp_path / name).mkdir()
        history = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": loss}, {"step": 2, "eval_loss": 1.0}]
        (tmp_path / name / "trainer_state.json").write_text(json.dumps({"log_history": history}))


def test_runs_of_transformers(tmp_path: Path) -> None:
    runs_of_transformers(tmp_path)
    found = compare_runs(tmp_path / "a", tmp_path / "b")
    assert found.first_step == 2
    assert found.findings[-1].severity == "unknown"  # no weights to compare


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    one = run(tmp_path / "a", losses=LOSSES, weights={4: {}})
    with pytest.raises(RequestError, match="tolerance inf is not possible; give 0 or more"):
        compare_runs(one, one, tolerance=float("inf"))
    with pytest.raises(RequestError, match="is not a folder"):
        compare_runs(one, tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RequestError, match=r"has neither upshift_run.json nor trainer_state.json"):
        compare_runs(one, tmp_path / "empty")
    other = run(tmp_path / "b", losses=LOSSES, weights={4: {}})
    save_file({"other": torch.ones(2)}, other / "checkpoint-4" / "model.safetensors")
    with pytest.raises(RequestError, match="different models"):
        compare_runs(one, other)
    (other / "checkpoint-4" / "model.safetensors").write_bytes(b"\x10")
    with pytest.raises(RequestError, match="is not a whole safetensors file"):
        compare_runs(one, other)
    (other / "upshift_run.json").write_text("[1]")
    with pytest.raises(RequestError, match="upshift_run.json is not a JSON object"):
        compare_runs(one, other)


def in_parts(checkpoint: Path, ranks: int) -> None:
    """As ranks write it that divide every tensor by rows."""
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    for rank in range(ranks):
        own = {name: tensor.chunk(ranks)[rank].contiguous() for name, tensor in tensors.items()}
        kept = [rank * 4 // ranks, (rank + 1) * 4 // ranks]
        pieces = {f"weights/{name}": {"shape": [4, 4], "kept": {"0": [kept]}} for name in own}
        save_file(own, checkpoint / f"weights-{rank:05d}.safetensors")
        (checkpoint / f"pieces-{rank:05d}.json").write_text(json.dumps({"tensors": pieces}))


def test_checkpoints_in_parts_of_ranks(tmp_path: Path) -> None:
    runs = [run(tmp_path / name, losses=LOSSES, weights={4: {NAMES[1]: much}}) for name, much in (("a", 0.0), ("b", 0.1))]
    whole, same = (run(tmp_path / name, losses=LOSSES, weights={4: {}}) for name in ("c", "d"))
    for one, ranks in ((runs[0], 2), (runs[1], 4), (same, 4)):
        in_parts(one / "checkpoint-4", ranks)
    found = compare_runs(*runs)
    assert found.first_checkpoint == 4 and [item.name for item in found.tensors] == [NAMES[1]]
    assert found.tensors[0].relative == pytest.approx(0.05)
    assert compare_runs(whole, same).findings[-1].severity == "ok"
    (same / "checkpoint-4" / "pieces-00001.json").unlink()
    with pytest.raises(RequestError, match=r"weights-00001.safetensors has a part of .*, and no pieces-\*.json says which"):
        compare_runs(whole, same)
    for part in (same / "checkpoint-4").glob("weights-*"):
        part.unlink()
    (same / "checkpoint-4" / "optimizer.safetensors").write_bytes(b"")
    assert compare_runs(whole, same).findings[-1].what.startswith("no checkpoint of the same step in both")


def test_the_command_says_by_its_code_that_they_differ(tmp_path: Path) -> None:
    runs_of_transformers(tmp_path)
    command = [sys.executable, "-m", "upshift.cli.main", "compare-runs", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["first_step"] == 2


def test_files_that_two_runs_of_one_request_wrote(tmp_path: Path) -> None:
    """Each run's own id, checksum and progress are not what was asked."""
    for number, name in enumerate(("one", "two"), start=1):
        folder = run(tmp_path / name, losses=[2.0], weights={1: {}})
        arguments = Arguments(max_steps=1)
        written = Written(
            model="m", data="d", global_batch=8, sequence_length=16, arguments=arguments, id=f"id {number}", tokens=(number,)
        )
        written.write(folder)
    first, second = (read_run(tmp_path / name) for name in ("one", "two"))
    assert first.request == second.request and first.request["max_steps"] == 1
