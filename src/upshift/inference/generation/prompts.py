"""Prompts to token ids, by the model's own tokenizer and chat template; tokens back to text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from upshift.errors import RequestError
from upshift.inference.tokenizer import load_tokenizer
from upshift.models.source import ModelSource

Prompt = str | Sequence[Mapping[str, str]]  # a text, or the messages of a chat


class Prompts:
    """``chat``: texts are what a user says, too."""

    def __init__(self, source: ModelSource, *, chat: bool = False) -> None:
        self.tokenizer = load_tokenizer(source)
        self.chat = chat
        self._reference = source.reference
        if chat:
            self._check_template()

    def of(self, prompts: Sequence[Prompt], *, first: int = 0) -> list[list[int]]:
        """Raises RequestError for a prompt without tokens."""
        found = []
        for number, prompt in enumerate(prompts, start=first + 1):
            ids = self._ids(prompt)
            if not ids:
                raise RequestError(f"prompt {number} is empty; write what the text begins with")
            found.append(ids)
        return found

    def text(self, tokens: Sequence[int]) -> str:
        found: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return found

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str) and not self.chat:
            found: list[int] = self.tokenizer(prompt).input_ids
            return found
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(message) for message in prompt]
        self._check_template()
        chat: list[int] = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return chat

    def _check_template(self) -> None:
        if not self.tokenizer.chat_template:
            raise RequestError(f"{self._reference!r} has no chat template; give texts instead of messages, without --chat")
