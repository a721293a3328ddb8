"""Keep the texts of messages from becoming control tokens, such as the token that ends a turn.

A tokenizer reads the text of a control token as that token, also where a user typed it. In its place, the chat template gets the
text of another control token, which the chat has nowhere else. Then the id of this stand-in becomes those of plain text.

Two texts can also become a control token where the template joins them. A chat with such texts is read again with neutral
characters at their borders. If it then has fewer control tokens, stand-ins take the places of these characters, too."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from upshift.errors import RequestError
from upshift.inference.generation.media import IMAGE, has_media

# The fields of a message that people, tools or the model write. Some templates write the ids of calls into the prompt.
TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "thinking", "name", "tool_call_id")

# The fixed keys of a tool and of JSON schemas. Those of the first line hold parts under names that the user chose. Those of the
# second line hold values of the user.
NAMING_KEYWORDS = frozenset({"properties", "patternProperties", "dependentSchemas", "dependentRequired", "$defs", "definitions"})
VALUE_KEYWORDS = frozenset({"enum", "const", "default", "examples", "required"})
KEYWORDS = frozenset(
    (
        *("type", "function", "name", "description", "parameters", "strict", "title", "format", "pattern", "items"),
        *("prefixItems", "contains", "additionalProperties", "propertyNames", "anyOf", "oneOf", "allOf", "not", "if"),
        *("then", "else", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength"),
        *("maxLength", "minItems", "maxItems", "uniqueItems", "minContains", "maxContains", "minProperties"),
        *("maxProperties", "unevaluatedItems", "unevaluatedProperties", "$ref", "$id", "$schema", "$anchor", "$comment"),
        *("deprecated", "readOnly", "writeOnly", "nullable"),
    )
)

TAGS = re.compile(r"</?[A-Za-z_]+>")  # templates cut a content at such tags
NEUTRAL = "\N{WORD JOINER}"  # part of no control token


class Chat(NamedTuple):
    """The input of a chat template: messages, the descriptions of tools or None, and the variables of the request."""

    messages: list[dict[str, Any]]
    tools: Any
    variables: dict[str, Any]

    def change(self, change: Callable[[str], str]) -> Chat:
        """Return the chat with all texts changed that people, tools or the model write."""
        messages = [_change_texts(message, change) for message in self.messages]
        tools = [_change_schema(tool, change) for tool in self.tools] if isinstance(self.tools, list) else self.tools
        return Chat(messages, tools, {name: _change_values(value, change) for name, value in self.variables.items()})

    def leave_out_pictures(self) -> Chat:
        """Return the chat with parts for its pictures that have no data. Reading it takes no time for the pictures."""
        messages = [
            message | {"content": [{"type": part["type"]} if part.get("type") == IMAGE else part for part in message["content"]]}
            if isinstance(message.get("content"), list)
            else message
            for message in self.messages
        ]
        return self._replace(messages=messages)


Read = Callable[[list[dict[str, Any]], Any, dict[str, Any]], list[int]]  # returns the token ids of the parts of a Chat


def read_as_text(
    messages: Sequence[Mapping[str, Any]], tools: Any, tokenizer: Any, read: Read, variables: Mapping[str, Any] | None = None
) -> list[int]:
    """Return the token ids of a chat in which control tokens in messages, in ``tools`` and in ``variables`` are plain text.

    This holds for texts that become a control token only where the template joins them, too. ``tools`` has the descriptions and
    schemas of tools as ``read`` takes them, or None. Raise RequestError if the tokenizer has too few other control tokens to
    stand in for those in the texts."""
    chat = Chat([dict(message) for message in messages], tools, dict(variables or {}))
    control_ids = find_control_ids(tokenizer)
    if not control_ids:
        return read(*chat)
    joints = _joints_of(tuple(control_ids))
    texts: list[str] = []

    def collect(text: str) -> str:
        texts.append(text)
        return text

    chat.change(collect)
    typed = list(dict.fromkeys(token for text in texts for token in joints.pattern.findall(text)))
    found_joints = [(text[index], tokens) for text in texts for index, tokens in joints.find(text).items()]
    borders = list(dict.fromkeys(character for character, _ in found_joints))
    possible_ids = {control_ids[token] for _, tokens in found_joints for token in tokens}
    if not (typed or borders):
        return read(*chat)
    known_ids = set(control_ids.values())

    def is_joined(chat: Chat, ids: list[int]) -> bool:
        """Return whether a chat has control tokens that it lacks where its texts have neutral characters at their borders.

        It is read again only if it has one of those that the borders may be a part of."""
        if not possible_ids.intersection(ids):
            return False
        neutral = chat.change(lambda text: joints.replace(text, dict.fromkeys(typed, NEUTRAL), dict.fromkeys(borders, NEUTRAL)))
        return bool(Counter(id for id in ids if id in known_ids) - Counter(read(*neutral)))

    if has_media(chat.messages):  # the inputs beside its tokens, such as their kinds, are for as many tokens
        if typed:
            raise RequestError(
                f"a chat with a picture has the text {typed[0]}, which is a control token of the model; leave it out"
            )
        outline = chat.leave_out_pictures()
        if is_joined(outline, read(*outline)):
            raise RequestError(
                "a chat with a picture has texts that become a control token of the model where the chat template joins them; "
                "leave parts of control tokens out"
            )
        return read(*chat)
    written = read(*chat)
    stand_ins = StandIns(control_ids, set(written), tokenizer)
    found = stand_ins.read(chat, read, joints, typed, []) if typed else written
    return stand_ins.read(chat, read, joints, typed, borders) if is_joined(chat, found) else found


class StandIns(NamedTuple):
    """The control tokens that a chat has nowhere, so that they can stand for texts. ``written_ids`` are those that it has."""

    control_ids: dict[str, int]
    written_ids: set[int]
    tokenizer: Any

    def read(self, chat: Chat, read: Read, joints: Joints, typed: list[str], borders: list[str]) -> list[int]:
        """Return the token ids of a chat in which these control tokens, and these characters at joints, are plain text."""
        unused = [token for token, id in self.control_ids.items() if id not in self.written_ids]
        kinds = [*typed, *borders]
        if len(unused) < len(kinds):
            reason = (
                "becomes a control token where the chat template joins texts" if borders else "is a control token of the model"
            )
            raise RequestError(f"a message has the text {kinds[-1]}, which {reason}; leave it out")
        names = dict(zip(kinds, unused, strict=False))
        own = {token: names[token] for token in typed}
        other = {character: names[character] for character in borders}
        changed = chat.change(lambda text: joints.replace(text, own, other))
        known_ids = set(self.control_ids.values())
        plain_ids = {self.control_ids[names[kind]]: _encode_as_text(self.tokenizer, kind, known_ids) for kind in kinds}
        return [id for token in read(*changed) for id in plain_ids.get(token, [token])]


class Joints:
    """Finds the places where texts may become a control token with what a template writes before or after them."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self.pattern = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))
        self._tokens = tokens
        self._beginnings: defaultdict[str, set[str]] = defaultdict(set)
        self._endings: defaultdict[str, set[str]] = defaultdict(set)
        for token in tokens:
            for cut in range(1, len(token)):
                self._beginnings[token[:cut]].add(token)
                self._endings[token[cut:]].add(token)
        self._all = "\0".join(tokens)
        self._longest = max(map(len, tokens))

    def find(self, text: str) -> dict[int, set[str]]:
        """Return the indices of the characters whose replacement keeps a text from becoming a part of a control token, in their
        order, each with these tokens."""
        cuts = [0, *(index for match in TAGS.finditer(text) for index in match.span()), len(text)]
        found: defaultdict[int, set[str]] = defaultdict(set)
        for start, end in [(0, len(text)), *zip(cuts[::2], cuts[1::2], strict=True)]:
            piece = text[start:end]
            start += len(piece) - len(piece.lstrip())
            for index, tokens in self._find_in(piece.strip()):
                found[start + index] |= tokens
        return dict(sorted(found.items()))

    def _find_in(self, piece: str) -> list[tuple[int, set[str]]]:
        if not piece or self.pattern.fullmatch(piece):
            return []
        if piece in self._all:
            return [(0, {token for token in self._tokens if piece in token})]
        sizes = range(1, min(self._longest, len(piece)))
        begun = [(size, self._beginnings[piece[-size:]]) for size in sizes if piece[-size:] in self._beginnings]
        ended = [(size, self._endings[piece[:size]]) for size in sizes if piece[:size] in self._endings]
        found = [(len(piece) - begun[-1][0], set[str]().union(*(tokens for _, tokens in begun)))] if begun else []
        return found + ([(ended[-1][0] - 1, set[str]().union(*(tokens for _, tokens in ended)))] if ended else [])

    def replace(self, text: str, tokens: Mapping[str, str], characters: Mapping[str, str]) -> str:
        """Return a text with other control tokens, and with other characters at its joints."""
        parts = []
        start = 0
        for index in [*(self.find(text) if characters else []), len(text)]:
            parts.append(self.pattern.sub(lambda match: tokens[match[0]], text[start:index]))
            parts += [characters[text[index]]] if index < len(text) else []
            start = index + 1
        return "".join(parts)


@lru_cache(maxsize=4)
def _joints_of(tokens: tuple[str, ...]) -> Joints:
    return Joints(tokens)


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


def _change_schema(value: Any, change: Callable[[str], str]) -> Any:
    """Return the description of a tool, or a JSON schema, with the texts changed that people write, and with its keywords."""
    if isinstance(value, list):
        return [_change_schema(item, change) for item in value]
    if not isinstance(value, dict):
        return _change_values(value, change)
    changed: dict[str, Any] = {}
    for name, item in value.items():
        if name in NAMING_KEYWORDS and isinstance(item, dict):
            changed[name] = {change(key): _change_schema(part, change) for key, part in item.items()}
        elif name in VALUE_KEYWORDS:
            changed[name] = _change_values(item, change)
        else:
            changed[name if name in KEYWORDS else change(name)] = _change_schema(item, change)
    return changed


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
