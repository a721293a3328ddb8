"""Prompts from a file, and an answer a line to another: block by block, so that a run can go on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from upshift.errors import RequestError
from upshift.inference.generation.prompts import Prompt
from upshift.inference.lines import read_lines
from upshift.inference.unfinished import Unfinished, check_output

BLOCK_PROMPTS = 512
FORM = '{"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}'


def check_prompts(prompts: Path, option: str) -> None:
    if not prompts.is_file() or prompts.suffix not in (".txt", ".jsonl"):
        raise RequestError(f"{option} {prompts} must be a file: .txt with a prompt a line, or .jsonl with {FORM} on every line")
    if not prompts.stat().st_size:
        raise RequestError(f"{option} {prompts} is empty; write a prompt a line")


def check_files(prompts: Path, output: Path, *, overwrite: bool) -> None:
    check_prompts(prompts, "--prompts")
    check_output(output, (".jsonl",), overwrite=overwrite)


def read_prompts(path: Path) -> Iterator[Prompt]:
    """Raises RequestError with the number of the line that is no prompt."""
    return read_lines(path, _prompt)


class Answers:
    """Lines of an output, on disk block by block."""

    def __init__(self, output: Path, total: int, made_of: str) -> None:
        self._file = Unfinished(output, total, made_of)
        self.done = self._file.done()
        kept = self._file.partial.read_bytes().splitlines(keepends=True)[: self.done] if self.done else []
        self._file.partial.write_bytes(b"".join(kept))  # without lines of a block that was not noted

    def add(self, answers: list[dict[str, Any]]) -> None:
        with self._file.partial.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers)
        self.done += len(answers)
        self._file.note(self.done)

    def finish(self) -> None:
        self._file.finish(self._file.partial)


def _prompt(line: str, where: str) -> Prompt:
    try:
        said = json.loads(line)
        found: Prompt = said["prompt"] if "prompt" in said else said["messages"]
    except (ValueError, KeyError, TypeError):
        raise RequestError(f"{where} is no prompt; write {FORM}") from None
    whole = isinstance(found, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in found
    )
    if not (isinstance(found, str) or (whole and found)):
        raise RequestError(f"{where} is no prompt; write {FORM}")
    return found
