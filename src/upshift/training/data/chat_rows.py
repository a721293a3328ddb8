"""Read chats, and prompts with completions, from the rows of a table.

A row becomes messages as transformers' chat templates take them: ``{"role": .., "content": ..}``. A row that cannot be used is
rejected with its place: parts that are not text, unknown roles, values of another type.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from upshift.errors import RequestError
from upshift.text import describe_other_part, join_names
from upshift.training.data.data_options import LearnedContents, LossOn
from upshift.training.data.row_formats import (
    FUNCTIONS,
    LABEL,
    MARGIN,
    MEDIA_COLUMNS,
    PREFERENCE,
    REQUIRED,
    SYSTEM,
    TEMPLATE_ARGUMENTS,
    TOOLS,
    UNPAIRED,
    Columns,
    list_columns,
)
from upshift.training.data.rows.segments import Segment, SegmentRow

Message = dict[str, Any]

ASSISTANT = "assistant"
WEIGHT = "weight"  # of an assistant's message, as OpenAI's API takes it: 0 if it is not learned
ROLES = ("system", "developer", "user", ASSISTANT, "tool")
SPEAKERS = {  # ``from`` of a ShareGPT turn -> role
    "human": "user", "user": "user", "gpt": ASSISTANT, "assistant": ASSISTANT, "system": "system", "tool": "tool",
    "observation": "tool", "function_call": ASSISTANT, "chatgpt": ASSISTANT, "bing": ASSISTANT, "bard": ASSISTANT,
}  # fmt: skip
FUNCTION_CALL = "function_call"  # a ShareGPT speaker, and a field of messages as OpenAI's API had it before tool calls
FUNCTION = "function"  # the role of a tool's answer, and the type of a tool
TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A chat whose assistant's turns are learned, or, with ``num_prompt_messages``, all messages after the prompt."""

    place: str
    messages: list[Message]
    tools: list[Any] | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    num_prompt_messages: int | None = None
    has_answer: bool = True  # False: the column of the answer is empty, so there is nothing to learn
    loss_on: LossOn | None = None  # None: that of the run
    learned_contents: LearnedContents = LearnedContents()  # if contents alone are learned
    ends_with_eos: bool = False  # an answer of a pair ends with EOS in place of the white space that the template writes
    rating: bool | None = None  # whether the answer is a good one; None: the row does not say it

    @property
    def num_characters(self) -> int:
        """Return the characters of the messages and the tools, about."""
        num_in_messages = sum(len(str(value)) for message in self.messages for value in message.values())
        return num_in_messages + len(str(self.tools or ""))


@dataclass(frozen=True, kw_only=True)
class PromptCompletion:
    """Two texts, of which the second is learned."""

    place: str
    prompt: str
    completion: str
    loss_on: LossOn | None = None  # None: that of the run
    rating: bool | None = None  # as in Chat

    @property
    def has_answer(self) -> bool:
        return not _is_blank(self.completion)

    @property
    def num_characters(self) -> int:
        return len(self.prompt) + len(self.completion)


@dataclass(frozen=True, kw_only=True)
class PreferencePair:
    """Two answers to one prompt, of which the model is to prefer the first: two chats, or two texts after a prompt."""

    place: str
    chosen: Chat | PromptCompletion | SegmentRow
    rejected: Chat | PromptCompletion | SegmentRow
    problem: str | None = None  # why nothing can be learned from the pair
    margin: float | None = None  # by how much the reward of the chosen answer shall be larger; None: the row says nothing
    is_unpaired: bool = False  # each answer is learned for itself, as a good one and as a bad one

    @property
    def num_characters(self) -> int:
        return self.chosen.num_characters + self.rejected.num_characters


def read_chat(
    record: Mapping[str, Any], columns: Columns, place: str
) -> Chat | PromptCompletion | PreferencePair | SegmentRow | None:
    """Return the chat, the prompt and completion, the segments, or the pair of answers of a row, or None if the row is empty.

    Raise RequestError for other rows.
    """
    for name in REQUIRED[columns.format]:
        if name not in record:
            raise RequestError(f"{place} has no column {name!r}; {list_columns(record)}; give it, or leave the row out")
    if all(_is_empty(record[name]) for name in REQUIRED[columns.format]):
        return None
    media = next((name for name in MEDIA_COLUMNS if not _is_empty(record.get(name))), None)
    if media is not None:
        raise RequestError(f"{place} has a value in column {media!r}, and only text is trained on; leave the row out")
    if columns.format == PREFERENCE:
        return replace(_read_preference(record, columns, place), is_unpaired=columns.objective == "kto")
    if columns.format == UNPAIRED:
        return replace(_read_prompt_completion(record, columns, place), rating=_read_rating(record, place))
    if columns.format == "prompt-completion":
        return _read_prompt_completion(record, columns, place)
    if columns.format == "segments":
        return _read_segments(record["segments"], place)
    has_answer = True
    if columns.format == "alpaca":
        messages = _read_alpaca(record, place)
        has_answer = not _is_blank(record["output"])
    else:
        messages = _read_messages(record[columns.name], columns.name, place)
    messages = _with_system(messages, record.get(SYSTEM), place)
    return Chat(place=place, messages=messages, has_answer=has_answer, **_template_inputs(record, place))


def _read_prompt_completion(record: Mapping[str, Any], columns: Columns, place: str) -> Chat | PromptCompletion:
    prompt = _decode_messages(record["prompt"])
    completion = _decode_messages(record["completion"])
    if columns.writes_turns and isinstance(prompt, str | None) and isinstance(completion, str | None):
        prompt = _as_turn("user", prompt or "")
        completion = _as_turn(ASSISTANT, completion) if completion else completion
    if isinstance(prompt, list) and _is_blank(completion):
        messages = _with_system(_read_messages(prompt, "prompt", place), record.get(SYSTEM), place)
        inputs = _template_inputs(record, place)
        return Chat(place=place, messages=messages, num_prompt_messages=len(messages), has_answer=False, **inputs)
    if isinstance(prompt, str | None) and isinstance(completion, str | None):  # a table of text (CSV) has no null, but ""
        _refuse_template_inputs(record, place)
        return PromptCompletion(place=place, prompt=prompt or "", completion=completion or "")
    if not isinstance(prompt, list) or not isinstance(completion, list):
        raise RequestError(
            f"{place}: prompt holds {_shorten(prompt)} and completion holds {_shorten(completion)}; "
            "give two texts, or two lists of messages"
        )
    messages = _with_system(_read_messages(prompt, "prompt", place), record.get(SYSTEM), place)
    answer = _read_messages(completion, "completion", place)
    if any(message.get(WEIGHT) == 0 for message in answer):
        raise RequestError(
            f"{place} has weight 0 in its completion, and a completion is learned as a whole; leave the weight out"
        )
    return Chat(place=place, messages=messages + answer, num_prompt_messages=len(messages), **_template_inputs(record, place))


def _as_turn(role: str, text: str) -> list[Any]:
    """Return a plain text as a list of one message."""
    return [{"role": role, "content": text}]


def _read_segments(value: Any, place: str) -> SegmentRow:
    """Return a row of segments, each with a text and whether it is learned, as Axolotl's input_output has them."""
    segments = []
    for number, entry in enumerate(_json_list(value, "segments", place), start=1):
        fields = entry if isinstance(entry, dict) else {}
        if not isinstance(fields.get("text"), str) or not isinstance(fields.get("label"), bool):
            raise RequestError(
                f'{place}: segment {number} is {_shorten(entry)}; write {{"label": true, "text": ".."}}, where label says '
                "whether it is learned"
            )
        segments.append(Segment(fields["text"], fields["label"]))
    return SegmentRow(place=place, segments=tuple(segments))


def _read_preference(record: Mapping[str, Any], columns: Columns, place: str) -> PreferencePair:
    """Return a pair of answers. Without a prompt, what both answers begin with is the prompt, as in TRL.

    A reward is of the whole text, so rewards need no prompt.
    """
    prompt = _decode_messages(record.get("prompt"))
    chosen = _decode_messages(record["chosen"])
    rejected = _decode_messages(record["rejected"])
    if columns.writes_turns and isinstance(prompt, str | None):
        prompt, chosen, rejected = _texts_as_turns(prompt, chosen, rejected, place)
    problem = "chosen and rejected are the same" if chosen == rejected else None
    blank = next((name for name, value in (("chosen", chosen), ("rejected", rejected)) if _is_blank(value)), None)
    if blank is not None:
        problem = f"{blank} is empty"
    has_messages = [isinstance(value, list) and bool(value) for value in (chosen, rejected)]
    if problem is not None:
        is_chat = any(has_messages) or isinstance(prompt, list)
        empty = Chat(place=place, messages=[]) if is_chat else PromptCompletion(place=place, prompt="", completion="")
        return PreferencePair(place=place, chosen=empty, rejected=empty, problem=problem)
    needs_prompt = columns.objective != "reward"
    margin = None if needs_prompt else _read_margin(record, place)
    if isinstance(chosen, str) and isinstance(rejected, str) and isinstance(prompt, str | None):
        _refuse_template_inputs(record, place)
        if prompt is None and not needs_prompt:
            prompt = ""
        return replace(_pair_of_texts(prompt, chosen, rejected, place), margin=margin)
    if not all(has_messages) or not isinstance(prompt, str | list | None):
        raise RequestError(
            f"{place}: prompt holds {_shorten(prompt)}, chosen {_shorten(chosen)} and rejected {_shorten(rejected)}; give texts, "
            "or lists of messages"
        )
    pair = _pair_of_chats(prompt, chosen, rejected, record, place, needs_prompt=needs_prompt)
    return replace(pair, margin=margin)


def _texts_as_turns(prompt: str | None, chosen: Any, rejected: Any, place: str) -> tuple[Any, Any, Any]:
    """Return a prompt and two answers of plain text as lists of one message. Return lists of messages as they are.

    Raise RequestError for texts without a prompt, because a template writes no answer without a question."""
    if not all(isinstance(answer, str | None) for answer in (chosen, rejected)):
        return prompt, chosen, rejected
    if prompt is None:
        raise RequestError(
            f"{place} has no column 'prompt', so there is no text for the user's turn, which --chat-template writes; give the "
            "prompt in a column of its own, or leave --chat-template out"
        )
    first, second = (_as_turn(ASSISTANT, answer) if answer else answer for answer in (chosen, rejected))
    return _as_turn("user", prompt), first, second


def _read_rating(record: Mapping[str, Any], place: str) -> bool:
    """Return whether the completion of a row is a good one. Raise RequestError for other labels than true and false, 1 and 0.

    A table of text (CSV) writes true and false in letters.
    """
    value: Any = record[LABEL]
    shown = value
    if isinstance(value, str):
        value = {"true": True, "1": True, "false": False, "0": False}.get(value.strip().lower())
    if value is None or value not in (True, False):
        raise RequestError(
            f"{place}: column {LABEL!r} holds {_shorten(shown)}; write true for a good completion, or false for a bad one"
        )
    return bool(value)


def _read_margin(record: Mapping[str, Any], place: str) -> float | None:
    """Return the margin of a pair, or None if the row has none. Raise RequestError for other values than finite numbers."""
    value: Any = record.get(MARGIN)
    if _is_empty(value):
        return None
    try:
        margin = float(value)
    except (TypeError, ValueError):
        margin = math.nan
    if isinstance(value, bool) or not math.isfinite(margin):
        raise RequestError(f"{place}: column {MARGIN!r} holds {_shorten(value)}; it must be a number")
    return margin


def _pair_of_texts(prompt: str | None, chosen: str, rejected: str, place: str) -> PreferencePair:
    if prompt is None:
        num_shared = _num_shared(chosen, rejected)
        if num_shared == 0:
            raise _no_shared_prompt(place)
        if chosen[num_shared] != rejected[num_shared] and chosen[num_shared - 1] == " ":  # a word begins with its space
            num_shared -= 1
        prompt = chosen[:num_shared]
        chosen = chosen[num_shared:]
        rejected = rejected[num_shared:]
    return PreferencePair(
        place=place,
        chosen=PromptCompletion(place=place, prompt=prompt, completion=chosen),
        rejected=PromptCompletion(place=place, prompt=prompt, completion=rejected),
    )


def _pair_of_chats(
    prompt: str | list[Any] | None,
    chosen: list[Any],
    rejected: list[Any],
    record: Mapping[str, Any],
    place: str,
    *,
    needs_prompt: bool,
) -> PreferencePair:
    answers = [_read_messages(chosen, "chosen", place), _read_messages(rejected, "rejected", place)]
    if isinstance(prompt, list):
        before = _read_messages(prompt, "prompt", place)
    elif prompt is None and not needs_prompt:
        before = []
    else:
        num_shared = _num_shared(*answers)
        if num_shared == 0 and prompt is None:
            raise _no_shared_prompt(place)
        before = answers[0][:num_shared]
        answers = [messages[num_shared:] for messages in answers]
        if prompt is not None and all(message.get("content") != prompt for message in before):
            raise RequestError(
                f"{place}: prompt holds the text {_shorten(prompt)}, which is no message that chosen and rejected begin with; "
                "write the prompt as a list of messages, or remove the column"
            )
    if any(message.get(WEIGHT) == 0 for messages in answers for message in messages):
        raise RequestError(f"{place} has weight 0 in an answer, and answers are compared as a whole; leave the weight out")
    if before:
        before = _with_system(before, record.get(SYSTEM), place)
    else:
        answers = [_with_system(messages, record.get(SYSTEM), place) for messages in answers]
    inputs = _template_inputs(record, place)
    first, second = (
        Chat(place=place, messages=before + messages, num_prompt_messages=len(before), **inputs) for messages in answers
    )
    return PreferencePair(place=place, chosen=first, rejected=second)


def _num_shared(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return how many items two sequences begin with together. At least one item of each is left, as in TRL."""
    shortest = min(len(first), len(second))
    return next((index for index in range(shortest) if first[index] != second[index]), shortest - 1)


def _no_shared_prompt(place: str) -> RequestError:
    return RequestError(
        f"{place} has no column 'prompt', and chosen and rejected do not begin with the same prompt; rename the prompt's column "
        "to prompt, name it in a YAML file of data sets (key columns), or leave the row out"
    )


def _refuse_template_inputs(record: Mapping[str, Any], place: str) -> None:
    """Raise RequestError if a row of two texts has something that only a chat template uses."""
    name = next((name for name in (SYSTEM, TOOLS, FUNCTIONS, TEMPLATE_ARGUMENTS) if not _is_empty(record.get(name))), None)
    if name is not None:
        raise RequestError(
            f"{place} has {name!r}, which a prompt and a completion of plain text do not use; write them as lists of messages, "
            "or add --chat-template, which writes them as turns"
        )


def _read_alpaca(record: Mapping[str, Any], place: str) -> list[Message]:
    """Return the turns of an Alpaca row: the instruction and the input are one message of the user, a line each."""
    for name in ("instruction", "input", "output"):
        _check_text_or_null(record.get(name), name, place)
    messages = []
    for turn in _json_list([] if _is_empty(record.get("history")) else record["history"], "history", place):
        if not isinstance(turn, list) or len(turn) != 2 or not all(isinstance(text, str) for text in turn):
            raise RequestError(f"{place}: column 'history' holds {_shorten(turn)}; it must hold pairs [question, answer]")
        messages += _pair(turn[0], turn[1])
    question = "\n".join(text for text in (record["instruction"], record.get("input")) if text)
    return messages + _pair(question, record["output"] or "")


def _pair(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": ASSISTANT, "content": answer}]


def _with_system(messages: list[Message], system: Any, place: str) -> list[Message]:
    """Return the messages after the system message of the row's own column."""
    _check_text_or_null(system, SYSTEM, place)
    if not system:
        return messages
    if messages[0]["role"] == SYSTEM:
        raise RequestError(f"{place} has a column 'system' and a first message of the system; give one of the two")
    return [{"role": SYSTEM, "content": system}, *messages]


def _template_inputs(record: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the tools and the arguments of a row's chat template."""
    tools = _read_tools(record, place)
    arguments = record.get(TEMPLATE_ARGUMENTS)
    arguments = {} if _is_empty(arguments) else decode_json(arguments)
    if not isinstance(arguments, dict):
        raise RequestError(f"{place}: column {TEMPLATE_ARGUMENTS!r} holds {_shorten(arguments)}; it must be an object")
    return {"tools": tools, "template_arguments": arguments}


def _read_tools(record: Mapping[str, Any], place: str) -> list[Any] | None:
    """Return the tools of a row, or None. Functions are tools without their type."""
    column = TOOLS if _is_empty(record.get(FUNCTIONS)) else FUNCTIONS
    tools = record.get(column)
    if column == FUNCTIONS and not _is_empty(record.get(TOOLS)):
        raise RequestError(f"{place} has the columns {TOOLS} and {FUNCTIONS}; give one of the two")
    if _is_empty(tools):
        return [] if isinstance(tools, list) else None
    tools = [decode_json(tool) for tool in _json_list(tools, column, place)]
    other = next((tool for tool in tools if not isinstance(tool, dict)), None)
    if other is not None:
        raise RequestError(f"{place}: column {column!r} holds {_shorten(other)}; it must hold JSON schemas of functions")
    return tools if column == TOOLS else [{"type": FUNCTION, FUNCTION: function} for function in tools]


def _read_messages(value: Any, column: str, place: str) -> list[Message]:
    """Return the messages of a column: a list, or a list that is written as JSON."""
    entries = [decode_json(entry) for entry in _json_list(value, column, place)]
    if not entries:
        raise RequestError(f"{place}: column {column!r} has no messages; write at least one, or leave the row out")
    return [_read_message(entry, f"{place}: message {number} of {column}") for number, entry in enumerate(entries, start=1)]


def _read_message(entry: Any, name: str) -> Message:
    """Return a message with a role, and a content of one text, from OpenAI's or ShareGPT's form."""
    if not isinstance(entry, dict):
        raise RequestError(f'{name} is {_shorten(entry)}; write {{"role": "user", "content": ".."}}')
    message: Message = _without_nulls(entry)
    if "role" not in message and ("from" in message or "value" in message):
        message = _read_turn(message, name)
    if FUNCTION_CALL in message or message.get("role") == FUNCTION:
        message = _with_tool_calls(message, name)
    if "role" not in message:
        raise RequestError(f"{name} has no role; its fields are {join_names(message)}; give a role: {', '.join(ROLES)}")
    if message["role"] not in ROLES:
        raise RequestError(f"{name} has role {_shorten(message['role'])}; use {', '.join(ROLES)}")
    message = {key: value for key, value in message.items() if key == "content" or not _is_empty_list(value)}
    content = message.get("content")
    if isinstance(content, list):
        content = [_without_nulls(part) if isinstance(part, dict) else part for part in content]
        other_part = describe_other_part(content)
        if other_part is not None:
            raise RequestError(
                f"{name} has a part {other_part}, and only text is trained on; leave the row out, "
                'or write parts as {"type": "text", "text": ".."}'
            )
        message["content"] = "".join(part["text"] for part in content)
    elif not isinstance(content, str) and not (content is None and message.get(TOOL_CALLS)):
        raise RequestError(f"{name} has content {_shorten(content)}; it must be text")
    _check_weight(message, name)
    if TOOL_CALLS in message:
        message[TOOL_CALLS] = _read_tool_calls(message[TOOL_CALLS], name)
    return message


def _read_turn(turn: Message, name: str) -> Message:
    """Return a ShareGPT turn as a message. A turn ``function_call`` holds a call, or a list of calls, as JSON."""
    missing = next((key for key in ("from", "value") if key not in turn), None)
    if missing is not None:
        raise RequestError(f'{name} has no {missing!r}; write {{"from": "human", "value": ".."}}, or leave the row out')
    speaker = turn["from"]
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        raise RequestError(f"{name} is from {_shorten(speaker)}; use {', '.join(SPEAKERS)}")
    others = {key: value for key, value in turn.items() if key not in ("from", "value")}
    if speaker != FUNCTION_CALL:
        return {"role": SPEAKERS[speaker], "content": turn["value"], **others}
    calls = decode_json(turn["value"])
    calls = calls if isinstance(calls, list) else [calls]
    return {"role": ASSISTANT, TOOL_CALLS: [{"type": "function", "function": call} for call in calls], **others}


def _with_tool_calls(message: Message, name: str) -> Message:
    """Return a message of OpenAI's functions as one of its tools."""
    converted = {key: value for key, value in message.items() if key != FUNCTION_CALL}
    call = message.get(FUNCTION_CALL)
    call = _without_nulls(call) if isinstance(call, dict) else call  # Arrow writes no call as an object of nulls
    if not _is_empty(call):
        if not _is_empty(message.get(TOOL_CALLS)):
            raise RequestError(f"{name} has {FUNCTION_CALL} and {TOOL_CALLS}; give one of the two")
        converted[TOOL_CALLS] = [{"type": FUNCTION, FUNCTION: call}]
    if message.get("role") == FUNCTION:
        converted["role"] = "tool"
    return converted


def _check_weight(message: Message, name: str) -> None:
    weight = message.get(WEIGHT)
    is_assistant = message["role"] == ASSISTANT
    if weight is None or weight == 0 or (is_assistant and weight == 1):
        return
    raise RequestError(
        f"{name} has weight {_shorten(weight)}; an assistant's message may have 0 (not learned) or 1, and others only 0"
    )


def _read_tool_calls(calls: Any, name: str) -> list[Any]:
    """Return the tool calls without their null fields, such as an ``id`` that a log leaves open. Arguments may hold nulls."""
    cleaned = []
    for call in calls if isinstance(calls, list) else [None]:
        fields = _without_nulls(call) if isinstance(call, dict) else {}
        function = fields.get("function", fields)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(
                f'{name} has tool_calls {_shorten(calls)}; write [{{"type": "function", "function": {{"name": "..", '
                '"arguments": {..}}}]'
            )
        cleaned.append({**fields, "function": _without_nulls(function)} if "function" in fields else fields)
    return cleaned


def _without_nulls(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}


def _check_text_or_null(value: Any, column: str, place: str) -> None:
    if value is not None and not isinstance(value, str):
        raise RequestError(f"{place}: column {column!r} holds {_shorten(value)}; it must be text")


def _json_list(value: Any, column: str, place: str) -> list[Any]:
    entries = decode_json(value)
    if not isinstance(entries, list):
        advice = "it must be a list"
        if isinstance(value, str) and value.lstrip().startswith("[{'"):
            advice = "it is a list as Python prints it; write it as JSON (json.dumps), or save the table as Parquet"
        raise RequestError(f"{place}: column {column!r} holds {_shorten(value)}; {advice}")
    return entries


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | dict) and not value)


def _is_empty_list(value: Any) -> bool:
    """Return whether a field holds an empty list or object, as logs and Arrow write ``tool_calls`` that are none."""
    return isinstance(value, list | dict) and not value


def _is_blank(value: Any) -> bool:
    """Return whether an answer is missing: null, an empty list, or white space alone."""
    return _is_empty(value) or (isinstance(value, str) and value.isspace())


def _decode_messages(value: Any) -> Any:
    """Return the messages that a text is the JSON of, or else the value itself. A table of text (CSV) holds messages so."""
    entries = decode_json(value)
    if not isinstance(entries, list) or not entries:
        return value
    is_chat = all(isinstance(entry, dict) and ("role" in entry or {"from", "value"} <= entry.keys()) for entry in entries)
    return entries if is_chat else value


def decode_json(value: Any) -> Any:
    """Return the object or the list that a text is the JSON of, or else the value itself."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _shorten(value: Any) -> str:
    return json.dumps(value, default=str)[:60]
