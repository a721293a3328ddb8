"""Give tools to a model's chat template, and read the calls in its answers.

The template itself shows the form of a call. It writes a made-up call, and the texts around the name and the arguments are
the form. Arguments are JSON, as in the templates of Hermes, Qwen 3, Llama 3.1 and Mistral, or text between tags
(``tool_calls_in_tags``)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from os.path import commonprefix
from typing import Any, NamedTuple

from upshift.errors import RequestError
from upshift.inference.generation.grammar import WHITESPACE
from upshift.serving.engine.chat_template import QUESTION, ChatTemplate
from upshift.serving.engine.tool_calls_in_tags import (
    KEYS,
    NAMES,
    VALUES,
    Tags,
    find_tagged_form,
    read_tagged_call,
    tagged_call_rules,
)
from upshift.serving.messages import PromptEnding, ToolCall

ID_CHARACTERS = 9  # of a call's id: the only length that the templates of some models take
ARGUMENTS = tuple({key: value} for key, value in zip(KEYS, VALUES, strict=True))  # of the two made-up calls
TEXT = "zqx_text_zqx"
RESULT = "zqx_result"
DECODER = json.JSONDecoder()


class ToolFormat(NamedTuple):
    """The form of the calls in a model's answers.

    A call is ``before`` + name + ``middle`` + arguments + ``after``, or with the arguments before the name. ``between`` is the
    text between two calls, or None if the template takes one call in an answer. If name and arguments are fields of a JSON
    object, ``fields`` has their keys, and ``before``, ``after`` and ``between`` count from the whole JSON value in ``begin``,
    ``end`` and ``between``. ``text_arguments`` says that the template takes arguments as text. With ``tags``, the arguments are
    text between tags, ``before`` and ``after`` are ``begin`` and ``end``, and ``middle`` is not used."""

    before: str
    middle: str
    after: str
    arguments_first: bool
    begin: str
    end: str
    between: str | None
    fields: tuple[str, str] | None
    text_arguments: bool
    tags: Tags | None = None


class ToolTemplate(ChatTemplate):
    """The chat template of a tokenizer, and what it does with tools."""

    def tokenize(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: list[dict[str, Any]] | None,
        variables: Mapping[str, Any] | None = None,
        *,
        ending: PromptEnding = "answer",
    ) -> list[int]:
        """Return the token ids of a chat with tools, or with calls and results.

        Raise RequestError if the template does not use all of it."""
        has_calls = any(message.get("tool_calls") for message in messages)
        has_results = any(message["role"] == "tool" for message in messages)
        if tools and not self._takes_tools:
            raise RequestError("the chat template of the model has no place for tools; leave out tools, or serve another model")
        if (tools or has_calls) and self.format is None:
            raise RequestError(
                "the chat template of the model writes no tool calls with arguments in JSON or between tags, and this server "
                "reads no others; leave out tools and tool_calls"
            )
        if has_results and not self._takes_results:
            raise RequestError("the chat template of the model has no place for messages of the role tool; leave them out")
        text_arguments = self.format is not None and self.format.text_arguments
        chat = template_messages(messages, text_arguments=text_arguments)
        ids: list[int] = self._apply(chat, tools, tokenize=True, ending=ending, variables=variables)
        return ids

    @cached_property
    def format(self) -> ToolFormat | None:
        """Return the form of calls, or None if the template writes none, or none that can be read.

        Some templates take the arguments of a call as an object, and some as text. Only the second are given a text: one that
        writes an object in a form of its own would copy a text, which is not how the model writes it."""
        tools = [_made_tool(name) for name in NAMES]
        messages = template_messages([QUESTION, _made_message(ARGUMENTS[:1])], text_arguments=False)
        text = self.try_write(messages, tools, answers=True)
        takes_objects = text is not None and NAMES[0] in text.partition(QUESTION["content"])[2] and repr(ARGUMENTS[0]) not in text
        return self._read_format(text_arguments=not takes_objects)

    @cached_property
    def _takes_tools(self) -> bool:
        text = self.try_write([QUESTION], [_made_tool(NAMES[0])])
        return text is not None and NAMES[0] in text

    @cached_property
    def _takes_results(self) -> bool:
        text_arguments = self.format is not None and self.format.text_arguments
        result = {"role": "tool", "tool_call_id": "call0", "content": RESULT, "name": NAMES[0]}
        messages = template_messages([QUESTION, _made_message(ARGUMENTS[:1]), result], text_arguments=text_arguments)
        text = self.try_write(messages, [_made_tool(NAMES[0])])
        return text is not None and RESULT in text

    @property
    def markers(self) -> str:
        """Return the texts that mark calls."""
        form = self.format
        return "" if form is None else form.begin + form.middle + form.end + (form.between or "") + "".join(form.tags or ())

    def _read_format(self, *, text_arguments: bool) -> ToolFormat | None:
        tools = [_made_tool(name) for name in NAMES]
        plain = self.try_write([QUESTION, {"role": "assistant", "content": TEXT}], tools, answers=True)

        def render(arguments: Sequence[Mapping[str, Any]]) -> str | None:
            """Return the answer with calls that have these arguments, or None if the template takes no such answer."""
            chat = template_messages([QUESTION, _made_message(arguments)], text_arguments=text_arguments)
            text = self.try_write(chat, tools, answers=True)
            if plain is None or text is None:
                return None
            return text[len(commonprefix([plain, text])) : self._end_of_turn(plain, text)]

        answer = render(ARGUMENTS[:1])
        form = None if answer is None else find_format(answer, render(ARGUMENTS), text_arguments=text_arguments)
        tagged = find_tagged_form(render) if form is None else None
        if tagged is None:
            return form
        return ToolFormat(
            before=tagged.begin,
            middle="",
            after=tagged.end,
            arguments_first=False,
            begin=tagged.begin,
            end=tagged.end,
            between=tagged.between,
            fields=None,
            text_arguments=text_arguments,
            tags=tagged.tags,
        )

    def _end_of_turn(self, plain: str, single: str) -> int:
        """Return the index in ``single`` from which the two chats end alike, without a part of a special token."""
        end = len(single) - len(commonprefix([plain[::-1], single[::-1]]))
        for token in self.special_ids:
            start = single.find(token, max(end - len(token) + 1, 0))
            if start < end < start + len(token) and start >= 0:
                return start + len(token)
        return end


def template_messages(messages: Sequence[Mapping[str, Any]], *, text_arguments: bool) -> list[dict[str, Any]]:
    """Return messages as chat templates expect them: with the arguments of calls as objects, short ids, and names of results."""
    names: dict[str, str] = {}
    converted: list[dict[str, Any]] = []
    for message in messages:
        new_message = dict(message)
        if message.get("tool_calls"):
            names |= {call["id"]: call["function"]["name"] for call in message["tool_calls"]}
            new_message["tool_calls"] = [_template_call(call, text_arguments=text_arguments) for call in message["tool_calls"]]
        if message["role"] == "tool":
            call_id = message["tool_call_id"]
            new_message["tool_call_id"] = _short_id(call_id)
            new_message["name"] = names.get(call_id, message.get("name", ""))
        converted.append(new_message)
    return converted


def _template_call(call: Mapping[str, Any], *, text_arguments: bool) -> dict[str, Any]:
    function = call["function"]
    arguments = json.loads(function["arguments"] or "{}")
    if text_arguments:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {
        "id": _short_id(call["id"]),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _short_id(call_id: str) -> str:
    return hashlib.sha256(call_id.encode()).hexdigest()[:ID_CHARACTERS]


def _made_tool(name: str) -> dict[str, Any]:
    keys = {key: {"type": "string", "description": "a text"} for arguments in ARGUMENTS for key in arguments}
    parameters = {"type": "object", "properties": keys}
    return {"type": "function", "function": {"name": name, "description": "a tool", "parameters": parameters}}


def _made_message(arguments: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return an answer with made-up calls that have these arguments."""
    functions = [{"name": name, "arguments": json.dumps(values)} for name, values in zip(NAMES, arguments, strict=False)]
    calls = [{"id": f"call{index}", "type": "function", "function": function} for index, function in enumerate(functions)]
    return {"role": "assistant", "content": "", "tool_calls": calls}


class JsonValue(NamedTuple):
    """A JSON value in a text, from ``start`` to ``end``."""

    value: Any
    start: int
    end: int


def find_format(answer: str, two_calls: str | None, *, text_arguments: bool) -> ToolFormat | None:
    """Return the form of calls from an answer with the first made-up call.

    ``two_calls`` begins as an answer with both made-up calls does, or is None. Return None for a form without JSON."""
    name = answer.find(NAMES[0])
    arguments = _find_json(answer, lambda value: value == ARGUMENTS[0])
    if name < 0 or arguments is None:
        return None
    name_end = name + len(NAMES[0])
    arguments_first = arguments.start < name
    parts = sorted([(name, name_end), (arguments.start, arguments.end)])
    whole = _find_json(answer, lambda value: bool(_read_fields(value)))
    fields = None if whole is None else _read_fields(whole.value)
    start, end = (parts[0][0], parts[1][1]) if whole is None else (whole.start, whole.end)
    if whole is None and (arguments_first or not answer[parts[0][1] : parts[1][0]].strip() or not answer[:start].strip()):
        return None  # nothing says where a name begins or ends
    return ToolFormat(
        before=answer[: parts[0][0]],
        middle=answer[parts[0][1] : parts[1][0]],
        after=answer[parts[1][1] :],
        arguments_first=arguments_first,
        begin=answer[:start],
        end=answer[end:],
        between=_find_between(answer, end, two_calls, in_object=whole is not None),
        fields=fields,
        text_arguments=text_arguments,
    )


def _find_between(answer: str, end: int, two_calls: str | None, *, in_object: bool) -> str | None:
    """Return the text between two calls, or None if they have none. ``end`` is the end of the first call in ``answer``."""
    if two_calls is None or not two_calls.startswith(answer[:end]):
        return None
    if not in_object:
        second_start = two_calls.find(NAMES[1], end)
    else:
        second = _find_json(two_calls[end:], lambda value: bool(_read_fields(value, 1)))
        second_start = -1 if second is None else end + second.start
    return two_calls[end:second_start] if second_start >= 0 else None


def _find_json(text: str, is_wanted: Callable[[Any], bool]) -> JsonValue | None:
    """Return the first JSON object or list of a text that is wanted, or None."""
    for start, character in enumerate(text):
        if character in "{[":
            try:
                value, end = DECODER.raw_decode(text, start)
            except ValueError:
                continue
            if is_wanted(value):
                return JsonValue(value, start, end)
    return None


def _read_fields(value: Any, index: int = 0) -> tuple[str, str] | None:
    """Return the keys of the name and of the arguments of a made-up call, or None if the JSON value is no such call."""
    call = value[0] if isinstance(value, list) and value else value
    if not isinstance(call, dict):
        return None
    name_key = next((key for key, field in call.items() if field == NAMES[index]), None)
    arguments_key = next((key for key, field in call.items() if field == ARGUMENTS[index]), None)
    return None if name_key is None or arguments_key is None else (name_key, arguments_key)


def grammar_of_call(
    form: ToolFormat, tools: Mapping[str, Any], special_ids: Mapping[str, int], json_schema: str | None = None
) -> str:
    """Return the grammar, in llguidance's variant of Lark, of an answer that is one call of one of the tools.

    ``tools`` holds the JSON schema of the arguments by name. ``special_ids`` holds the ids of the special tokens by their
    text. With ``json_schema``, the answer may also be a value that it allows."""
    choices = []
    rules = []
    for index, (name, schema) in enumerate(tools.items()):
        choice, new_rules = _rules_of_call(form, index, name, schema, special_ids)
        choices.append(choice)
        rules += new_rules
    call = f"({' | '.join(choices)})"
    start = _join(_literals(form.before, special_ids), call, _literals(_strip_end(form.after, special_ids), special_ids))
    if json_schema is not None:
        rule = {**json.loads(json_schema), "x-guidance": {"whitespace_pattern": WHITESPACE}}
        rules.append(f"other_answer: %json {json.dumps(rule)}")
        start = f"({start}) | other_answer"
    return "\n".join([f"start: {start}", *rules])


def _rules_of_call(form: ToolFormat, index: int, name: str, schema: Any, special_ids: Mapping[str, int]) -> tuple[str, list[str]]:
    """Return the grammar of a call of one tool between ``before`` and ``after``, and the rules that it uses."""
    if form.tags is not None:
        call, rules = tagged_call_rules(form.tags, index, schema, lambda text: _literals(text, special_ids))
        return _join(_quote(name), call), rules
    arguments = f"arguments{index}"
    parts = [arguments, _quote(name)] if form.arguments_first else [_quote(name), arguments]
    rule = {"type": "object", **schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}
    return _join(parts[0], _literals(form.middle, special_ids), parts[1]), [f"{arguments}: %json {json.dumps(rule)}"]


def _strip_end(text: str, special_ids: Mapping[str, int]) -> str:
    """Return a text without the special tokens at its end, which may be those that end an answer."""
    text = text.rstrip()
    token = next((token for token in special_ids if token and text.endswith(token)), None)
    return text if token is None else _strip_end(text.removesuffix(token), special_ids)


def _literals(text: str, special_ids: Mapping[str, int]) -> str:
    """Return a text as literals of Lark, with special tokens as their ids."""
    places = [(text.find(token), -len(token), token) for token in special_ids if token in text]
    if not places:
        return _quote(text) if text else ""
    place, _, token = min(places)
    rest = text[place + len(token) :]
    return _join(_quote(text[:place]) if place else "", f"<[{special_ids[token]}]>", _literals(rest, special_ids))


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _join(*parts: str) -> str:
    return " ".join(part for part in parts if part)


class CallStream:
    """The calls in one answer's text. Text that may belong to a call is held back until that is clear.

    ``schemas`` holds the JSON schemas of the arguments by the names of the tools that may be called. ``max_calls`` is the most
    calls to report. None is no limit."""

    def __init__(self, form: ToolFormat, schemas: Mapping[str, Any], max_calls: int | None = None) -> None:
        self._form = form
        self._schemas = schemas
        self._max_calls = max_calls
        self._marker = form.begin.strip()
        self._next_words = [text.split() for text in (form.between, form.end) if text is not None]
        self._buffer = ""
        self._opening: str | None = None  # the text that opened a call; None: no call is open
        self._is_after_call = False
        self._has_text = False
        self._count = 0

    def add(self, text: str, *, last: bool) -> tuple[str, list[ToolCall]]:
        """Add a piece of the answer. Return the text and the calls that are complete now. ``last`` says that no more comes."""
        self._buffer += text
        shown = ""
        calls: list[ToolCall] = []
        goes_on = True
        while goes_on:
            if self._is_after_call:
                goes_on = self._skip_end(last=last)
            elif self._opening is None:
                new_text, goes_on = self._take_text(last=last)
                shown += new_text
            else:
                new_calls = self._take_calls()
                goes_on = new_calls is not None
                calls += new_calls or []
        if last and self._opening is not None:  # it began as a call and is none
            shown += self._opening + self._buffer
            self._buffer = ""
        return shown, calls

    def _take_text(self, *, last: bool) -> tuple[str, bool]:
        """Return the text before the next call, and whether a call is open now."""
        buffer = self._buffer
        if not self._marker:
            return self._take_bare_text(last=last)
        place = buffer.find(self._marker)
        if place >= 0:
            self._opening = self._marker
            self._buffer = buffer[place + len(self._marker) :]
            return buffer[:place], True
        held_length = 0 if last else partial_length(buffer, self._marker)
        self._buffer = buffer[len(buffer) - held_length :]
        return buffer[: len(buffer) - held_length], False

    def _take_bare_text(self, *, last: bool) -> tuple[str, bool]:
        """Return the same for a form without a marker: the answer is a call from its first character on, or has none."""
        text = self._buffer.lstrip()
        if not self._has_text and text[:1] in ("{", "["):
            self._opening = ""
            return "", True
        if not self._has_text and not text and not last:
            return "", False
        self._has_text = True
        shown = self._buffer
        self._buffer = ""
        return shown, False

    def _take_calls(self) -> list[ToolCall] | None:
        """Return the calls at the beginning of the buffer, or None if they are not complete."""
        parsed = self._read_object() if self._form.fields is not None else self._read_name_and_arguments()
        if parsed is None:
            return None
        values, end = parsed
        if not values or any(name not in self._schemas for name, _ in values):
            return None
        self._buffer = self._buffer[end:]
        self._opening = None
        self._is_after_call = True
        self._has_text = True
        calls = []
        for name, arguments in values:
            if self._max_calls is None or self._count < self._max_calls:
                calls.append(ToolCall(index=self._count, name=name, arguments=arguments))
                self._count += 1
        return calls

    def _read_object(self) -> tuple[list[tuple[str, str]], int] | None:
        """Return the names and arguments of a JSON object or list at the beginning of the buffer, and its end."""
        value = _decode_first(self._buffer)
        if value is None or self._form.fields is None:
            return None
        calls = []
        for call in value.value if isinstance(value.value, list) else [value.value]:
            name, arguments = (call.get(key) for key in self._form.fields) if isinstance(call, dict) else (None, None)
            if not isinstance(name, str) or not isinstance(arguments, dict):
                return None
            calls.append((name, json.dumps(arguments, ensure_ascii=False)))
        return calls, value.end

    def _read_name_and_arguments(self) -> tuple[list[tuple[str, str]], int] | None:
        """Return a name and the arguments after it at the beginning of the buffer, and their end."""
        if self._form.tags is not None:
            tagged = read_tagged_call(self._form.tags, self._buffer, self._schemas)
            return None if tagged is None else ([tagged[:2]], tagged[2])
        name, separator, rest = self._buffer.partition(self._form.middle.strip())
        value = _decode_first(rest) if separator else None
        if value is None or not isinstance(value.value, dict):
            return None
        arguments = json.dumps(value.value, ensure_ascii=False)
        return [(name.strip(), arguments)], len(self._buffer) - len(rest) + value.end

    def _skip_end(self, *, last: bool) -> bool:
        """Remove what ends a call. Return whether the rest of the buffer can be read now."""
        is_complete = True
        for is_between, words in zip((self._form.between is not None, False), self._next_words, strict=False):
            length = match_words(self._buffer, words)
            if length is None:
                is_complete = False
            elif length >= 0 and (is_between or words):
                self._buffer = self._buffer[length:]
                self._opening = "" if is_between else None
                self._is_after_call = False
                return True
        if not is_complete and not last:
            return False
        self._is_after_call = False
        if not is_complete or not self._buffer.strip():
            self._buffer = ""
        return True


def _decode_first(text: str) -> JsonValue | None:
    """Return the JSON value at the beginning of a text, or None if it is not complete."""
    start = len(text) - len(text.lstrip())
    try:
        value, end = DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    return JsonValue(value, start, end)


def match_words(text: str, words: Sequence[str]) -> int | None:
    """Return the length of the beginning of a text that is these words, with any white space before each of them.

    Return -1 if the text begins otherwise, and None if more text decides."""
    place = 0
    for word in words:
        place += len(text[place:]) - len(text[place:].lstrip())
        rest = text[place:]
        if not rest.startswith(word):
            return None if word.startswith(rest) else -1
        place += len(word)
    return place


def partial_length(text: str, marker: str) -> int:
    """Return how many of the text's last characters may be the beginning of ``marker``."""
    longest = min(len(marker) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)


@lru_cache(maxsize=8)  # a request needs them twice, and an agent sends the same tools again
def schemas_of_tools(tools: str) -> Mapping[str, Any]:
    """Return the JSON schemas of the tools' arguments by the tools' names."""
    functions = [tool["function"] for tool in json.loads(tools)]
    return {function["name"]: function["parameters"] for function in functions}
