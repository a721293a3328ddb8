"""A message that tells the reader to type an option names one that there is, where the reader can type it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from upshift.cli.main import app

SOURCE = Path(__file__).parents[2] / "src" / "upshift"
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
ERRORS = {"RequestError", "NothingFits", "JobFailed", "MissingExtra"}
REACHED_BY = {  # folder: the commands that call what is in it; each has the options that its messages name
    "training/data": ("train", "tune", "plan", "data to-tfrecord"),
}
OTHERS = {"--nproc-per-node", "--gpus-per-task"}  # torchrun's and srun's
# What a command does not reach: --objective is of those that train, and the one message without it names upshift train. Plans
# hold nothing out.
NOT_REACHED = {"data to-tfrecord": {"--objective"}, "plan": {"--eval-size"}}


def commands(command: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, inside in getattr(command, "commands", {}).items():
        yield from commands(inside, f"{path} {name}".strip())
    if not getattr(command, "commands", None):
        yield path, command


COMMANDS = dict(commands(typer.main.get_command(app)))
OPTIONS = {
    path: {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {"--help", "--help-all"}
    for path, command in COMMANDS.items()
}


@cache
def messages(path: Path) -> list[tuple[int, str]]:
    """The literal text of each error that a file raises."""
    return list(read_messages(path))


def read_messages(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS:
            parts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            yield node.lineno, " ".join(parts)


def files_of(folder: str) -> list[Path]:
    return sorted((SOURCE / folder).rglob("*.py"))


def test_every_option_that_a_message_names_exists() -> None:
    everywhere = set().union(*OPTIONS.values())
    named = [
        (f"{path.relative_to(SOURCE)}:{line}", option)
        for path in files_of(".")
        for line, text in messages(path)
        for option in OPTION.findall(text)
    ]
    assert len(named) > 100
    assert [(place, option) for place, option in named if option not in everywhere | OTHERS] == []


@pytest.mark.parametrize("folder", REACHED_BY)
def test_each_command_that_reaches_a_message_has_its_options(folder: str) -> None:
    named = {option for path in files_of(folder) for _, text in messages(path) for option in OPTION.findall(text)}
    assert named
    missing = {path: named - OPTIONS[path] - NOT_REACHED.get(path, set()) for path in REACHED_BY[folder]}
    assert {path: options for path, options in missing.items() if options} == {}


def test_a_command_names_its_own_options_or_the_command() -> None:
    """In a command's own file; an option of another command stands behind its name."""
    wrong = []
    for path in files_of("cli"):
        own = [name for name, command in COMMANDS.items() if Path(command.callback.__code__.co_filename) == path]
        if not own:
            continue
        options = set().union(*(OPTIONS[name] for name in own))
        for line, text in messages(path):
            others = [name for name in COMMANDS if f"upshift {name}" in text or f"{name} " in text]
            allowed = options.union(*(OPTIONS[name] for name in others))
            wrong += [(f"{path.name}:{line}", option) for option in OPTION.findall(text) if option not in allowed]
    assert wrong == []
