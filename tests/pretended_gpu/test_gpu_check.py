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


def check(on_gpus: Run, gpus: str, folder: Path, parts: str, *, code: int = 0) -> str:
    """Run these parts with tiny sizes and long limits, and return what the command printed."""
    kept = on_gpus(gpus, str(HERE / "keep_probe.py"))
    assert kept.returncode == 0, kept.stderr
    options = ("--quick", "--minutes", "200", "--output", str(folder), "--only", parts)
    done = on_gpus(gpus, CHECK, *options, OMP_NUM_THREADS="1")
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_one_gpu(on_gpus: Run, tmp_path: Path) -> None:
    folder = tmp_path  # the check keeps its cache in it, where the probe was kept
    printed = check(on_gpus, "h100", folder, "facts,train,trainer-plain,trainer-liger,layout-one")
    rows = rows_of(folder)
    ends = {name: row["status"] for name, row in rows.items()}
    liger = ends.pop("trainer-liger")
    assert liger in ("works", "slower") or "pip install liger-kernel" in rows["trainer-liger"]["reason"]
    assert ends.pop("layout-one") == "skipped" and rows["layout-one"]["reason"] == "needs 2 GPUs, and there is 1"
    assert ends.pop("trainer-plain") in ("works", "slower") and ends.pop("train") == "slower"
    assert ends == {"facts": "works", "data": "works"}
    assert abs(rows["trainer-plain"]["details"]["loss_difference"]) < 0.005
    assert rows["facts"]["details"]["capabilities"] == ["9.0"]
    assert "train is so many times as fast" in printed
    with tarfile.open(folder / "upshift-gpu-check.tar.gz") as archive:
        names = archive.getnames()
    assert {"results/gpu_train.jsonl", "results/gpu_trainer.jsonl", "parts/facts/doctor.json"} <= set(names)


def test_two_gpus(on_gpus: Run, tmp_path: Path) -> None:
    """Each layout has the losses of one GPU; a layout whose losses are others fails, and only it runs again."""
    folder = tmp_path
    printed = check(on_gpus, "2x4090", folder, "layout-data,layout-tensor")
    rows = rows_of(folder)
    assert {name: row["status"] for name, row in rows.items()} == dict.fromkeys(
        ("data", "layout-one", "layout-data", "layout-tensor"), "works"
    )
    assert "NVIDIA GeForce RTX 4090, 2 in all" in printed and "4 work" in printed
    losses = folder / "parts" / "layout-one" / "answer.json"
    answer = json.loads(losses.read_text())
    answer["details"]["losses"][-1] *= 1.01
    losses.write_text(json.dumps(answer))
    printed = check(on_gpus, "2x4090", folder, "layout-data,layout-zero3", code=1)
    assert "layout-one: has a result" in printed and "layout-data: has a result" in printed
    row = rows_of(folder)["layout-zero3"]
    assert row["status"] == "failed" and row["reason"].startswith("its losses differ by 0.0099 from one GPU's")


def test_without_a_gpu_one_line_says_what_torch_sees(on_gpus: Run, tmp_path: Path) -> None:
    done = on_gpus("h100", CHECK, "--output", str(tmp_path / "check"), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and not (tmp_path / "check").exists()
    (line,) = done.stderr.splitlines()
    assert line.startswith("gpu_check: the GPU check needs an NVIDIA GPU; torch ")
    assert line.endswith("sees none; run  upshift doctor")
