"""Prompts from a file, block by block."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from upshift.errors import RequestError
from upshift.inference.generation.prompts import Prompt
from upshift.inference.lines import is_empty, is_text, read_lines
from upshift.inference.unfinished import check_output

BLOCK_PROMPTS = 512
FORM = '{"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}'


def check_prompts(prompts: Path, option: str) -> None:
    if not prompts.is_file() or prompts.suffix not in (".txt", ".jsonl"):
        raise RequestError(f"{option} {prompts} must be a file: .txt with a prompt a line, or .jsonl with {FORM} on every line")
    if is_empty(prompts):
        raise RequestError(f"{option} {prompts} is empty; write a prompt a line")


def check_files(prompts: Path, output: Path, *, overwrite: bool) -> None:
    check_prompts(prompts, "--prompts")
    check_output(output, (".jsonl",), prompts, overwrite=overwrite)


def read_prompts(path: Path) -> Iterator[Prompt]:
    """Raises RequestError with the number of the line that is no prompt."""
    return read_lines(path, _prompt)


def _prompt(line: str, where: str) -> Prompt:
    try:
        said = json.loads(line)
        found: Prompt = said["prompt"] if "prompt" in said else said["messages"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise RequestError(f"{where} is no prompt; write {FORM}") from None
    whole = isinstance(found, list) and all(
        isinstance(message, dict) and is_text(message.get("role")) and is_text(message.get("content")) for message in found
    )
    if not (is_text(found) or (whole and found)):
        raise RequestError(f"{where} is no prompt; write {FORM}, of Unicode characters")
    return found
