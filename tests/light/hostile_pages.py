"""Put a hostile text into each text of a page's content, one at a time, and look at what the page makes of it."""

from __future__ import annotations

import copy
import html
import json
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from page_elements import Elements

from upshift.value import Value

HOSTILE = "<script>boom()</script><img src=x onerror='boom()'>\"&'"
HARMLESS = "harmless-text of words"  # as many words

Path = tuple[str | int, ...]
Content = TypeVar("Content", bound=Value)


def text_paths(data: Any, path: Path = ()) -> Iterator[Path]:
    """Yield where the texts of JSON data are."""
    if isinstance(data, str):
        yield path
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield from text_paths(value, (*path, key))


def with_text(content: Content, path: Path, text: str) -> Content | None:
    """Return the content with another text at ``path``, or None where only some words are allowed."""
    data = copy.deepcopy(json.loads(content.to_json()))
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = text
    try:
        return type(content).model_validate(data)
    except ValueError:
        return None


def shape(page: Elements) -> list[tuple[str, list[str]]]:
    """Return the elements of a page and the names of their attributes."""
    return [(tag, sorted(attributes)) for tag, attributes in page.elements]


def data_and_code(page: Elements) -> tuple[list[str], list[str]]:
    """Return the JSON of figures and words, and the scripts that run."""
    is_data = [attributes.get("type") == "application/json" for tag, attributes in page.elements if tag == "script"]
    pairs = list(zip(page.scripts, is_data, strict=True))
    return [text for text, data in pairs if data], [text for text, data in pairs if not data]


def is_shown(page: Elements, text: str) -> bool:
    """Return whether a text is on the page as written: in an element, in an attribute, or in a label of a plot."""
    attributes = [value for _, attributes in page.elements for value in attributes.values() if value]
    labels = json.dumps(html.escape(text, quote=False))[1:-1]
    plots = json.dumps(json.loads(page.scripts[0])) if page.scripts else ""
    return text in page.words or any(text in value for value in attributes) or labels in plots


def assert_is_text(hostile: str, harmless: str, where: object = "") -> bool:
    """Assert that a hostile text made no element, no attribute and no script; return whether the page shows it."""
    page, other = Elements(hostile), Elements(harmless)
    assert shape(page) == shape(other), f"a text became markup: {where}"
    data, code = data_and_code(page)
    assert code == data_and_code(other)[1], f"a text got into a script: {where}"
    assert not [text for text in data if "<" in text], f"a text in the data of figures can end its element: {where}"
    return is_shown(page, HOSTILE)


def texts_not_shown(content: Value, render: Callable[[Any], str]) -> tuple[int, set[str | int]]:
    """Try every free text of the content. Return how many there are, and the fields whose text is nowhere on the page."""
    count, hidden = 0, set[str | int]()
    for path in text_paths(json.loads(content.to_json())):
        hostile, harmless = with_text(content, path, HOSTILE), with_text(content, path, HARMLESS)
        if hostile is None or harmless is None:
            continue
        count += 1
        if not assert_is_text(render(hostile), render(harmless), path):
            hidden.add(path[-1])
    return count, hidden
