"""CONTRIBUTING, followed to the letter: a template copied to the place that it names is found, and nothing else is touched."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEMPLATES = ROOT / "templates"
NEEDS_TORCH = pytest.mark.skipif(find_spec("torch") is None, reason="an engine's file imports torch, which is not installed")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package, and each template where it says that it is to be copied to."""
    folder = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for template in ("chip.py", "engine.py", "optimizer.py", "case.py"):
        target = folder / place(template).replace("NAME", "toy")
        target.parent.mkdir(parents=True, exist_ok=True)
        assert not target.exists()
        shutil.copy(TEMPLATES / template, target)
    return folder


def place(template: str) -> str:
    """Where its docstring says that it goes."""
    text = ast.get_docstring(ast.parse((TEMPLATES / template).read_text())) or ""
    found = re.search(r"Copy to (\S+?\.py)", text)
    assert found, template
    return found[1]


def run(clone: Path, *command: str) -> str:
    path = f"{clone / 'src'}:{ROOT / 'tests' / 'light'}"
    done = subprocess.run(
        [sys.executable, *command], cwd=clone, env={"PYTHONPATH": path, "UPSHIFT_CACHE": str(clone / "cache")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_chip_is_one_file(clone: Path) -> None:
    code = "from upshift import describe; host = describe('2x8xtoy-t1'); print(host.num_devices, host.num_nodes)"
    assert run(clone, "-c", code).split() == ["16", "2"]


@NEEDS_TORCH
def test_an_engine_is_one_file(clone: Path) -> None:
    code = """
from upshift.hardware import describe
from upshift.inference.registry import contestants, check_engine, install_line, is_installed
from upshift.models.source import find_model
import json, pathlib
pathlib.Path("model").mkdir()
pathlib.Path("model/config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertModel"]}))
source, host = find_model("model"), describe("epyc-9654")
found = contestants("encode", source, host, exact=True, batch=1024, hint="throughput")
print([setup.label() for setup in found if setup.engine == "toy"], is_installed("toy"), install_line("toy"))
print(check_engine("encode", "toy", source, host), "toy" in {s.engine for s in contestants(
    "generate", source, host, exact=True, batch=1, hint="latency")})
"""
    assert run(clone, "-c", code).splitlines() == ["['toy fp32'] True pip install numpy", "toy False"]


def test_an_optimizer_is_one_file(clone: Path) -> None:
    """It is offered, allowed by its name, refused without, priced between those with less and more state, and read in words."""
    code = """
from made_profile import make_profile
from upshift.errors import RequestError
from upshift.hardware import describe
from upshift.planning.cost.optimizer import state_bytes, update_words
from upshift.planning.plan import Plan, changes_of_mathematics
from upshift.planning.search.space import read_fixed
from upshift.planning.workload import Workload
host = describe("epyc-9654")
def asked(*allow):
    try:
        return read_fixed(("optim=toy",), host, Workload(sequence_length=8, global_batch=8, allow=allow), quantized=False)
    except RequestError as refused:
        return str(refused)
plans = [Plan(device="cpu", host="", model="", sequence_length=8, per_device_train_batch_size=1, optim=name, optim_args=said)
         for name, said in (("sgd", ""), ("toy", "beta1=0.8"), ("adamw_torch", ""))]
states = [state_bytes(make_profile(), plan) for plan in plans]
print(states == sorted(states), update_words(plans[1]), changes_of_mathematics()["toy"])
print(asked("toy"))
print(asked())
"""
    priced, taken, refused = run(clone, "-c", code).splitlines()
    assert priced == "True 8.0 the sign of a momentum instead of AdamW's step"
    assert taken == "{'optim': 'toy'}"
    assert refused.endswith("(it changes the mathematics; add --allow toy)")


def test_a_claim_is_one_file(clone: Path) -> None:
    listed = json.loads(run(clone, "-m", "upshift.cli.main", "bench", "list", "--json"))
    assert [claim["name"] for claim in listed] == ["toy/speed"] and listed[0]["readings"] == []
    run(clone, "-m", "upshift.cli.main", "bench", "run", "toy", "--quick")
    (first, second) = (json.loads(line) for line in (clone / "benchmarks/results/toy.jsonl").read_text().splitlines())
    assert (first["name"], second["name"]) == ("toy/sum", "toy/loop") and first["details"]["quick"] is True


def test_contributing_names_every_template() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert [path.name for path in sorted(TEMPLATES.iterdir()) if f"(templates/{path.name})" not in text] == []
