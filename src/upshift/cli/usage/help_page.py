"""Write the help page of a command: its first sentence, examples, and its options in groups, in alphabetical order.

``--help`` leaves out the groups in ``DETAILED``. ``--help-all`` shows every group. No word is cut, whatever the width.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import typer

NAME_WIDTH = 26  # columns of the names of options; a longer name stands on a line of its own
INDENT = "  "
MIN_WIDTH = 20  # columns of a text, in the narrowest terminal
UNBROKEN_WIDTH = 24  # columns of a note that stays on one line
NO_BREAK = "\N{NO-BREAK SPACE}"
CONFIG = "config"  # the parameter of a command that reads its options from a file, too


class Panel(StrEnum):
    """The groups of options and of commands, in the order of a page."""

    MODEL = "Model and data"
    TASK = "Task"
    TRAINING = "Training"
    ADAPTER = "Adapter"
    SEARCH = "Search"
    SUBJECT = "What to look at"
    LAUNCHER = "Launcher"
    PLAN = "Plan"
    QUESTIONS = "Questions about a plan"
    TEXT = "Prompts and answers"
    ENGINES = "Engines and quality"
    LIMITS = "Limits"
    SERVER = "Server"
    MEASUREMENT = "Measurement"
    OUTPUT = "Output"
    ROWS = "Rows of the data"
    OPTIMIZATION = "Optimization"
    CHECKPOINTS = "Checkpoints and evaluation"
    PROCESSES = "Several processes"
    JOB = "Job file"
    SPECIAL = "Special cases"
    ARGUMENTS = "Arguments"
    OPTIONS = "Options"


# --help-all alone shows them.
DETAILED = (Panel.ADAPTER, Panel.ROWS, Panel.OPTIMIZATION, Panel.CHECKPOINTS, Panel.PROCESSES, Panel.JOB, Panel.SPECIAL)


class Entry(NamedTuple):
    """One line of a page: the name of an option with its value, or of a command, and its text."""

    name: str
    text: str


def is_option(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "option")


def long_name(parameter: Any) -> str:
    """Return the name of an option with two dashes, or of an argument as help pages show it."""
    if not is_option(parameter):
        return str(parameter.metavar or parameter.name.upper())
    return str(next((name for name in parameter.opts if name.startswith("--")), parameter.opts[0]))


def entry_of(parameter: Any, *, in_file: bool = False) -> Entry:
    """Return the entry of an option or an argument: its names, its help, and its default.

    ``in_file``: the user may also give it in a file of options."""
    name = long_name(parameter)
    if is_option(parameter):
        short_names = [other for other in parameter.opts if not other.startswith("--")]
        value = "" if parameter.is_flag else f" {parameter.metavar}"
        name = ", ".join([*short_names, name]) + value
    notes = []
    default = default_text(parameter)
    if parameter.required:
        notes.append("required, here or in the file" if in_file else "required")
    elif default:
        notes.append(f"default: {default}")
    if is_option(parameter) and parameter.multiple:
        notes.append("repeatable")
    text = parameter.help or ""
    return Entry(name, f"{text} {_unbroken('[' + '; '.join(notes) + ']')}" if notes else text)


def _unbroken(note: str) -> str:
    """Return a short note with spaces at which no line breaks."""
    return note.replace(" ", NO_BREAK) if len(note) <= UNBROKEN_WIDTH else note


def default_text(parameter: Any) -> str:
    """Return the default of an option as a page shows it, or an empty text if there is none."""
    if isinstance(parameter.show_default, str):
        return parameter.show_default
    default = parameter.default
    if default is None or default is False or default is True or default == "":
        return ""
    return f"{default:g}" if isinstance(default, float) else str(default)


def panels_of(parameters: Iterable[Any]) -> dict[str, list[Any]]:
    """Return the parameters of each panel. Arguments come before options, which are in alphabetical order."""
    panels: dict[str, list[Any]] = {}
    for parameter in parameters:
        fallback = Panel.OPTIONS if is_option(parameter) else Panel.ARGUMENTS
        panel = str(getattr(parameter, "rich_help_panel", None) or fallback)
        panels.setdefault(panel, []).append(parameter)
    order = [panel.value for panel in Panel]
    return {
        panel: sorted(panels[panel], key=lambda parameter: (is_option(parameter), long_name(parameter)))
        for panel in sorted(panels, key=order.index)
    }


def reads_file(command: Any) -> bool:
    return any(parameter.name == CONFIG for parameter in command.params)


def shown_parameters(command: Any) -> list[Any]:
    return [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]


def usage_line(command: Any, path: str) -> str:
    """Return the command with what it needs: ``upshift train MODEL --data PATH [OPTIONS]``."""
    parameters = shown_parameters(command)
    arguments = [
        long_name(parameter) if parameter.required else f"[{long_name(parameter).strip('[]')}]"
        for parameter in parameters if not is_option(parameter)
    ]  # fmt: skip
    options = [
        f"{long_name(parameter)} {parameter.metavar}" for parameter in parameters if is_option(parameter) and parameter.required
    ]
    if hasattr(command, "commands"):
        return " ".join([path, "COMMAND [OPTIONS]"])
    dashed = [argument for argument in arguments if argument.strip("[]").startswith("--")]  # a command stands behind the options
    plain = [argument for argument in arguments if argument not in dashed]
    return " ".join([path, *plain, *options, "[OPTIONS]", *dashed])


def help_page(command: Any, path: str, *, width: int, detailed: bool = False, styled: bool = False) -> str:
    """Return the page of ``--help``, or with ``detailed`` that of ``--help-all``.

    Args:
        command: the command or the group.
        path: the words that start it, such as ``upshift train``.
        width: columns of the terminal.
        styled: color the headings and the names.
    """
    lines = _beginning(command, path, width=width, styled=styled)
    if hasattr(command, "commands"):
        for panel, entries in _commands_by_panel(command).items():
            lines += _section(panel, entries, width=width, styled=styled)
    panels = panels_of(shown_parameters(command))
    left_out = {} if detailed else {panel: panels.pop(panel) for panel in map(str, DETAILED) if panel in panels}
    for panel, parameters in panels.items():
        entries = [entry_of(parameter, in_file=reads_file(command)) for parameter in parameters]
        lines += _section(panel, entries, width=width, styled=styled)
    lines += _section("Help", _help_entries(left_out), width=width, styled=styled)
    return "\n".join(lines) + "\n"


def first_page(command: Any, path: str, *, width: int, styled: bool = False) -> str:
    """Return the page for a command that was started without any argument: what it does, and examples."""
    return "\n".join(_beginning(command, path, width=width, styled=styled)) + "\n"


def first_sentence(text: str) -> str:
    """Return the first sentence of a command's help, which the list of commands shows."""
    sentence, separator, _ = " ".join(text.split()).partition(". ")
    return sentence.rstrip(".") + ("." if separator or sentence.endswith(".") else "")


def _beginning(command: Any, path: str, *, width: int, styled: bool) -> list[str]:
    lines = []
    for paragraph in (command.help or "").split("\n\n"):
        lines += [*_wrap(" ".join(paragraph.split()), width), ""]
    lines.append(_heading("Usage", styled=styled) + " " + usage_line(command, path))
    examples = (command.epilog or "").splitlines()
    if examples:
        lines += ["", _heading("Examples", styled=styled), *(INDENT + example for example in examples)]
    return lines


def _help_entries(left_out: Mapping[str, Sequence[Any]]) -> list[Entry]:
    entries = [Entry("-h, --help", "Show this page.")]
    if left_out:
        count = sum(map(len, left_out.values()))
        entries.append(Entry("--help-all", f"Show {count} more options: {', '.join(left_out)}."))
    return entries


def _commands_by_panel(group: Any) -> dict[str, list[Entry]]:
    panels: dict[str, list[Entry]] = {}
    for name, command in group.commands.items():
        if not command.hidden:
            panel = str(getattr(command, "rich_help_panel", None) or "Commands")
            panels.setdefault(panel, []).append(Entry(name, first_sentence(command.help or "")))
    return panels


def _section(title: str, entries: Sequence[Entry], *, width: int, styled: bool) -> list[str]:
    """Return the lines of a group: a heading, then two columns."""
    lines = ["", _heading(title, styled=styled)]
    column = min(NAME_WIDTH, max(len(entry.name) for entry in entries)) + 2
    for entry in entries:
        texts = _wrap(entry.text, width - column - len(INDENT)) or [""]
        name = typer.style(entry.name, fg="cyan") if styled else entry.name
        if len(entry.name) > column - 2:
            lines.append(INDENT + name)
        else:
            lines.append((INDENT + name + " " * (column - len(entry.name)) + texts.pop(0)).rstrip())
        lines += [" " * (column + len(INDENT)) + text for text in texts]
    return lines


def _heading(title: str, *, styled: bool) -> str:
    return typer.style(f"{title}:", bold=True) if styled else f"{title}:"


def _wrap(text: str, width: int) -> list[str]:
    lines = textwrap.wrap(text, max(width, MIN_WIDTH), break_long_words=False, break_on_hyphens=False)
    return [line.replace(NO_BREAK, " ") for line in lines]
