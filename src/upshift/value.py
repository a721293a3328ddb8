"""Define the base of every value that crosses a package border: frozen, typed, JSON in and out, unknown keys refused.

Fields are given by keyword only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from upshift.errors import RequestError


class _RaisesRefusals(type(BaseModel)):  # type: ignore[misc]
    """A metaclass that lets a RequestError of a validator through: it is a ValueError, which pydantic would wrap."""

    def __call__(cls, *arguments: Any, **fields: Any) -> Any:
        with _refusals_pass():
            return super().__call__(*arguments, **fields)


@contextmanager
def _refusals_pass() -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        for problem in error.errors(include_url=False):
            cause = problem.get("ctx", {}).get("error")
            if isinstance(cause, RequestError):
                raise cause from None
        raise


if TYPE_CHECKING:
    _Base = BaseModel  # mypy knows no metaclass that is computed
else:

    class _Base(BaseModel, metaclass=_RaisesRefusals):
        pass


class Value(_Base):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def to_json(self, *, indent: int | None = None) -> str:
        return self.model_dump_json(indent=indent)

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        with _refusals_pass():
            return super().model_validate(obj, **options)

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        with _refusals_pass():
            return super().model_validate_json(json_data, **options)

    @classmethod
    def from_json(cls, text: str | bytes, *, origin: str = "the JSON text") -> Self:
        """Parse and validate. Raise RequestError with the offending key, the problem and the origin in one line."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise RequestError(f"{origin} is not a valid {cls.__name__}: {first_problem(cls, error)}") from None

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        """Validate fields that a user gives. Raise RequestError with the offending field, the problem and its value."""
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
        """Return a validated copy with some fields replaced."""
        return type(self).model_validate({**self.model_dump(), **fields})


def first_problem(cls: type[BaseModel], error: ValidationError) -> str:
    """Return the first validation problem as one line that names the key, the value and, for an unknown key, the valid set."""
    problem = error.errors()[0]
    key = ".".join(str(part) for part in problem["loc"]) or "document"
    if problem["type"] == "extra_forbidden" and len(problem["loc"]) == 1:
        return f"unknown key {key!r}; the keys are {', '.join(sorted(cls.model_fields))}"
    return f"{key}: {problem['msg']} (got {json.dumps(problem['input'], default=str)[:80]})"
