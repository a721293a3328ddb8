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


def check(on_gpus: Run, gpus: str, folder: Path, parts: str) -> str:
    """Run these parts with tiny sizes and long limits, and return what the command printed."""
    options = ("--quick", "--minutes", "200", "--output", str(folder), "--only", parts)
    done = on_gpus(gpus, CHECK, *options, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_one_gpu(on_gpus: Run, tmp_path: Path) -> None:
    keep_probe(on_gpus, "h100")
    printed = check(on_gpus, "h100", tmp_path, "facts,trainer-plain,layout-one")
    rows = rows_of(tmp_path)
    assert {name: row["status"] for name, row in rows.items()} == {
        "facts": "works", "data": "works", "train": "slower", "trainer-plain": rows["trainer-plain"]["status"],
        "layout-one": "skipped",
    }  # fmt: skip
    assert rows["trainer-plain"]["status"] in ("works", "slower")  # by which of two tiny runs was slowed
    assert abs(rows["trainer-plain"]["details"]["loss_difference"]) < 0.005
    assert rows["facts"]["details"]["capabilities"] == ["9.0"]
    assert rows["layout-one"]["reason"] == "needs 2 GPUs, and there is 1"
    assert "train is so many times as fast" in printed
    with tarfile.open(tmp_path / "upshift-gpu-check.tar.gz") as archive:
        names = archive.getnames()
    assert {"results/gpu_train.jsonl", "results/gpu_trainer.jsonl", "parts/facts/doctor.json"} <= set(names)


def test_two_gpus(on_gpus: Run, tmp_path: Path) -> None:
    """ZeRO 3 on two GPUs has the losses of one, and a second run repeats neither."""
    keep_probe(on_gpus, "2x4090")
    printed = check(on_gpus, "2x4090", tmp_path, "layout-zero3")
    rows = rows_of(tmp_path)
    assert {name: row["status"] for name, row in rows.items()} == dict.fromkeys(("data", "layout-one", "layout-zero3"), "works")
    assert "NVIDIA GeForce RTX 4090, 2 in all" in printed and "3 work" in printed
    (row,) = (tmp_path / "results" / "gpu_layouts.jsonl").read_text().splitlines()[1:]
    assert json.loads(row)["plan"]["layout"]["fully_shard"] == "weights"
    before = (tmp_path / "rows.jsonl").read_text()
    printed = check(on_gpus, "2x4090", tmp_path, "layout-zero3")
    assert printed.count("has a result (works)") == 3 and (tmp_path / "rows.jsonl").read_text() == before


def test_without_a_gpu_one_line_says_what_torch_sees(on_gpus: Run, tmp_path: Path) -> None:
    done = on_gpus("h100", CHECK, "--output", str(tmp_path / "check"), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and not (tmp_path / "check").exists()
    (line,) = done.stderr.splitlines()
    assert line.startswith("gpu_check: the GPU check needs an NVIDIA GPU; torch ")
    assert line.endswith("sees none; run  upshift doctor")
