"""Prompts to token ids, by the model's own tokenizer and chat template; tokens back to text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jinja2 import TemplateError

from upshift.errors import RequestError
from upshift.inference.lines import is_text
from upshift.inference.tokenizer import load_tokenizer
from upshift.models.source import ModelSource

Prompt = str | Sequence[Mapping[str, str]]  # a text, or the messages of a chat
FORM = 'a text of Unicode characters, or the messages of a chat: [{"role": "user", "content": "..."}]'


class Prompts:
    """``chat``: texts are what a user says, too."""

    def __init__(self, source: ModelSource, *, chat: bool = False) -> None:
        self.tokenizer = load_tokenizer(source)
        self.chat = chat
        self._reference = source.reference
        if chat:
            self._check_template()

    def of(self, prompts: Sequence[Prompt], *, first: int = 0) -> list[list[int]]:
        """Raises RequestError for a prompt that is none, has no tokens, or is not what the chat template takes."""
        found = []
        for number, prompt in enumerate(prompts, start=first + 1):
            if not _is_prompt(prompt):
                raise RequestError(f"prompt {number} is {prompt!r:.80}; give {FORM}")
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
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(message) for message in prompt]
        self._check_template()
        try:
            chat: list[int] = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        except (TemplateError, TypeError, ValueError) as error:  # its own raise_exception, or what it does to a message
            raise RequestError(
                f"{name} is not what the chat template of {self._reference!r} takes ({error}); give messages that it takes"
            ) from None
        return chat

    def _check_template(self) -> None:
        if not self.tokenizer.chat_template:
            raise RequestError(f"{self._reference!r} has no chat template; give texts instead of messages, without --chat")


def _is_prompt(prompt: object) -> bool:
    """What a template makes of a message is the template's."""
    if isinstance(prompt, list | tuple):
        return bool(prompt) and all(isinstance(message, Mapping) for message in prompt)
    return is_text(prompt)
