"""Every message of the doctor, by its source: what asks for something says what a person can type."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "upshift"
PASSED = {"option": "export UPSHIFT_CACHE=FOLDER"}  # what callers give to a function for a fix
ASKING = ("error", "warning", "hint")
# A command, an option, a setting, or a line of Python.
TYPED = re.compile(
    r"\b(upshift|python3?|pip|export|unset|sudo|apt|apt-get|nvidia-smi|df|du|rm|cp|mount|dmesg|docker|kubectl|ulimit|echo|sysctl|ps|"
    r"cpupower|swapoff|lsof|kill|ping|nc|ip|ufw|iptables|firewall-cmd|gcloud|free|top|lspci|numactl|swapon|fuser|nvcc|gcc|conda"
    r"|torchrun|watch|ss|ethtool)\b"
    r"|(?<!\w)--?[a-z][\w-]+|\b[A-Z][A-Z0-9_]{3,}=|\b\w+=[\w'\"{]|\b\w+\([^)]*\)|/(?:etc|proc|sys|tmp|dev)/"
)


def fixes() -> Iterator[tuple[str, str | None]]:
    """(where, the text of its fix as far as the source says it, with a word for each value; None: not to be read here)"""
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if "debugging.finding import" not in source:
            continue
        tree = ast.parse(source)
        known = PASSED | {
            target.id: text
            for node in ast.walk(tree) if isinstance(node, ast.Assign)  # what is added later makes it no shorter
            for target in node.targets if isinstance(target, ast.Name) and (text := words(node.value, {})) is not None
        }  # fmt: skip
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ASKING:
                fix = next((keyword.value for keyword in node.keywords if keyword.arg == "fix"), None)
                assert fix is not None, f"{path.name}:{node.lineno} asks without a fix"
                for text in alternatives(fix, known):
                    yield f"{path.relative_to(PACKAGE)}:{node.lineno}", text


def alternatives(node: ast.expr, known: dict[str, str]) -> Iterator[str | None]:
    if isinstance(node, ast.IfExp):
        yield from alternatives(node.body, known)
        yield from alternatives(node.orelse, known)
    else:
        yield words(node, known)


def words(node: ast.expr, known: dict[str, str]) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(words(part, known) or "VALUE" for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return words(node.value, known)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (words(node.left, known) or "VALUE") + (words(node.right, known) or "VALUE")
    return known.get(node.id) if isinstance(node, ast.Name) else None


FIXES = list(fixes())


def test_all_are_found() -> None:
    assert len(FIXES) > 60
    assert sum(text is None for _, text in FIXES) < 0.25 * len(FIXES)  # computed: the tests of their files look at them


@pytest.mark.parametrize(("where", "text"), [(where, text) for where, text in FIXES if text is not None])
def test_a_person_can_type_it(where: str, text: str) -> None:
    assert TYPED.search(text), f"{where}: {text!r}"


def test_what_this_machine_is_told_can_be_typed(tmp_path: Path) -> None:
    """By the command itself, with threads that oversubscribe and a plan that no machine has room for."""
    plan = {"plans": [{"plan": {"device": "cpu", "num_processes": 1}, "predicted": {"resident_gib": 1e6, "peak_gib": 1e6}}]}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    command = [sys.executable, "-m", "upshift.cli.main", "doctor", "--quick", "--json", "--plan", str(tmp_path / "plan.json")]
    environment = os.environ | {"OMP_NUM_THREADS": "4096"}
    done = subprocess.run([*command, "-o", str(tmp_path)], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1, done.stderr
    findings = {finding["subject"]: finding for finding in json.loads(done.stdout)["findings"]}
    threads = findings["OMP_NUM_THREADS"]
    assert threads["severity"] == "warning" and "export OMP_NUM_THREADS=" in threads["fix"]
    assert any("needs" in finding["what"] and finding["severity"] == "error" for finding in findings.values())
    for finding in findings.values():
        if finding["severity"] in ASKING:
            assert TYPED.search(finding["fix"]), finding
