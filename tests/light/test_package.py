"""What a user's tools see of the package: its names and their types in an editor or a type checker, and ``python -m upshift``."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest

import upshift

SOURCE = Path(upshift.__file__).parents[1]
LIGHT_NAMES = ("Host", "ModelProfile", "Plan", "Record", "Workload", "describe", "detect", "plan")

# What a user's script imports beside upshift is left unread: torch and transformers take mypy minutes.
MYPY_CONFIG = """
[mypy]
strict = True
follow_imports = skip
ignore_missing_imports = True
[mypy-upshift.*]
follow_imports = silent
"""
RIGHT_SCRIPT = """
import upshift

planning = upshift.plan("gpt2", sequence_length=512, global_batch=8, on="1xh100")
encoder: upshift.Encoder = upshift.Encoder("bert-base-uncased", quality="exact")
rows = encoder.encode(["a text", "another"])
host: upshift.Host = upshift.detect()
trainer = upshift.Trainer(model=None, args=None, trial_seconds=0.0)
"""
WRONG_SCRIPT = """
import upshift

planning = upshift.plan("gpt2", sequence_length="long", global_batch=8)
encoder = upshift.Encoder("bert-base-uncased", speed="fast")
trainer = upshift.Trainer(model=None, arguments=None)
"""
WRONG_CALLS = [
    ("wrong.py", "4", 'Argument "sequence_length" to "plan" has incompatible type "str"; expected "int"', "arg-type"),
    ("wrong.py", "5", 'Unexpected keyword argument "speed" for "Encoder"', "call-arg"),
    ("wrong.py", "6", 'Unexpected keyword argument "arguments" for "Trainer"', "call-arg"),
]


def typed_names() -> dict[str, str]:
    """Return the module that each name is imported from for type checkers."""
    tree = ast.parse(Path(upshift.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    modules = {}
    for statement in block.body:
        assert isinstance(statement, ast.ImportFrom)
        for alias in statement.names:
            assert alias.asname == alias.name, f"mypy does not export {alias.name} unless it is imported as {alias.name}"
            modules[alias.name] = str(statement.module)
    return modules


def test_type_checkers_see_the_names_that_are_loaded() -> None:
    assert typed_names() == upshift._MODULE_OF


@pytest.mark.parametrize("name", LIGHT_NAMES)
def test_a_name_is_the_object_that_type_checkers_see(name: str) -> None:
    assert getattr(upshift, name) is getattr(import_module(typed_names()[name]), name)


def test_mypy_finds_the_wrong_calls_of_a_script(tmp_path: Path) -> None:
    (tmp_path / "mypy.ini").write_text(MYPY_CONFIG)
    (tmp_path / "right.py").write_text(RIGHT_SCRIPT)
    (tmp_path / "wrong.py").write_text(WRONG_SCRIPT)
    # As an installed package, which mypy reads only because of py.typed.
    environment = {name: value for name, value in os.environ.items() if name != "MYPYPATH"} | {"PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "cache", "right.py", "wrong.py"]
    answer = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    errors = re.findall(r"^(\S+\.py):(\d+): error: (.*)  \[([a-z-]+)\]$", answer.stdout, re.MULTILINE)
    assert errors == WRONG_CALLS, answer.stdout + answer.stderr
    assert "Found 3 errors in 1 file" in answer.stdout


def run_as_module(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    return subprocess.run([sys.executable, "-m", "upshift", *arguments], env=environment, capture_output=True, text=True)


def test_the_module_runs_the_command_line() -> None:
    answer = run_as_module("--version")
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, f"upshift {version('upshift')}\n", "")


def test_the_module_ends_with_the_exit_code_of_the_command() -> None:
    answer = run_as_module("plan", "--nonsense")
    assert answer.returncode == 2
    assert answer.stderr.startswith("upshift: python -m upshift plan has no option --nonsense")
    assert answer.stderr.endswith("see python -m upshift plan --help-all\n")
