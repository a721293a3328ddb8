"""Hosts in network namespaces: workers and a host are killed, the host comes back, and no step of the run is lost or changed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CASE = Path(__file__).parents[3] / "benchmarks" / "cases" / "elastic.py"
# Names, bridge and processes of this test alone, which end with it; no root is needed where users may have namespaces.
APART = (
    "unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc",
    "bash", "-c", 'mount -t tmpfs none /run && exec "$@"', "apart",
)  # fmt: skip
TRY = "ip link add upshiftry type bridge && ip netns add upshiftry && ip netns exec upshiftry true"


def test_deaths_of_workers_and_of_a_host_change_no_loss(tmp_path: Path) -> None:
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("needs unshare and ip")
    tried = subprocess.run([*APART, "bash", "-c", TRY], capture_output=True, text=True, timeout=60, check=False)
    if tried.returncode:
        pytest.skip(f"network namespaces cannot be made here: {tried.stderr.strip()[-200:]}")
    size = ("--quick", "--hosts", "2", "--kills", "1", "--lose-host", "--every", "1", "--steps", "80")
    ended = subprocess.run(
        [*APART, sys.executable, str(CASE), *size, "--results", str(tmp_path)],
        capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=400, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    said = json.loads(ended.stdout.splitlines()[-1])
    kinds = [event.split(" after ")[0] for event in said["events"]]
    assert kinds[0].startswith("worker of ") and kinds[1:] == ["host 1 killed", "host 1 back"]
    assert said["same_steps"] and said["largest_loss_difference"] <= 1e-5
    assert 0 < said["goodput"]["disturbed"] < said["goodput"]["undisturbed"]
    rows = [json.loads(line) for line in (tmp_path / "elastic.jsonl").read_text().splitlines()]
    assert [row["name"] for row in rows] == ["elastic/undisturbed", "elastic/deaths"]
    assert [row["plan"]["num_processes"] for row in rows] == [1, 2]  # at its end the host that was lost takes part
    assert len(rows[1]["details"]["loss_curve"]) == 80
