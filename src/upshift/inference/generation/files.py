"""Read prompts from a file, block by block."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from upshift.errors import RequestError
from upshift.inference.generation.prompts import CHAT_KEYS, Prompt, chat_of
from upshift.inference.lines import is_empty, is_text, read_lines
from upshift.inference.unfinished import check_output

BLOCK_PROMPTS = 512
FORM = '{"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}, with "tools" where there are any'


def check_prompts(prompts: Path, option: str) -> None:
    if not prompts.is_file() or prompts.suffix not in (".txt", ".jsonl"):
        raise RequestError(f"{option} {prompts} must be a file: .txt with a prompt a line, or .jsonl with {FORM} on every line")
    if is_empty(prompts):
        raise RequestError(f"{option} {prompts} is empty; write a prompt a line")


def check_files(prompts: Path, output: Path, *, overwrite: bool) -> None:
    check_prompts(prompts, "--prompts")
    check_output(output, (".jsonl",), prompts, overwrite=overwrite)


def read_prompts(path: Path) -> Iterator[Prompt]:
    """Yield the prompts of a file. Raise RequestError with the number of the line that is no prompt."""
    return read_lines(path, _prompt)


def _prompt(line: str, where: str) -> Prompt:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or ("prompt" in record) == ("messages" in record):
        raise RequestError(f"{where} is no prompt; write {FORM}")
    _check_keys(record, where)
    if "prompt" in record:
        if not is_text(record["prompt"]):
            raise RequestError(f"{where} is no prompt; write {FORM}, of Unicode characters")
        return str(record["prompt"])
    messages = record["messages"]
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise RequestError(f"{where} is no prompt; write {FORM}, of Unicode characters")
    chat_of(messages, where)
    return record if record.get("tools") else messages


def _check_keys(record: dict[str, Any], where: str) -> None:
    taken = CHAT_KEYS if "messages" in record else ("prompt",)
    unknown = next((key for key in record if key not in taken), None)
    if unknown is not None:
        raise RequestError(f"{where} has a key {unknown!r}, which is not used; leave it out, and write {FORM}")
    tools = record.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise RequestError(
            f"{where} has tools that are no list of JSON objects; write them as transformers' chat templates take them"
        )


def _is_message(message: Any) -> bool:
    """Return whether a message has a role and a text, parts, or a call of tools without a text."""
    if not isinstance(message, dict) or not is_text(message.get("role")):
        return False
    content = message.get("content")
    return is_text(content) or isinstance(content, list) or (content is None and bool(message.get("tool_calls")))
