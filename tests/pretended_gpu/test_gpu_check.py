"""``make gpu`` on GPUs that are not there: processes of parts, layouts against one GPU, and the file to send.

Only these parts, because each process imports torch: all parts take minutes. mypy checks the calls of the others (make check).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pretended_gpus import Run

ROOT = Path(__file__).parents[2]
CHECK = str(ROOT / "benchmarks" / "gpu" / "gpu_check.py")


def rows_of(folder: Path) -> dict[str, dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    return {row["part"]: row for row in rows}


def test_the_facts_and_a_layout_of_two_gpus(on_gpus: Run, keep_probe: Callable[[str], None], tmp_path: Path) -> None:
    """ZeRO 3 on two GPUs has the losses of one. Limits are long: CPUs compute."""
    keep_probe("2x4090")
    options = ("--quick", "--minutes", "200", "--output", str(tmp_path), "--only", "facts,layout-zero3")
    done = on_gpus("2x4090", CHECK, *options, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(tmp_path)
    assert list(rows) == ["facts", "data", "layout-one", "layout-zero3"]
    assert (rows["facts"]["status"], rows["data"]["status"]) == ("works", "works")
    for part in ("layout-one", "layout-zero3"):  # a CPU computes, and the prediction is of the GPU
        assert rows[part]["status"] in ("works", "slower") and rows[part]["predicted"] > 0 < rows[part]["measured"]
    assert "the losses of one GPU" in rows["layout-zero3"]["reason"]
    assert rows["facts"]["details"]["capabilities"] == ["8.9", "8.9"]
    assert "0 of 2 pairs of GPUs copy directly" in rows["facts"]["reason"]
    assert "NVIDIA GeForce RTX 4090, 2 in all" in done.stdout
    plans = [json.loads(line)["plan"] for line in (tmp_path / "results" / "gpu_layouts.jsonl").read_text().splitlines()]
    assert [plan["num_processes"] for plan in plans] == [1, 2] and plans[1]["layout"]["fully_shard"] == "weights"
    with tarfile.open(tmp_path / "upshift-gpu-check.tar.gz") as archive:
        names = set(archive.getnames())
    assert {"rows.jsonl", "packages.txt", "results/gpu_layouts.jsonl", "parts/facts/doctor.json"} <= names


def test_without_a_gpu_one_line_says_what_torch_sees(tmp_path: Path) -> None:
    output = tmp_path / "check"
    done = subprocess.run(
        [sys.executable, CHECK, "--output", str(output)], env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and not output.exists()
    (line,) = done.stderr.splitlines()
    assert line.startswith("gpu_check: the GPU check needs an NVIDIA GPU; torch ")
    assert line.endswith("sees none; run  upshift doctor")
