"""Turn prompts into token ids, by the model's own tokenizer and chat template, and tokens back into text.

A prompt is used whole or refused: a chat's tools and the fields of its messages must change what the chat template
writes.

Read prompts from a file, block by block.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from upshift.errors import RequestError
from upshift.inference.resumable_output import check_output, is_empty, is_text, read_lines
from upshift.inference.tokenizer import load_tokenizer
from upshift.models.source import ModelSource

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Messages | Mapping[str, Any]  # a text, the messages of a chat, or {"messages": .., "tools": ..}
CHAT_KEYS = ("messages", "tools")
PROMPT_FORM = 'a text of Unicode characters, or the messages of a chat: [{"role": "user", "content": "..."}]'


class Prompts:
    """The prompts of a model. ``chat``: a plain text is also read as a user's message."""

    def __init__(self, source: ModelSource, *, chat: bool = False) -> None:
        self.tokenizer = load_tokenizer(source)
        self.chat = chat
        self._reference = source.reference
        if chat:
            self._check_template()

    def of(self, prompts: Sequence[Prompt], *, first: int = 0) -> list[list[int]]:
        """Return token ids. Raise RequestError for a prompt that is none, has no tokens, or is not what the chat
        template takes."""
        found = []
        for number, prompt in enumerate(prompts, start=first + 1):
            if not _is_prompt(prompt):
                raise RequestError(f"prompt {number} is {prompt!r:.80}; give {PROMPT_FORM}")
            ids = self._ids(prompt, f"prompt {number}")
            if not ids:
                raise RequestError(f"prompt {number} is empty; write what the text begins with")
            found.append(ids)
        return found

    def text(self, tokens: Sequence[int]) -> str:
        found: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return found

    def _ids(self, prompt: Prompt, name: str) -> list[int]:
        if isinstance(prompt, str) and not self.chat:
            found: list[int] = self.tokenizer(prompt).input_ids
            return found
        chat = {"messages": [{"role": "user", "content": prompt}]} if isinstance(prompt, str) else chat_of(prompt, name)
        self._check_template()
        self._check_used(chat, name)
        ids: list[int] = self._applied(chat, name, tokenize=True)
        return ids

    def _applied(self, chat: Mapping[str, Any], name: str, *, tokenize: bool) -> Any:
        messages, tools = chat["messages"], chat.get("tools")
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, tokenize=tokenize, return_dict=False
            )
        except (TemplateError, TypeError, ValueError) as error:  # its own raise_exception, or what it does to a message
            raise RequestError(
                f"{name} is not what the chat template of {self._reference!r} takes ({error}); give messages that it takes"
            ) from None

    def _check_used(self, chat: Mapping[str, Any], name: str) -> None:
        """Raise RequestError over tools, or a field of messages, without which the template writes the same."""
        fields = sorted({field for message in chat["messages"] for field in message} - {"role", "content"})
        if not fields and not chat.get("tools"):
            return
        written = self._applied(chat, name, tokenize=False)
        without = {field: _without(chat, field) for field in fields}
        if chat.get("tools"):
            without["tools"] = {"messages": chat["messages"]}
        for field, less in without.items():
            try:
                is_used = self._applied(less, name, tokenize=False) != written
            except RequestError:  # the template needs it
                is_used = True
            if not is_used:
                raise RequestError(
                    f"{name} has {field!r}, which the chat template of {self._reference!r} does not use; leave it out"
                )

    def _check_template(self) -> None:
        if not self.tokenizer.chat_template:
            raise RequestError(f"{self._reference!r} has no chat template; give texts instead of messages, without --chat")


def chat_of(prompt: Messages | Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return messages whose contents are texts, and tools. Raise RequestError over parts of a content that are no text."""
    chat: dict[str, Any] = dict(prompt) if isinstance(prompt, Mapping) else {"messages": prompt}
    return {**chat, "messages": [_plain(message, where) for message in chat["messages"]]}


def _plain(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return dict(message)
    for part in content:
        if (
            not isinstance(part, Mapping)
            or part.get("type") != "text"
            or set(part) != {"type", "text"}
            or not is_text(part["text"])
        ):
            kind = part.get("type") if isinstance(part, Mapping) else None
            named = f"of type {kind!r}" if kind not in (None, "text") else f"{part!r:.60}"
            raise RequestError(
                f"{where} is no prompt: its content has a part {named}, and answers are made from text alone; "
                'write parts as {"type": "text", "text": "..."}'
            )
    return {**message, "content": "".join(part["text"] for part in content)}


def _without(chat: Mapping[str, Any], field: str) -> dict[str, Any]:
    messages = [{name: value for name, value in message.items() if name != field} for message in chat["messages"]]
    return {**chat, "messages": messages}


def _is_prompt(prompt: object) -> bool:
    """Return whether the value has the form of a prompt. The chat template itself checks what a message holds."""
    if isinstance(prompt, Mapping):
        return "messages" in prompt and not set(prompt) - {*CHAT_KEYS} and _is_prompt(prompt["messages"])
    if isinstance(prompt, list | tuple):
        return bool(prompt) and all(isinstance(message, Mapping) for message in prompt)
    return is_text(prompt)


def line_of(prompt: Prompt) -> dict[str, Any]:
    """Return a prompt as a line of JSON gives it."""
    if isinstance(prompt, Mapping):
        return dict(prompt)
    return {"prompt" if isinstance(prompt, str) else "messages": prompt}


BLOCK_PROMPTS = 512
LINE_FORM = '{"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}, with "tools" where there are any'


def check_prompts(prompts: Path, option: str) -> None:
    if not prompts.is_file() or prompts.suffix not in (".txt", ".jsonl"):
        raise RequestError(
            f"{option} {prompts} must be a file: .txt with a prompt a line, or .jsonl with {LINE_FORM} on every line"
        )
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
        raise RequestError(f"{where} is no prompt; write {LINE_FORM}")
    _check_keys(record, where)
    if "prompt" in record:
        if not is_text(record["prompt"]):
            raise RequestError(f"{where} is no prompt; write {LINE_FORM}, of Unicode characters")
        return str(record["prompt"])
    messages = record["messages"]
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise RequestError(f"{where} is no prompt; write {LINE_FORM}, of Unicode characters")
    chat_of(messages, where)
    return record if record.get("tools") else messages


def _check_keys(record: dict[str, Any], where: str) -> None:
    taken = CHAT_KEYS if "messages" in record else ("prompt",)
    unknown = next((key for key in record if key not in taken), None)
    if unknown is not None:
        raise RequestError(f"{where} has a key {unknown!r}, which is not used; leave it out, and write {LINE_FORM}")
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
