"""Turn prompts into token ids by the model's tokenizer and chat template, tokens back into text, and read prompts from
files.

A prompt is used completely or rejected: tools of a chat and fields of its messages must change the text that the chat
template writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from upshift.errors import RequestError
from upshift.inference.generation.media import MediaPrompts, has_media
from upshift.inference.resumable_output import check_output, is_empty, is_text, parse_object, read_lines
from upshift.inference.tokenizer import load_tokenizer
from upshift.models.source import ModelSource
from upshift.text import describe_other_part, fill_null_contents

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Messages | Mapping[str, Any]  # a text, the messages of a chat, or {"messages": .., "tools": ..}
CHAT_KEYS = ("messages", "tools")
MEDIA_KEYS = ("prompt", "messages", "images")
PROMPT_FORM = 'a text of Unicode characters, or the messages of a chat: [{"role": "user", "content": "..."}]'


class Prompts:
    """The tokenizer and chat template of a model. With ``chat``, a text is the message of a user."""

    def __init__(self, source: ModelSource, *, chat: bool = False) -> None:
        self.tokenizer = load_tokenizer(source)
        self.media = MediaPrompts(source)
        self.chat = chat
        self._reference = source.reference
        self._vocabulary = prompt_vocabulary(source.hf_config)
        if chat:
            self._check_template()

    def use_template(self, template: str) -> bool:
        """Write chats by this template. Return whether it takes the place of one that the tokenizer or the processor has."""
        has_own = bool(self.tokenizer.chat_template)
        self.tokenizer.chat_template = template
        return self.media.use_template(template) or has_own

    def tokenize(self, prompts: Sequence[Prompt], *, first: int = 0) -> list[list[int]]:
        """Return the token ids of prompts. ``first`` is the index of the first prompt among all, for messages.

        Raise RequestError for a prompt that is of another type, has no tokens, has tokens that the model does not have, or does
        not suit the chat template."""
        prompt_ids = []
        for number, prompt in enumerate(prompts, start=first + 1):
            if not _is_prompt(prompt):
                raise RequestError(f"prompt {number} is {prompt!r:.80}; give {PROMPT_FORM}")
            ids = self._tokenize_one(prompt, f"prompt {number}")
            if not ids:
                raise RequestError(f"prompt {number} is empty; write what the text begins with")
            check_prompt_ids(ids, f"prompt {number}", self._vocabulary, self._reference)
            prompt_ids.append(ids)
        return prompt_ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def _tokenize_one(self, prompt: Prompt, name: str) -> list[int]:
        if has_media(prompt):
            return self.media.tokenize(prompt, name, chat=self.chat)
        if isinstance(prompt, str) and not self.chat:
            text_ids: list[int] = self.tokenizer(prompt).input_ids
            return text_ids
        chat = {"messages": [{"role": "user", "content": prompt}]} if isinstance(prompt, str) else normalize_chat(prompt, name)
        self._check_template()
        chat["messages"] = fill_null_contents(chat["messages"], partial(self._write_or_none, chat))
        self._check_used(chat, name)
        ids: list[int] = self._apply_template(chat, name, tokenize=True)
        return ids

    def _apply_template(self, chat: Mapping[str, Any], name: str, *, tokenize: bool) -> Any:
        try:
            return self.tokenizer.apply_chat_template(
                chat["messages"], tools=chat.get("tools"), add_generation_prompt=True, tokenize=tokenize, return_dict=False
            )
        except (TemplateError, TypeError, ValueError) as error:  # raised by the template
            raise RequestError(
                f"{name} is not what the chat template of {self._reference!r} takes ({error}); give messages that it takes"
            ) from None

    def _write_or_none(self, chat: Mapping[str, Any], messages: Any) -> str | None:
        """Return the text of a chat with other messages, or None if the template rejects them."""
        try:
            return str(self._apply_template({**chat, "messages": messages}, "", tokenize=False))
        except RequestError:
            return None

    def _check_used(self, chat: Mapping[str, Any], name: str) -> None:
        """Raise RequestError if the template writes the same text without the tools, or without a field of the messages."""
        fields = sorted({field for message in chat["messages"] for field in message} - {"role", "content"})
        if not fields and not chat.get("tools"):
            return
        full_text = self._apply_template(chat, name, tokenize=False)
        reduced_chats = {field: _remove_field(chat, field) for field in fields}
        if chat.get("tools"):
            reduced_chats["tools"] = {"messages": chat["messages"]}
        for field, reduced_chat in reduced_chats.items():
            try:
                is_used = self._apply_template(reduced_chat, name, tokenize=False) != full_text
            except RequestError:  # the template needs it
                is_used = True
            if not is_used:
                raise RequestError(
                    f"{name} has {field!r}, which the chat template of {self._reference!r} does not use; leave it out"
                )

    def _check_template(self) -> None:
        if not self.tokenizer.chat_template:
            raise RequestError(f"{self._reference!r} has no chat template; give texts instead of messages, without --chat")


def prompt_vocabulary(config: Any) -> int:
    """Return the number that all token ids of a prompt are below: of the encoder if the model has one, else of the decoder."""
    encoder_config = getattr(config, "encoder", None) if config.is_encoder_decoder else None
    text_config = encoder_config or config.get_text_config(decoder=True)
    return int(text_config.get_text_config().vocab_size)


def check_prompt_ids(ids: Sequence[int], name: str, vocabulary: int, reference: str) -> None:
    """Raise RequestError for a token id that the model does not have. ``name`` names the prompt in the message."""
    if not 0 <= min(ids, default=0) <= max(ids, default=0) < vocabulary:
        unknown = next(token for token in ids if not 0 <= token < vocabulary)
        raise RequestError(
            f"{name} has the token id {unknown}, and {reference!r} has 0 to {vocabulary - 1:,}: the tokenizer is of another "
            "model; save the tokenizer with which the model was trained beside it"
        )


def normalize_chat(prompt: Messages | Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a chat with "messages", whose contents are texts, and perhaps "tools".

    Raise RequestError for a part of a content that is not text. ``name`` names the prompt in the message."""
    chat: dict[str, Any] = dict(prompt) if isinstance(prompt, Mapping) else {"messages": prompt}
    return {**chat, "messages": [_join_content(message, name) for message in chat["messages"]]}


def _join_content(message: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the message with its content as one text."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return dict(message)
    description = describe_other_part(content)
    if description is not None:
        raise RequestError(
            f"{name} is no prompt: its content has a part {description}, and answers are made from text alone; "
            'write parts as {"type": "text", "text": "..."}'
        )
    return {**message, "content": "".join(item["text"] for item in content)}


def _remove_field(chat: Mapping[str, Any], field: str) -> dict[str, Any]:
    messages = [{name: value for name, value in message.items() if name != field} for message in chat["messages"]]
    return {**chat, "messages": messages}


def _is_prompt(prompt: object) -> bool:
    """Return whether the value has the form of a prompt. The chat template checks the content of messages."""
    if isinstance(prompt, Mapping) and has_media(prompt):
        return not set(prompt) - {*MEDIA_KEYS}
    if isinstance(prompt, Mapping):
        return "messages" in prompt and not set(prompt) - {*CHAT_KEYS} and _is_prompt(prompt["messages"])
    if isinstance(prompt, list | tuple):
        return bool(prompt) and all(isinstance(message, Mapping) for message in prompt)
    return is_text(prompt)


def prompt_record(prompt: Prompt) -> dict[str, Any]:
    """Return the prompt as a JSON object, in the form that prompt files have."""
    if isinstance(prompt, Mapping):
        return dict(prompt)
    return {"prompt" if isinstance(prompt, str) else "messages": prompt}


BLOCK_PROMPTS = 512
LINE_FORM = '{"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}, with "tools" where there are any'


def check_prompts(prompts: Path, option: str) -> None:
    """Raise RequestError if the file does not exist, is empty, or has another suffix."""
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
    """Yield the prompts of a file. Raise RequestError with the number of a line that is no prompt."""
    return read_lines(path, _parse_line)


def _parse_line(line: str, name: str) -> Prompt:
    record = parse_object(line)
    if record is None or ("prompt" in record) == ("messages" in record):
        raise RequestError(f"{name} is no prompt; write {LINE_FORM}")
    if has_media(record):
        _check_keys(record, name, MEDIA_KEYS)
        return record
    _check_keys(record, name, CHAT_KEYS if "messages" in record else ("prompt",))
    if "prompt" in record:
        if not is_text(record["prompt"]):
            raise RequestError(f"{name} is no prompt; write {LINE_FORM}, of Unicode characters")
        return str(record["prompt"])
    messages = record["messages"]
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise RequestError(f"{name} is no prompt; write {LINE_FORM}, of Unicode characters")
    normalize_chat(messages, name)
    return record if record.get("tools") else messages


def _check_keys(record: dict[str, Any], name: str, used_keys: Sequence[str]) -> None:
    """Raise RequestError for an unknown key, or for tools of another type."""
    unknown = next((key for key in record if key not in used_keys), None)
    if unknown is not None:
        raise RequestError(f"{name} has a key {unknown!r}, which is not used; leave it out, and write {LINE_FORM}")
    tools = record.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise RequestError(
            f"{name} has tools that are no list of JSON objects; write them as transformers' chat templates take them"
        )


def _is_message(message: Any) -> bool:
    """Return whether a message has a role and a text, parts, or a call of tools without a text."""
    if not isinstance(message, dict) or not is_text(message.get("role")):
        return False
    content = message.get("content")
    return is_text(content) or isinstance(content, list) or (content is None and bool(message.get("tool_calls")))
