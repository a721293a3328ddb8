"""Write chats as texts with the chat template of a tokenizer, and find the assistant's turns in them.

Everything that a row has is used: a row is rejected if the template writes the same text without its tools or its tool calls.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jinja2 import TemplateError

from upshift.errors import RequestError
from upshift.internals.transformers_names import RENDER_CHAT
from upshift.text import find_lone_surrogate
from upshift.training.data.chat_rows import ASSISTANT, WEIGHT, Chat, Message
from upshift.training.data.data_files import say_once

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as transformers finds it
TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError)  # that a template raises for messages that it does not take
TOOL_CALLS = "tool_calls"

Span = tuple[int, int]  # first character and end


class TemplateWriter:
    """Writes chats with a tokenizer's template. It counts the fields of messages that the template does not use."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._used_fields: set[str] = set()
        self._unused_fields: Counter[str] = Counter()  # rows, by field
        self._takes_parts: bool | None = None  # contents as lists of parts, and not as texts; None: no chat had one yet
        self._has_text_arguments: bool | None = None  # the form in which the template takes the arguments of tool calls

    def prepare(self, chat: Chat) -> Chat:
        """Return the chat as the template takes it. Raise RequestError if the template rejects it or ignores a part of it."""
        if not self._tokenizer.chat_template:
            raise RequestError(
                f"{chat.place} is a chat, and the model's tokenizer has no chat template; use the tokenizer of a chat model, "
                "or give prompt and completion as plain texts"
            )
        chat = self._with_arguments(self._with_content(chat))
        fields = {name for message in chat.messages for name in message} - {"role", "content", WEIGHT}
        unknown = fields - self._used_fields
        if chat.tools and "tools" not in self._used_fields:
            unknown.add("tools")
        if unknown:
            self._check_used(chat, unknown)
        return chat

    def write(self, chat: Chat, num_messages: int | None = None, *, adds_prompt: bool = False) -> str:
        """Return the text of a chat, or of its first messages. ``adds_prompt`` adds the beginning of the assistant's turn."""
        messages = _without_weights(chat.messages[:num_messages])
        text: str = self._call(
            chat,
            self._tokenizer.apply_chat_template,
            messages,
            tools=chat.tools,
            add_generation_prompt=adds_prompt,
            tokenize=False,
            **chat.template_arguments,
        )
        surrogate = find_lone_surrogate(text)
        if surrogate is not None:
            raise RequestError(
                f"{chat.place} holds {surrogate}, half of a surrogate pair, which is no text; write the file again"
            )
        return text

    def has_marks(self, chat: Chat) -> bool:
        """Return whether the template that writes the chat marks the assistant's turns."""
        template = self._call(chat, self._tokenizer.get_chat_template, tools=chat.tools)
        return GENERATION_MARK.search(template) is not None

    def write_marked(self, chat: Chat) -> tuple[str, list[Span]]:
        """Return the text of a chat, and where the turns that are learned stand in it, by the marks of the template."""
        template = self._call(chat, self._tokenizer.get_chat_template, tools=chat.tools)
        inputs = {**self._tokenizer.special_tokens_map, **chat.template_arguments}
        texts, spans = self._call(
            chat,
            RENDER_CHAT.get(),
            conversations=[_without_weights(chat.messages)],
            tools=chat.tools,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **inputs,
        )
        return texts[0], self._weighted(chat, spans[0])

    def report(self) -> None:
        """Tell the user about the fields of messages that the template does not use."""
        for name, num_rows in self._unused_fields.items():
            if name not in self._used_fields:
                say_once(f"the chat template does not use {name!r} of the messages ({num_rows} rows)")

    def _weighted(self, chat: Chat, spans: list[Span]) -> list[Span]:
        """Return the spans of turns whose weight is not 0. Raise RequestError if it is not clear which span is which turn."""
        weights = [message.get(WEIGHT, 1) for message in chat.messages if message["role"] == ASSISTANT]
        if all(weights):
            return spans
        if len(spans) != len(weights):
            raise RequestError(
                f"{chat.place} has a turn of weight 0, and the chat template marks {len(spans)} parts of {len(weights)} turns; "
                "leave the weight out"
            )
        return [span for span, weight in zip(spans, weights, strict=True) if weight]

    def _call(self, chat: Chat, function: Any, *positional: Any, **named: Any) -> Any:
        """Call a function of the template. Raise RequestError, with the place of the chat, if the template rejects the chat."""
        try:
            return function(*positional, **named)
        except TEMPLATE_ERRORS as error:
            reason = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
            raise RequestError(
                f"{chat.place} is not what the model's chat template takes ({reason}); change the row, or leave it out"
            ) from None

    def _with_arguments(self, chat: Chat) -> Chat:
        """Return the chat with the arguments of its tool calls as the template takes them: as objects, or else as JSON texts.

        OpenAI's API writes them as JSON texts. Most templates take objects. The first chat with arguments decides.
        """
        if not any(message.get(TOOL_CALLS) for message in chat.messages):
            return chat
        if self._has_text_arguments is None:
            as_objects = replace(chat, messages=_convert_arguments(chat.messages, as_text=False))
            try:
                self.write(as_objects)
                self._has_text_arguments = False
            except RequestError:
                self.write(replace(chat, messages=_convert_arguments(chat.messages, as_text=True)))
                self._has_text_arguments = True
        return replace(chat, messages=_convert_arguments(chat.messages, as_text=self._has_text_arguments))

    def _with_content(self, chat: Chat) -> Chat:
        """Return the chat with its contents as the template takes them: as texts, or else as parts. The first chat decides."""
        if self._takes_parts is None and any(message.get("content") for message in chat.messages):
            self._takes_parts = self._find_content_form(chat)
        return _as_parts(chat) if self._takes_parts else chat

    def _find_content_form(self, chat: Chat) -> bool:
        """Return whether the template takes parts alone. Raise RequestError if it writes the same text without the contents."""
        uses_texts = self._uses_content(chat)
        if uses_texts or self._uses_content(_as_parts(chat)):
            return not uses_texts
        if uses_texts is None:  # the template rejects the chat for another reason, which the next step says
            return False
        raise RequestError(
            f"{chat.place}: the model's chat template does not write the content of messages; use another template"
        )

    def _uses_content(self, chat: Chat) -> bool | None:
        """Return whether the contents change the text, or None if the template rejects the chat."""
        try:
            text = self.write(chat)
        except RequestError:
            return None
        try:
            return self.write(_without_part(chat, "content")) != text
        except RequestError:  # the template needs them
            return True

    def _check_used(self, chat: Chat, names: set[str]) -> None:
        """Find which parts change the text. Raise RequestError if the template ignores tools or tool calls."""
        text = self.write(chat)
        for name in sorted(names):
            try:
                is_used = self.write(_without_part(chat, name)) != text
            except RequestError:  # the template needs it
                is_used = True
            if is_used:
                self._used_fields.add(name)
            elif name in ("tools", TOOL_CALLS):
                raise RequestError(
                    f"{chat.place} has {name!r}, which the model's chat template does not use; leave it out, or use a model "
                    "whose chat template takes tools"
                )
            else:
                self._unused_fields[name] += 1


def _without_weights(messages: Sequence[Message]) -> list[Message]:
    return [{name: value for name, value in message.items() if name != WEIGHT} for message in messages]


def _as_parts(chat: Chat) -> Chat:
    """Return the chat with each content as a list of one part."""
    messages = [
        {**message, "content": [{"type": "text", "text": message["content"]}]} if "content" in message else message
        for message in chat.messages
    ]
    return replace(chat, messages=messages)


def _without_part(chat: Chat, name: str) -> Chat:
    """Return the chat without its tools, or without a field of its messages."""
    if name == "tools":
        return replace(chat, tools=None)
    messages = [{field: value for field, value in message.items() if field != name} for message in chat.messages]
    return replace(chat, messages=messages)


def _convert_arguments(messages: Sequence[Message], *, as_text: bool) -> list[Message]:
    return [
        {**message, TOOL_CALLS: [_convert_call(call, as_text=as_text) for call in message[TOOL_CALLS]]}
        if message.get(TOOL_CALLS)
        else message
        for message in messages
    ]


def _convert_call(call: Mapping[str, Any], *, as_text: bool) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, or as JSON text."""
    if "function" in call:
        return {**call, "function": _convert_call(call["function"], as_text=as_text)}
    arguments = call.get("arguments")
    if as_text and isinstance(arguments, dict | list):
        return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
    if not as_text and isinstance(arguments, str):
        try:
            return {**call, "arguments": json.loads(arguments)}
        except ValueError:  # a text that is no JSON stays a text
            return dict(call)
    return dict(call)
