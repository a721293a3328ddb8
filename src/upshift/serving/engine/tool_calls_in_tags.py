"""Read and force tool calls whose arguments are text between tags, as in the templates of Qwen 3.5 and GLM 4.5.

The template shows the tags, as it shows the form of calls in JSON (``ToolTemplate``). The JSON schema of a tool says whether a
value is a text or JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from os.path import commonprefix
from typing import Any, NamedTuple

from upshift.inference.generation.grammar import WHITESPACE

Render = Callable[[list[dict[str, Any]]], str | None]  # the arguments of one or two calls -> the answer with these calls
NAMES = ("zqx_first", "zqx_second")  # of the calls that ``Render`` writes; no template has these texts
KEYS = ("zqx_a", "zqx_c")
VALUES = ("zqx_b", "zqx_d")
NUMBER = 90909  # a value that is no text
TEXT_RULE = r"TAGGED_TEXT: /([^<]|<[^\/])*/"  # any text without a closing tag


class Tags(NamedTuple):
    """The texts in a call: name + ``open`` + key + ``separator`` + value + ``next`` + key ... + ``close``.

    A call without arguments is name + ``close_empty``."""

    open: str
    separator: str
    next: str
    close: str
    close_empty: str


class TaggedForm(NamedTuple):
    """The form of calls between tags: ``begin`` before the first name, ``between`` two calls, and ``end`` after the last one."""

    tags: Tags
    begin: str
    between: str | None
    end: str


def find_tagged_form(render: Render) -> TaggedForm | None:
    """Return the form of calls between tags, or None if the template writes no such calls."""
    empty, one, two = (render([dict(zip(KEYS[:count], VALUES[:count], strict=True))]) for count in range(3))
    number = render([{KEYS[0]: NUMBER}])
    if empty is None or one is None or two is None or number != one.replace(VALUES[0], str(NUMBER)):
        return None
    begin, _, rest = one.partition(NAMES[0])
    opening, _, rest = rest.partition(KEYS[0])
    separator, has_value, tail = rest.partition(VALUES[0])
    following = two.partition(VALUES[0])[2].partition(KEYS[1])[0]
    same_begin = empty.startswith(begin + NAMES[0]) and two.startswith(one[: len(one) - len(tail)])
    if not (has_value and same_begin and all(text.strip() for text in (begin, opening, separator, following, tail))):
        return None
    close = tail
    between = None
    several = render([{KEYS[0]: VALUES[0]}, {KEYS[1]: VALUES[1]}])
    if several is not None and NAMES[1] in several:
        between = several.partition(VALUES[0])[2].partition(NAMES[1])[0]
        shared = commonprefix([tail, between])
        close = shared[: shared.rfind(">") + 1] or shared
        between = between[len(close) :]
    end = tail[len(close) :]
    close_empty = empty[len(begin + NAMES[0]) :].removesuffix(end)
    return TaggedForm(Tags(opening, separator, following, close, close_empty), begin, between, end)


def read_tagged_call(tags: Tags, text: str, schemas: Mapping[str, Any]) -> tuple[str, str, int] | None:
    """Return the name, the arguments as JSON, and the end of the call at the beginning of a text. Return None if it is not
    complete."""
    first = _find_first(text, (tags.open, tags.close_empty))
    if first is None:
        return None
    name = text[: first.start].strip()
    properties = _properties(schemas.get(name, {}))
    arguments: dict[str, Any] = {}
    place = first.end
    is_open = first.number == 0
    while is_open:
        separator = _find_first(text, (tags.separator,), place)
        if separator is None:
            return None
        closing = _find_first(text, (tags.next, tags.close), separator.end)
        if closing is None:
            return None
        key = text[place : separator.start].strip()
        value = _trim(text[separator.end : closing.start], before=tags.separator, after=tags.close)
        arguments[key] = _read_value(value, properties.get(key, {}))
        place = closing.end
        is_open = closing.number == 0
    return name, json.dumps(arguments, ensure_ascii=False), place


class Marker(NamedTuple):
    """A marker in a text: its number among the markers, and its place without white space at its ends."""

    number: int
    start: int
    end: int


def _find_first(text: str, markers: tuple[str, ...], place: int = 0) -> Marker | None:
    """Return the first marker from ``place`` on, or None without any."""
    candidates = []
    for index, marker in enumerate(markers):
        stripped = marker.strip()
        start = text.find(stripped, place)
        if start >= 0:
            candidates.append((start, index, start + len(stripped)))
    if not candidates:
        return None
    start, index, end = min(candidates)
    return Marker(index, start, end)


def _trim(value: str, *, before: str, after: str) -> str:
    """Return a value without the white space that belongs to the tags around it."""
    value = value.removeprefix(before[len(before.rstrip()) :])
    return value.removesuffix(after[: len(after) - len(after.lstrip())])


def _properties(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schemas of the arguments by name, with local references resolved."""
    properties = {}
    for name, field in schema.get("properties", {}).items():
        target = field
        reference = field.get("$ref", "") if isinstance(field, dict) else ""
        if reference.startswith("#/"):
            target = schema
            for key in reference[2:].split("/"):
                target = target.get(key, {}) if isinstance(target, dict) else {}
        properties[name] = target if isinstance(target, dict) else {}
    return properties


def _is_text(schema: Mapping[str, Any]) -> bool:
    """Return whether a value is a text and no other JSON."""
    return schema.get("type") == "string" or all(isinstance(value, str) for value in schema.get("enum", [None]))


def _read_value(text: str, schema: Mapping[str, Any]) -> Any:
    """Return a value: the text itself if the schema wants one or the text is not JSON, else the JSON value."""
    if _is_text(schema):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def tagged_call_rules(tags: Tags, index: int, schema: Mapping[str, Any], quote: Callable[[str], str]) -> tuple[str, list[str]]:
    """Return what follows the name of a tool in a grammar of llguidance, and the rules that it uses.

    The arguments come in the order of the schema: those that are required, then those that are not. ``index`` tells the rules of
    several tools apart. ``quote`` writes a text as a literal."""
    properties = _properties(schema)
    required = [name for name in properties if name in schema.get("required", [])]
    optional = [name for name in properties if name not in required]
    rules = [TEXT_RULE] if index == 0 else []
    values = {}
    for number, (name, field) in enumerate(properties.items()):
        value, rule = _value_rule(f"value{index}_{number}", field, schema, quote)
        rules += rule
        values[name] = f"{quote(name + tags.separator)} {value}"
    if not properties:
        return quote(tags.close_empty), rules
    first, *others = [*required, *optional]
    call = f"{quote(tags.open)} {values[first]}"
    for name in others:
        part = f"{quote(tags.next)} {values[name]}"
        call += f" {part}" if name in required else f" ({part})?"
    call = f"{call} {quote(tags.close)}"
    return (call if required else f"({call} | {quote(tags.close_empty)})"), rules


def _value_rule(
    name: str, field: Mapping[str, Any], schema: Mapping[str, Any], quote: Callable[[str], str]
) -> tuple[str, list[str]]:
    """Return the symbol of a value, and the rules that define it."""
    if _is_text(field):
        choices = field.get("enum") or ([field["const"]] if "const" in field else [])
        return (f"({' | '.join(map(quote, choices))})" if choices else "TAGGED_TEXT"), []
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    rule = {**field, **definitions, "x-guidance": {"whitespace_pattern": WHITESPACE}}
    return name, [f"{name}: %json {json.dumps(rule)}"]
