"""Write the page of docs that lists every command with its options (docs/commands.md)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from upshift.cli.usage.help_page import entry_of, panels_of, reads_file, shown_parameters, usage_line

BEGINNING = """# Commands

This page lists every command and every option. `python docs/write_tables.py` writes it from the source.

Add `--help` to a command to see its common options, and `--help-all` to see all of them. `-h` is short for `--help`. The option
`--install-completion` of `upshift` itself teaches your shell to complete commands, options and their values.

Every command ends with one of these codes:

| code | meaning |
| --- | --- |
| 0 | done |
| 1 | the job failed, or a check found an error |
| 2 | the request was wrong; the message says what to give instead |
| 3 | nothing fits |
| 130 | interrupted; the message says how to continue |
"""


def reference_page(root: Any) -> str:
    """Return the page as Markdown. ``root``: the group ``upshift``."""
    return BEGINNING + "".join(_sections(root, "upshift"))


def _sections(group: Any, path: str) -> Iterator[str]:
    for name, command in group.commands.items():
        words = f"{path} {name}"
        if hasattr(command, "commands"):
            yield from _sections(command, words)
        elif not command.hidden:
            yield _section(command, words)


def _section(command: Any, path: str) -> str:
    """Return a heading, the help of the command, its examples, and a table of its options."""
    paragraphs = [" ".join(paragraph.split()) for paragraph in command.help.split("\n\n")]
    lines = ["", f"## {path}", "", "\n\n".join(paragraphs), "", "```text", usage_line(command, path), "```", ""]
    lines += ["```", *(command.epilog or "").splitlines(), "```", "", "| option | meaning |", "| --- | --- |"]
    for panel, parameters in panels_of(shown_parameters(command)).items():
        lines.append(f"| **{panel}** | |")
        for parameter in parameters:
            entry = entry_of(parameter, in_file=reads_file(command))
            text = entry.text.replace("\N{NO-BREAK SPACE}", " ").replace("|", "\\|").replace("<", "&lt;")
            name = entry.name.replace("|", "\\|")
            lines.append(f"| `{name}` | {text} |")
    return "\n".join([*lines, ""])
