"""Write chats as texts with the chat template of a tokenizer, and find the assistant's turns in them.

Everything that a row has is used. A row is rejected if the template writes the same text without its tools, its tool calls, or
a message that is not the assistant's. If the template leaves out a part of a content, or does not use a field or an argument,
the user is told, with the number of rows.
"""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from upshift.errors import RequestError
from upshift.internals.transformers_names import COMPILE_TEMPLATE, RENDER_CHAT
from upshift.text import fill_null_contents, one_line
from upshift.training.data.chat_rows import ASSISTANT, TOOL_CALLS, WEIGHT, Chat, Message
from upshift.training.data.data_files import say_once
from upshift.training.data.row_formats import SYSTEM, TEMPLATE_ARGUMENTS, TOOLS
from upshift.training.data.text_files import check_text

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as transformers finds it
TEMPLATE_ERRORS = (  # a template is foreign code, and raises any of them for messages that it does not take
    TemplateError, ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
DOCUMENTS = "documents"  # the only parameter of apply_chat_template that a row may set, because templates read it
RENDERED = ("messages", "conversations")  # transformers gives these to the template
NUM_CHECKED = 100  # rows, or messages of a role, that are written once more to see whether the template uses a part of them
# They stand for a content. They differ in their first and in their last letter, so what two texts share ends at them.
STAND_INS = ("Xylographer", "quintessence")

Span = tuple[int, int]  # first character and end


@dataclass
class RowCount:
    """Counts rows, and holds the place of the first one."""

    first: str = ""
    number: int = 0

    def add(self, place: str) -> None:
        self.first = self.first or place
        self.number += 1

    def __str__(self) -> str:
        return f"{self.first} and {self.number - 1} other rows" if self.number > 1 else self.first


class TemplateWriter:
    """Writes chats with a tokenizer's template. It counts the fields of messages that the template does not use."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        parameters = inspect.signature(tokenizer.apply_chat_template).parameters.values()
        named = (parameter.name for parameter in parameters if parameter.kind is not inspect.Parameter.VAR_KEYWORD)
        self._reserved = {*named, *RENDERED} - {DOCUMENTS}
        self._used_fields: set[str] = set()
        self._unused_fields: Counter[str] = Counter()  # rows, by field
        self._used_arguments: set[str] = set()
        self._unused_arguments: Counter[str] = Counter()  # rows, by argument of the template
        self._checked_messages: Counter[str] = Counter()  # messages that were written without their content, by role
        self._shortened: defaultdict[tuple[str, str], RowCount] = defaultdict(RowCount)  # by role and field
        self._takes_parts: bool | None = None  # contents as lists of parts, and not as texts; None: no chat had one yet
        self._has_text_arguments: bool | None = None  # the form in which the template takes the arguments of tool calls

    def prepare(self, chat: Chat) -> Chat:
        """Return the chat as the template takes it. Raise RequestError if the template rejects it or ignores a part of it."""
        if not self._tokenizer.chat_template:
            raise RequestError(
                f"{chat.place} is a chat, and the model's tokenizer has no chat template; add --chat-template with a file or "
                "chatml, use the tokenizer of a chat model, or give prompt and completion as plain texts"
            )
        reserved = next((name for name in chat.template_arguments if name in self._reserved), None)
        if reserved is not None:
            raise RequestError(
                f"{chat.place}: column {TEMPLATE_ARGUMENTS!r} sets {reserved!r}, an argument of apply_chat_template and not of a "
                "template; leave it out"
            )
        chat = replace(chat, messages=fill_null_contents(chat.messages, partial(self._write_or_none, chat)))
        chat = self._with_arguments(self._with_content(chat))
        fields = {name for message in chat.messages for name in message} - {"role", "content", WEIGHT}
        unknown = fields - self._used_fields
        if chat.tools and TOOLS not in self._used_fields:
            unknown.add(TOOLS)
        if unknown:
            self._check_used(chat, unknown)
        unknown_arguments = chat.template_arguments.keys() - self._used_arguments
        if unknown_arguments:
            self._check_arguments(chat, unknown_arguments)
        return chat

    def write_whole(self, chat: Chat) -> str:
        """Return the text of a chat. Raise RequestError if a message is missing in it. Count contents that are cut short."""
        text = self.write(chat)
        self._check_contents(chat, text)
        return text

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
        if num_messages is None:
            check_text(text, chat.place)
        return text

    def write_end(self) -> str | None:
        """Return what stands after the last answer of a chat, without white space around it. None: it cannot be found."""
        question, answer = STAND_INS
        chat = Chat(place="", messages=[{"role": "user", "content": question}, {"role": ASSISTANT, "content": answer}])
        try:
            _, found, end = self.write(_as_parts(chat) if self._takes_parts else chat).rpartition(answer)
        except RequestError:  # the template takes chats of another form alone
            return None
        return end.strip() if found else None

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
        check_text(texts[0], chat.place)
        self._check_contents(chat, texts[0])
        return texts[0], self._weighted(chat, spans[0])

    def report(self) -> None:
        """Tell the user about what the template does not use, and about contents that it does not write as they are."""
        for name, num_rows in self._unused_fields.items():
            if name not in self._used_fields:
                say_once(f"the chat template does not use {name!r} of the messages ({num_rows} rows)")
        for name, num_rows in self._unused_arguments.items():
            if name not in self._used_arguments:
                say_once(f"the chat template does not use {name!r} of {TEMPLATE_ARGUMENTS} ({num_rows} rows)")
        for (role, name), rows in self._shortened.items():
            example = ", for example thoughts" if role == ASSISTANT else ""
            say_once(
                f"{rows}: the chat template leaves out or changes a part of {name!r} of the {role}'s messages{example}; the "
                "model reads and learns what the template writes"
            )

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

    def _call(self, chat: Chat, function: Any, /, *positional: Any, **named: Any) -> Any:
        """Call a function of the template. Raise RequestError, with the place of the chat, if the template rejects the chat."""
        try:
            return function(*positional, **named)
        except TEMPLATE_ERRORS as error:
            reason = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
            raise RequestError(
                f"{chat.place} is not what the model's chat template takes ({reason}); change the row, or leave it out"
            ) from None

    def _write_or_none(self, chat: Chat, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """Return the text of a chat with other messages, in the first form that the template takes, or None if it takes none."""
        for as_text, in_parts in product(_both_ways(self._has_text_arguments), _both_ways(self._takes_parts)):
            form = replace(chat, messages=_convert_arguments([dict(message) for message in messages], as_text=as_text))
            with suppress(RequestError):
                return self.write(_as_parts(form) if in_parts else form)
        return None

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
        num_as_texts = self._count_written(chat)
        num_as_parts = self._count_written(_as_parts(chat))
        if num_as_texts or num_as_parts:
            return (num_as_parts or 0) > (num_as_texts or 0)
        if num_as_texts is None:  # the template rejects the chat for another reason, which the next step says
            return False
        raise RequestError(
            f"{chat.place}: the model's chat template does not write the content of messages; use another template"
        )

    def _count_written(self, chat: Chat) -> int | None:
        """Return how many contents the template writes, or None if it rejects the chat."""
        try:
            self.write(chat)
        except RequestError:
            return None
        indices = (index for index, message in enumerate(chat.messages) if message.get("content"))
        return sum(self._writes_content(chat, index) for index in indices)

    def _writes_content(self, chat: Chat, index: int) -> bool:
        """Return whether another content of a message changes the text."""
        try:
            first, second = (self.write(with_content(chat, index, word)) for word in STAND_INS)
        except RequestError:  # the template reads it
            return True
        return first != second

    def _check_used(self, chat: Chat, names: set[str]) -> None:
        """Find which parts change the text. Raise RequestError if the template ignores tools or tool calls."""
        unchecked = [name for name in sorted(names) if self._unused_fields[name] < NUM_CHECKED]
        self._unused_fields.update(names.difference(unchecked))
        text = self.write(chat) if unchecked else ""
        for name in unchecked:
            try:
                is_used = self.write(_without_part(chat, name)) != text
            except RequestError:  # the template needs it
                is_used = True
            if is_used:
                self._used_fields.add(name)
            elif name in (TOOLS, TOOL_CALLS):
                raise RequestError(
                    f"{chat.place} has {name!r}, which the model's chat template does not use; leave it out, or use a model "
                    "whose chat template takes tools"
                )
            else:
                self._unused_fields[name] += 1

    def _check_arguments(self, chat: Chat, names: set[str]) -> None:
        """Find which arguments of the template change the text of the chat, or of a prompt in it."""
        unchecked = [name for name in sorted(names) if self._unused_arguments[name] < NUM_CHECKED]
        self._unused_arguments.update(names.difference(unchecked))
        texts = self._try_texts(chat) if unchecked else []
        for name in unchecked:
            if self._uses_argument(chat, name, texts):
                self._used_arguments.add(name)
            else:
                self._unused_arguments[name] += 1

    def _uses_argument(self, chat: Chat, name: str, texts: list[str | None]) -> bool:
        """Return whether a text differs without the argument, or with another value: the row may give the default."""
        others = {key: value for key, value in chat.template_arguments.items() if key != name}
        values = () if name == DOCUMENTS else (True, False, STAND_INS[0])
        variants = [others, *({**others, name: value} for value in values)]
        return any(self._try_texts(replace(chat, template_arguments=variant)) != texts for variant in variants)

    def _try_texts(self, chat: Chat) -> list[str | None]:
        """Return the texts of the chat and of the prompt of its last answer. None: the template rejects it."""
        turns = [index for index, message in enumerate(chat.messages) if message["role"] == ASSISTANT and index > 0]
        texts: list[str | None] = []
        for num_messages, adds_prompt in ((None, False), (turns[-1] if turns else None, True)):
            try:
                texts.append(self.write(chat, num_messages, adds_prompt=adds_prompt))
            except RequestError:
                texts.append(None)
        return texts

    def _check_contents(self, chat: Chat, text: str) -> None:
        """Raise RequestError for a message of another role than the assistant's that is not in the text of the chat.

        Count the rows in which a part of a content, or of the assistant's thoughts, is missing. White space does not count,
        because templates change it. Some templates write a content as JSON.
        """
        letters = "".join(text.split())
        position = 0  # behind the last content, because the template writes most of them in their order
        shortened = set()
        for index, message in enumerate(chat.messages):
            role = message["role"]
            for name, content in self._texts_of(message):
                start = _find_letters(letters, content, position)
                position = max(start, position)
                if role != ASSISTANT and (start < 0 or self._checked_messages[role] < NUM_CHECKED):
                    self._checked_messages[role] += 1
                    if not self._writes_content(chat, index):
                        raise RequestError(
                            f"{chat.place}: the chat template does not write message {index + 1}, of role {role!r}; give it a "
                            "role that the template writes, or leave it out"
                        )
                if start < 0:
                    shortened.add((role, name))
        for key in shortened:
            self._shortened[key].add(chat.place)

    def _texts_of(self, message: Message) -> list[tuple[str, str]]:
        """Return the content of a message and, of the assistant's, other fields of text that the template uses, with names."""
        names = ["content"]
        if message["role"] == ASSISTANT:
            names += sorted(self._used_fields & message.keys())
        texts = [(name, message.get(name) or "") for name in names]
        content = message.get("content")
        if isinstance(content, list):  # an image may stand between two texts
            texts = [*(("content", text_of([part])) for part in content), *texts[1:]]
        return [(name, text) for name, text in texts if isinstance(text, str) and text.strip()]


def learned_turns(chat: Chat) -> list[int]:
    """Return the numbers, from 0, of the assistant's turns that are learned and that stand after another message."""
    turns = enumerate(chat.messages)
    return [index for index, turn in turns if index > 0 and turn["role"] == ASSISTANT and turn.get(WEIGHT, 1) != 0]


def text_of(content: str | Sequence[Mapping[str, str]]) -> str:
    """Return the text of a content that is a text or a list of parts. An image has none."""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def with_content(chat: Chat, index: int, word: str) -> Chat:
    """Return the chat with a word as the content of one message, in the form that the content has."""
    messages = list(chat.messages)
    has_parts = isinstance(messages[index].get("content"), list)
    messages[index] = {**messages[index], "content": [{"type": "text", "text": word}] if has_parts else word}
    return replace(chat, messages=messages)


def check_chat_template(tokenizer: Any) -> None:
    """Raise RequestError if the tokenizer's chat template is no Jinja, or does not write a question and its answer."""
    try:
        COMPILE_TEMPLATE.get()(tokenizer.chat_template)
    except TemplateSyntaxError as error:
        raise RequestError(f"--chat-template is no Jinja template: {error.message} (line {error.lineno}); mend it") from None
    question, answer = STAND_INS
    turns: list[Message] = [{"role": "user", "content": question}, {"role": ASSISTANT, "content": answer}]
    reason = "its text has no content of the turns"
    for messages in (turns, [{"role": SYSTEM, "content": "A"}, *turns]):
        chat = Chat(place="", messages=messages)
        for form in (chat, _as_parts(chat)):
            try:
                text = tokenizer.apply_chat_template(form.messages, tokenize=False)
            except TEMPLATE_ERRORS as error:
                reason = one_line(error, limit=160) or type(error).__name__
            else:
                if question in text and answer in text:
                    return
    raise RequestError(f"--chat-template does not write a chat of a question and an answer ({reason}); give another template")


def _both_ways(choice: bool | None) -> tuple[bool, ...]:
    """Return a choice that is made, or both ways of one that is not made yet."""
    return (False, True) if choice is None else (choice,)


def _find_letters(letters: str, content: str, position: int) -> int:
    """Return where a content stands in a text without white space, if possible behind a position. Return -1 if it does not."""
    for form in (content, json.dumps(content, ensure_ascii=False)[1:-1]):
        form_letters = "".join(form.split())
        start = letters.find(form_letters, position)
        start = start if start >= 0 else letters.find(form_letters)
        if start >= 0:
            return start
    return -1


def _without_weights(messages: Sequence[Message]) -> list[Message]:
    return [{name: value for name, value in message.items() if name != WEIGHT} for message in messages]


def _as_parts(chat: Chat) -> Chat:
    """Return the chat with each content as a list of one part."""
    messages = [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in chat.messages
    ]
    return replace(chat, messages=messages)


def _without_part(chat: Chat, name: str) -> Chat:
    """Return the chat without its tools, or without a field of its messages."""
    if name == TOOLS:
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
        except (ValueError, RecursionError):  # a text that is no JSON stays a text
            return dict(call)
    return dict(call)
