"""Keep the texts of messages from becoming control tokens, such as the token that ends a turn.

A tokenizer reads the text of a control token as that token, also where a user typed it. In its place, the chat template gets the
text of another control token, which the chat has nowhere else. Then the id of this stand-in becomes those of plain text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from upshift.errors import RequestError
from upshift.inference.generation.media import has_media

# The fields of a message that people, tools or the model write. Some templates write the ids of calls into the prompt.
TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "thinking", "name", "tool_call_id")

Read = Callable[[list[dict[str, Any]], Any], list[int]]  # returns the token ids of a chat with its tools


def read_as_text(messages: Sequence[Mapping[str, Any]], tools: Any, tokenizer: Any, read: Read) -> list[int]:
    """Return the token ids of a chat in which control tokens in messages and in ``tools`` are plain text.

    ``tools`` has the descriptions and schemas of tools as ``read`` takes them, or None. Raise RequestError if the tokenizer has
    too few other control tokens to stand in for those in the texts."""
    chat = [dict(message) for message in messages]
    control_ids = find_control_ids(tokenizer)
    if not control_ids:
        return read(chat, tools)
    pattern = re.compile("|".join(map(re.escape, sorted(control_ids, key=len, reverse=True))))
    typed: list[str] = []

    def find(text: str) -> str:
        typed.extend(pattern.findall(text))
        return text

    for message in chat:
        _change_texts(message, find)
    _change_values(tools, find)
    if not typed:
        return read(chat, tools)
    if has_media(chat):  # the inputs beside its tokens, such as their kinds, are for as many tokens
        raise RequestError(f"a chat with a picture has the text {typed[0]}, which is a control token of the model; leave it out")
    written_ids = set(read(chat, tools))
    unused = [token for token, id in control_ids.items() if id not in written_ids]
    kinds = list(dict.fromkeys(typed))
    if len(unused) < len(kinds):
        raise RequestError(f"a message has the text {kinds[-1]}, which is a control token of the model; leave it out")
    stand_ins = dict(zip(kinds, unused, strict=False))

    def replace(text: str) -> str:
        return pattern.sub(lambda match: stand_ins[match[0]], text)

    changed = [_change_texts(message, replace) for message in chat]
    plain_ids = {control_ids[stand_ins[token]]: _encode_as_text(tokenizer, token, set(control_ids.values())) for token in kinds}
    return [id for token in read(changed, _change_values(tools, replace)) for id in plain_ids.get(token, [token])]


def find_control_ids(tokenizer: Any) -> dict[str, int]:
    """Return the ids of a tokenizer's control tokens by their texts. The token of unknown words is none: any text may have it."""
    added = {token.content: id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    named = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    return {token: id for token, id in {**named, **added}.items() if token != tokenizer.unk_token}


def _change_texts(message: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """Return a message with all its texts changed, and those in the arguments and the ids of its calls."""
    changed = {
        name: change(value) if name in TEXT_FIELDS and isinstance(value, str) else value for name, value in message.items()
    }
    if isinstance(message.get("content"), list):
        changed["content"] = [{**part, "text": change(part["text"])} if "text" in part else part for part in message["content"]]
    if message.get("tool_calls"):
        changed["tool_calls"] = [_change_call(call, change) for call in message["tool_calls"]]
    return changed


def _change_call(call: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    arguments = json.loads(call["function"]["arguments"] or "{}")
    changed = json.dumps(_change_values(arguments, change), ensure_ascii=False)
    return _change_id(call, change) | {"function": {**call["function"], "arguments": changed}}


def _change_id(call: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    return call | {"id": change(call["id"])} if isinstance(call.get("id"), str) else call


def _change_values(value: Any, change: Callable[[str], str]) -> Any:
    """Return a value of JSON with all its texts changed."""
    if isinstance(value, dict):
        return {change(name): _change_values(item, change) for name, item in value.items()}
    if isinstance(value, list):
        return [_change_values(item, change) for item in value]
    return change(value) if isinstance(value, str) else value


def _encode_as_text(tokenizer: Any, token: str, control_ids: set[int]) -> list[int]:
    """Return the ids of a control token's text. None of them is a control token.

    Some vocabularies have the text as a whole, so its first character is encoded by itself."""
    for texts in ([token], [token[:1], token[1:]]):
        ids = [id for text in texts for id in tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids]
        if not control_ids & set(ids):
            return ids
    raise RequestError(f"a message has the text {token}, which the model reads only as a control token; leave it out")
