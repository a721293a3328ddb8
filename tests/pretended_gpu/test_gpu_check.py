"""``make gpu`` on GPUs that are not there: each part ends with a result, and a second run does only what is missing.

Times mean nothing here: the probe's rates are the data sheet's, so a part that is compared with a prediction is slower.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

from pretended_gpus import Run

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CHECK = str(ROOT / "benchmarks" / "gpu" / "gpu_check.py")


def rows_of(folder: Path) -> dict[str, dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    return {row["part"]: row for row in rows}


def keep_probe(on_gpus: Run, gpus: str) -> None:
    kept = on_gpus(gpus, str(HERE / "keep_probe.py"))
    assert kept.returncode == 0, kept.stderr


def test_parts_of_one_gpu_and_of_two(on_gpus: Run, tmp_path: Path) -> None:
    """Trainer has the loss of the planned run, and ZeRO 3 on two GPUs has the losses of one. Limits are long: CPUs compute."""
    keep_probe(on_gpus, "2x4090")
    options = ("--quick", "--minutes", "200", "--output", str(tmp_path), "--only", "facts,trainer-plain,layout-zero3")
    done = on_gpus("2x4090", CHECK, *options, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(tmp_path)
    plain = rows["trainer-plain"]
    assert plain["status"] in ("works", "slower")  # by which of two tiny runs was disturbed
    assert {name: row["status"] for name, row in rows.items()} == {
        "facts": "works", "data": "works", "train": "slower", "trainer-plain": plain["status"], "layout-one": "works",
        "layout-zero3": "works",
    }  # fmt: skip
    assert abs(plain["details"]["loss_difference"]) < 0.005
    assert rows["facts"]["details"]["capabilities"] == ["8.9", "8.9"]
    assert "NVIDIA GeForce RTX 4090, 2 in all" in done.stdout and "train is so many times as fast" in done.stdout
    plans = [json.loads(line)["plan"] for line in (tmp_path / "results" / "gpu_layouts.jsonl").read_text().splitlines()]
    assert [plan["num_processes"] for plan in plans] == [1, 2] and plans[1]["layout"]["fully_shard"] == "weights"
    with tarfile.open(tmp_path / "upshift-gpu-check.tar.gz") as archive:
        names = set(archive.getnames())
    assert {"results/gpu_train.jsonl", "results/gpu_trainer.jsonl", "parts/facts/doctor.json", "parts/train/log.txt"} <= names


def test_without_a_gpu_one_line_says_what_torch_sees(on_gpus: Run, tmp_path: Path) -> None:
    done = on_gpus("h100", CHECK, "--output", str(tmp_path / "check"), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and not (tmp_path / "check").exists()
    (line,) = done.stderr.splitlines()
    assert line.startswith("gpu_check: the GPU check needs an NVIDIA GPU; torch ")
    assert line.endswith("sees none; run  upshift doctor")
