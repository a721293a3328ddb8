"""Define the base class of every value that packages exchange: frozen, typed, read from JSON and written to it.

Fields are passed by keyword. Unknown keys are an error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from upshift.errors import RequestError

SHOWN_LENGTH = 80  # characters of a wrong value in a message


def read_boolean(text: str) -> bool:
    """Return the truth value of a text, read as every field of a Value reads it. Raise ValueError for any other text.

    The texts are true, yes, on, y, t, 1, false, no, off, n, f and 0, in upper or lower case.
    """
    return TypeAdapter(bool).validate_python(text)


class _RaisesRequestErrors(type(BaseModel)):  # type: ignore[misc]
    """Raise a validator's RequestError as it is. It is a ValueError, so pydantic would wrap it in a ValidationError."""

    def __call__(cls, *arguments: Any, **fields: Any) -> Any:
        with _unwrap_request_errors():
            return super().__call__(*arguments, **fields)


@contextmanager
def _unwrap_request_errors() -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        for problem in error.errors(include_url=False):
            cause = problem.get("ctx", {}).get("error")
            if isinstance(cause, RequestError):
                raise cause from None
        raise


if TYPE_CHECKING:
    _Base = BaseModel  # mypy does not understand a computed metaclass
else:

    class _Base(BaseModel, metaclass=_RaisesRequestErrors):
        pass


class Value(_Base):
    """Hold typed, immutable fields that are validated when the value is made."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def to_json(self, *, indent: int | None = None) -> str:
        return self.model_dump_json(indent=indent)

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        with _unwrap_request_errors():
            return super().model_validate(obj, **options)

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        with _unwrap_request_errors():
            return super().model_validate_json(json_data, **options)

    @classmethod
    def from_json(cls, text: str | bytes, *, origin: str = "the JSON text") -> Self:
        """Parse and validate a JSON text. Raise RequestError with the origin, the wrong key and the problem in one line."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise RequestError(f"{origin} is not a valid {cls.__name__}: {first_problem(cls, error)}") from None

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        """Validate fields that a user gave. Raise RequestError with the wrong field, the problem and the value."""
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise RequestError(first_problem(cls, error)) from None

    @classmethod
    def from_file(cls, path: Path) -> Self:
        try:
            text = path.read_bytes()
        except OSError as error:
            raise RequestError(f"cannot read {path}: {error.strerror}; give the path of a {cls.__name__} JSON file") from None
        return cls.from_json(text, origin=str(path))

    def changed(self, **fields: Any) -> Self:
        """Return a validated copy with some fields replaced. ``model_fields_set`` still says which fields were ever given."""
        copy = type(self).model_validate({**self.model_dump(), **fields})
        return type(self).model_construct(_fields_set=self.model_fields_set | fields.keys(), **dict(copy))


WORDS = {  # by pydantic's name of a problem; its limits fill the places
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "dict_type": "must be an object",
    "extra_forbidden": "is unknown",
    "finite_number": "must be a finite number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "json_invalid": "is not JSON ({error})",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "list_type": "must be a list",
    "literal_error": "must be {expected}",
    "missing": "is missing",
    "model_attributes_type": "must be an object",
    "model_type": "must be an object",
    "string_type": "must be a text",
    "tuple_type": "must be a list",
    "value_error": "{error}",
}


def first_problem(cls: type[BaseModel], error: ValidationError) -> str:
    """Return one validation problem as a line that names the key, the value and, for an unknown key, the valid set.

    An unknown key comes first, because it may be a misspelling of one that is missing.
    """
    problems = error.errors()
    unknown = (problem for problem in problems if problem["type"] == "extra_forbidden" and len(problem["loc"]) == 1)
    problem = next(unknown, problems[0])
    branches = [other for other in problems if other["loc"][:-1] == problem["loc"][:-1] and other["loc"][-1:] == ("float",)]
    if problem["loc"][-1:] == ("int",) and branches:  # a number may be whole or not: the wider kind says what is allowed
        problem = branches[0] | {"loc": problem["loc"][:-1]}
    key = ".".join(str(level) for level in problem["loc"])
    if problem["type"] == "extra_forbidden" and len(problem["loc"]) == 1:
        return f"unknown key {key!r}; the keys are {', '.join(sorted(cls.model_fields))}"
    limits = {name: f"{value:.12g}" if isinstance(value, float) else value for name, value in problem.get("ctx", {}).items()}
    words = WORDS[problem["type"]].format(**limits) if problem["type"] in WORDS else problem["msg"]
    named = f"{key}: {words}" if key else words  # a problem of the whole value has no key
    if problem["type"] == "missing":  # its input is the whole document
        return named
    return f"{named} (got {_shown(problem['input'])})"


def _shown(value: Any) -> str:
    """Return a wrong value as JSON writes it, cut to a few words."""
    text = json.dumps(value.decode(errors="replace") if isinstance(value, bytes) else value, default=str)
    return text if len(text) <= SHOWN_LENGTH else text[:SHOWN_LENGTH] + "..."
