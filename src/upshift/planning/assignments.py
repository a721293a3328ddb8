"""Read ``field=value`` texts, such as those of --set: each names a known field, and no field gets two different values."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from upshift.errors import RequestError


def split_assignment(text: str, known: Collection[str], *, option: str = "--set") -> tuple[str, str]:
    """Return the field and the value of ``text``. Raises RequestError."""
    name, equals, value = text.partition("=")
    if not equals and name in known:
        raise RequestError(f"{option} {text!r} lacks a '='; write field=value, such as {name}=VALUE")
    if not equals or name not in known:
        raise RequestError(f"{option} {text!r} names no plan field; use field=value with one of {', '.join(known)}")
    return name, value


def read_assignments(texts: tuple[str, ...], known: Collection[str], parse: Callable[[str, str], Any]) -> dict[str, Any]:
    """Return for each field what ``parse`` makes of the field and its value. Raises RequestError."""
    found: dict[str, Any] = {}
    for text in texts:
        name, value = split_assignment(text, known)
        parsed = parse(name, value)
        if found.setdefault(name, parsed) != parsed:
            raise RequestError(f"--set fixes {name} twice, to {found[name]} and to {parsed}; give one of them")
    return found
