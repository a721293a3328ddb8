"""The help page of every command: nothing is cut at 80 columns, and every option has a text, a value and a place."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
from test_wrong_options import COMMANDS, OPTIONS, ROOT, annotation_of, choices_of, named, number_type
from typer.testing import CliRunner

from upshift.cli.main import app
from upshift.cli.usage.command_reference import reference_page
from upshift.cli.usage.help_page import DETAILED, Panel, help_page, is_option, long_name

WIDTH = 80
TWO_SCREENS = 100  # lines
UNITS = {  # by the value of an option: what its help says
    "SECONDS": "seconds", "MS": "milliseconds", "HOURS": "hours", "GIB": "GiB", "MB": "megabytes", "WATTS": "watts",
}  # fmt: skip
GROUPS: dict[tuple[str, ...], Any] = {(name,): inner for name, inner in ROOT.commands.items() if hasattr(inner, "commands")}
PAGES = {(): ROOT} | GROUPS | COMMANDS


def page(path: tuple[str, ...], *, detailed: bool = True, width: int = WIDTH - 2) -> str:
    return help_page(PAGES[path], " ".join(("upshift", *path)), width=width, detailed=detailed)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: " ".join(path) or "upshift")
def test_nothing_is_cut(path: tuple[str, ...]) -> None:
    text = page(path)
    assert max(map(len, text.splitlines())) <= WIDTH, text
    assert "…" not in text and "\N{NO-BREAK SPACE}" not in text
    words = text.split()
    for parameter in PAGES[path].params:
        assert set((parameter.help or "").split()) <= set(words), parameter.name
        assert long_name(parameter).split()[0] in " ".join(words)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: " ".join(path) or "upshift")
def test_the_common_options_fit_two_screens(path: tuple[str, ...]) -> None:
    assert len(page(path, detailed=False).splitlines()) <= TWO_SCREENS
    assert not any(f"\n{panel}:" in page(path, detailed=False) for panel in DETAILED)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: " ".join(path) or "upshift")
@pytest.mark.parametrize("option", ["-h", "--help", "--help-all"])
def test_every_command_has_its_pages(path: tuple[str, ...], option: str) -> None:
    found = CliRunner().invoke(app, [*path, option], env={"COLUMNS": str(WIDTH)})
    assert found.exit_code == 0, found.output
    assert "Usage: " in found.output and f"{' '.join(path)} " in found.output.partition("\n\nUsage: ")[2]
    if option == "--help-all":
        names = [long_name(parameter) for parameter in PAGES[path].params if is_option(parameter)]
        assert all(f"{name}" in found.output for name in names)


@pytest.mark.parametrize(("path", "option"), OPTIONS, ids=named(OPTIONS))
def test_every_option_is_explained(path: tuple[str, ...], option: Any) -> None:
    text = option.help or ""
    assert text[:1].isupper() or text.startswith("muP"), text
    assert text.endswith("."), text
    assert len(text) > 15
    assert option.rich_help_panel in {panel.value for panel in Panel}
    assert option.is_flag or re.fullmatch(r"[A-Zx8a-z|4,=/.]+", option.metavar), option.metavar
    if option.metavar in UNITS:
        assert UNITS[option.metavar] in text
    if number_type(annotation_of(COMMANDS[path], option)) is not None:
        assert option.required or option.default is not None or isinstance(option.show_default, str), "no default"


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_what_a_file_may_give_is_not_required_on_the_command_line(path: tuple[str, ...], tmp_path: Path) -> None:
    required = [parameter for parameter in COMMANDS[path].params if parameter.required]
    file = tmp_path / "options.yaml"
    file.write_text("".join(f"{long_name(parameter).strip('-').lower()}: a\n" for parameter in required))
    takes_file = "--config" in page(path)
    if takes_file and required:
        with COMMANDS[path].make_context("upshift", ["--config", str(file)]) as context:
            assert all(context.params[parameter.name] == "a" for parameter in required)
    note = "[required, here or in the file]" if takes_file else "[required]"
    text = " ".join(page(path).split())
    assert (text.count(note), text.count("[required")) == (len(required), len(required))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_options_are_in_alphabetical_order(path: tuple[str, ...]) -> None:
    sections = re.split(r"\n\n(?=[A-Z][^\n]*:\n)", page(path))
    ordered = 0
    for section in sections[1:]:
        names = re.findall(r"^  (?:-\w, )?(--[\w-]+)", section, flags=re.MULTILINE)
        if section.startswith("Help:"):
            continue
        assert names == sorted(names), section
        ordered += len(names)
    assert ordered == len([option for option in COMMANDS[path].params if is_option(option)])


def test_the_same_option_says_the_same() -> None:
    """Options of the same name are about the same thing: what differs is what a command does with it."""
    texts: dict[str, set[tuple[str, str]]] = {}
    for path, option in OPTIONS:
        kind = number_type(annotation_of(COMMANDS[path], option))
        texts.setdefault(long_name(option), set()).add((str(kind), option.metavar or ""))
    different = {name: kinds for name, kinds in texts.items() if len(kinds) > 1}
    assert different == {
        "--set": {("None", "FIELD=VALUE"), ("None", "NAME=VALUE")},  # of a plan, and of generation
        "--write": {("None", ""), ("None", "PROGRAM")},  # of the numbers in the documents, and of a plan
        "--output": {("None", "PATH"), ("None", "FOLDER")},
        "--objective": {("None", "NAME"), ("None", "NAME,NAME")},  # of a training, and of a search
    }


def examples() -> list[tuple[tuple[str, ...], str]]:
    return [(path, line) for path, command in PAGES.items() for line in (command.epilog or "").splitlines()]


def test_every_command_has_an_example() -> None:
    assert {path for path, _ in examples()} == set(PAGES)


@pytest.mark.parametrize(("path", "line"), examples(), ids=lambda value: value if isinstance(value, str) else "")
def test_an_example_is_a_command(path: tuple[str, ...], line: str) -> None:
    words = shlex.split(line, comments=True)
    assert tuple(words[: len(path) + 1]) == ("upshift", *path)
    command = ROOT
    rest = words[1:]
    while hasattr(command, "commands"):
        command = command.commands[rest.pop(0)]
    with command.make_context(" ".join(words[:2]), rest) as context:
        assert context.params
    if "--" in words and path in (("profile",), ("launch",)):
        inner = words[words.index("--") + 1 :]
        COMMANDS[inner[0],].make_context("train", inner[1:])


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_without_arguments_it_shows_examples_first(path: tuple[str, ...]) -> None:
    if not any(parameter.required for parameter in COMMANDS[path].params):
        assert path[0] in ("doctor", "demo", "launch", "generate", "bench")
        return
    environment = os.environ | {"COLUMNS": str(WIDTH)}
    if path != ("train",):  # one process is enough to see what main() prints
        result = CliRunner().invoke(app, list(path))
        assert result.exit_code == 1 and "Examples:" in getattr(result.exception, "page", "")
        return
    command = [sys.executable, "-m", "upshift", *path]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and ended.stdout == ""
    assert "Examples:\n  upshift train " in ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("upshift: ")
    assert "needs MODEL and --data PATH" in ended.stderr.splitlines()[-1]


def test_the_first_page_groups_the_commands() -> None:
    found = CliRunner().invoke(app, [])
    assert found.exit_code == 0
    headings = re.findall(r"^([A-Z][\w ]+):$", found.output, flags=re.MULTILINE)
    assert headings == ["Examples", "Train", "Run a model", "Look", "Write a model again", "Machine", "Options", "Help"]
    assert found.output.count("\n  upshift ") == 3
    places = [found.output.index(f"\n  {name} ") for name in ("plan", "generate", "inspect", "convert", "doctor")]
    assert all(one < other for one, other in pairwise(places))


def test_a_shell_completes_options_and_choices() -> None:
    (trained,) = [option for path, option in OPTIONS if path == ("train",) and long_name(option) == "--backend"]
    assert choices_of(trained) == ["torch", "xla"]
    environment = os.environ | {"_UPSHIFT_COMPLETE": "complete_bash", "COMP_WORDS": "upshift train --lora-ra", "COMP_CWORD": "2"}
    command = [sys.executable, "-c", "import sys; sys.argv = ['upshift']; from upshift.cli.main import main; main()"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.stdout.split() == ["--lora-rank"], ended.stderr
    assert isinstance(ROOT, typer.core.TyperGroup)


def test_the_page_of_docs_is_that_of_the_commands() -> None:
    written = (Path(__file__).parents[2] / "docs" / "commands.md").read_text(encoding="utf-8")
    assert written == reference_page(ROOT), "python docs/write_tables.py writes it"
    assert all(f"\n## {' '.join(('upshift', *path))}\n" in written for path in COMMANDS)
    assert all(f"`{long_name(option)}" in written or f", {long_name(option)}" in written for _, option in OPTIONS)
