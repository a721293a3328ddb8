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
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from upshift.cli.main import app

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
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "install_command":
        return "pip install VALUE"
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


# --- commands of this package in any message -----------------------------------------------------------------------

ROOT: Any = typer.main.get_command(app)
COMPUTED = "\0"  # the place of a value
NAMES = "|".join(sorted(ROOT.commands))
COMMAND = re.compile(rf"\bupshift ({NAMES})\b((?: (?![A-Z]?[a-z]+ing\b)[^\s;:,()`]+)*)")


def texts_of(tree: ast.Module) -> Iterator[str]:
    """Yield every text of a file but its docstrings, with COMPUTED where a value stands."""
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = {id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, documented)
                  and node.body and isinstance(node.body[0], ast.Expr)}  # fmt: skip
    left_out = inner | docstrings
    for node in ast.walk(tree):
        if id(node) in left_out:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else COMPUTED for part in node.values)  # type: ignore[misc]


def printed_commands() -> Iterator[tuple[str, str]]:
    """Yield (where, the command with its words) for each command that a text of the package names with an option."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for text in texts_of(ast.parse(path.read_text(encoding="utf-8"))):
            for match in COMMAND.finditer(text):
                printed = re.sub(rf"(?<=[a-z]){COMPUTED}", "", match[0].removesuffix("."))  # a text that goes on after a word
                if " -" in match[2] and f"--{COMPUTED}" not in printed:
                    yield str(path.relative_to(PACKAGE)), printed.replace(COMPUTED, "1")


PRINTED = list(printed_commands())


def make_context(command: Any, words: list[str]) -> None:
    """Parse the options of these words, and what the command requires beside them. Raise for a wrong one."""
    names = {name: option for option in command.params for name in (*option.opts, *option.secondary_opts)}
    chosen: list[str] = []
    for number, word in enumerate(words):
        name = word.partition("=")[0]
        if word.startswith("-"):
            assert name in names, f"{command.name} has no option {name}"
            takes_value = not names[name].is_flag and "=" not in word
            value = words[number + 1] if takes_value and number + 1 < len(words) else "1"
            value = re.sub(r"\b[A-Z]+\b|\.\.\.", "1", value)  # a word that stands for a value
            chosen += [word, value] if takes_value else [word]
    for option in command.params:
        if option.required and not set(option.opts) & set(chosen):
            chosen += ["M"] if option.param_type_name == "argument" else [option.opts[0], "1"]
    command.make_context(command.name, chosen)


def test_messages_with_commands_are_found() -> None:
    assert len(PRINTED) > 30 and len({where for where, _ in PRINTED}) > 12


@pytest.mark.parametrize(("where", "printed"), PRINTED)
def test_a_command_in_a_message_is_one_that_upshift_takes(where: str, printed: str) -> None:
    """Each option exists and takes the value; `upshift launch` says who starts the ranks."""
    words = printed.split()[1:]
    command = ROOT
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    own = words[: words.index("--")] if "--" in words else words
    make_context(command, own)
    ranks_command = words[len(own) + 1 :]
    if ranks_command and ranks_command[0] in ROOT.commands:
        make_context(ROOT.commands[ranks_command[0]], ranks_command[1:])
    if command.name == "launch" and ranks_command:
        launched = [re.sub(r"^[A-Z]+$", "1", word) for word in own]
        done = CliRunner().invoke(app, ["launch", *launched, "--dry-run", "--", "train", "M", "--data", "D"])
        assert done.exit_code == 0, done.exception
