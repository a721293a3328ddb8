"""Read ``field=value`` texts, such as those of --set, for plans of training and of inference.

Each text names a known field, no field gets two different values, and each value is one that the field may have here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

from pydantic import ValidationError

from upshift.errors import RequestError
from upshift.value import Value, first_problem


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


def parse_field(kind: type[Value], others: dict[str, Any], name: str, text: str, *, valid: str, option: str = "--set") -> Any:
    """Return the value that ``text`` is for a field of ``kind``. Raise RequestError that names the option.

    Args:
        kind: the class of the plan.
        others: values of the fields that ``kind`` cannot do without.
        name: the field.
        text: as the user gave it.
        valid: the end of the refusal, which says what is valid.
        option: the option that the text is of.
    """
    try:
        return getattr(kind.model_validate({**others, name: text}), name)
    except ValidationError as error:
        raise RequestError(f"{option} {first_problem(kind, error)}{valid}") from None


def one_of(values: Sequence[Any], otherwise: str = "") -> str:
    """Return the end of a refusal: the values that a field may have, or ``otherwise`` if there is no list of them."""
    return f"; use one of {', '.join(map(str, values))}" if values else otherwise


def check_legal(fixed: dict[str, Any], legal: dict[str, list[Any]], why: Callable[[str], str]) -> None:
    """Raise RequestError for the first value that is not among the legal ones. ``why``: returns the reason for a field."""
    for name, value in fixed.items():
        if name in legal and value not in legal[name]:
            refuse_value(name, value, legal[name], why(name))


def refuse_value(name: str, value: Any, legal: list[Any], why: str) -> NoReturn:
    raise RequestError(f"--set {name}={value} is not possible here{one_of(legal)}{why}")


def check_allowed_names(names: tuple[str, ...], known: Collection[str], *, of: str = "") -> tuple[str, ...]:
    """Return the names of --allow. Raise RequestError for one that is not known."""
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise RequestError(f"--allow {unknown!r} is unknown; the choices that change the mathematics{of} are {', '.join(known)}")
    return names
