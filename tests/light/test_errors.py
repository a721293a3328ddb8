"""Refusals are also ValueErrors, and pass through what wraps ValueErrors."""

from __future__ import annotations

import ast
import pickle
import re
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError, model_validator

import upshift
from upshift import errors
from upshift.errors import MissingExtra, RequestError, UpshiftError
from upshift.hardware.catalog.lookup import describe
from upshift.value import Value
from upshift.versions import CLONE, install_command

SOURCE = Path(upshift.__file__).parent


class Even(Value):
    number: int

    @model_validator(mode="after")
    def _check(self) -> Even:
        if self.number % 2:
            raise RequestError(f"number={self.number} is odd; give an even one")
        return self


class Pair(Value):
    first: Even


def test_a_refusal_is_an_error_of_ours_and_of_pythons() -> None:
    with pytest.raises(ValueError, match="is odd") as caught:
        raise RequestError("1 is odd")
    assert isinstance(caught.value, UpshiftError) and caught.value.exit_code == 2
    assert issubclass(MissingExtra, ValueError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == "1 is odd"
    others = [kind for kind in vars(errors).values() if isinstance(kind, type) and not issubclass(kind, RequestError)]
    assert not any(issubclass(kind, ValueError) for kind in others)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Even(number=3),
        lambda: Even.model_validate({"number": 3}),
        lambda: Even.from_json('{"number": 3}'),
        lambda: Even.from_fields({"number": 3}),
        lambda: Even(number=2).changed(number=3),
        lambda: Pair.model_validate({"first": {"number": 3}}),
        lambda: Pair.from_json('{"first": {"number": 3}}'),
    ],
)
def test_a_refusal_of_a_validator_arrives_as_it_was_raised(make: object) -> None:
    with pytest.raises(RequestError) as caught:
        make()  # type: ignore[operator]
    assert str(caught.value) == "number=3 is odd; give an even one"
    with pytest.raises(ValidationError):
        Even(number="x")  # type: ignore[arg-type]
    assert issubclass(Even, BaseModel)


def test_a_file_that_is_no_host_is_named_as_before(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot read"):
        describe(str(tmp_path / "none.json"))
    with pytest.raises(RequestError, match="is not a path"):
        describe("a\0b.json")


def _called(node: ast.Try) -> set[str]:
    """The names of what is called in the body of a try."""
    calls = [one.func for part in node.body for one in ast.walk(part) if isinstance(one, ast.Call)]
    return {one.attr if isinstance(one, ast.Attribute) else one.id for one in calls if isinstance(one, ast.Attribute | ast.Name)}


def test_no_handler_of_value_errors_takes_a_refusal() -> None:
    """Functions whose docstring says that they raise RequestError are not called where ValueError is caught first."""
    raising: set[str] = set()
    handlers: list[tuple[str, set[str]]] = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and "RequestError" in (ast.get_docstring(node) or ""):
                raising.add(node.name)
            if isinstance(node, ast.Try):
                caught = [ast.unparse(one.type) if one.type is not None else "" for one in node.handlers]
                first = next((words for words in caught if "ValueError" in words or "RequestError" in words), "")
                if "ValueError" in first and "RequestError" not in first:
                    handlers.append((f"{path.relative_to(SOURCE)}:{node.lineno}", _called(node)))
    # Also names of methods of other libraries' objects.
    raising -= {"read", "all", "get", "open", "text", "load", "run", "of", "main", "json", "convert"}
    raising -= {"from_pretrained", "load_adapter", "parse"}
    assert len(raising) > 100 and len(handlers) > 20
    wrong = [(place, sorted(names & raising)) for place, names in handlers if names & raising]
    assert not wrong


def test_the_command_that_installs_an_extra_works_without_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a clone it names the clone. For a wheel it names the libraries, those of extras within the extra too."""
    monkeypatch.chdir(CLONE)
    assert install_command("heal", "xla") == "pip install '.[heal,xla]'"
    monkeypatch.chdir(tmp_path)
    assert install_command("data") == f"pip install '{CLONE}[data]'"
    monkeypatch.setattr(
        "upshift.versions.requirements_of",
        lambda _: ["numpy", 'trl>=1; extra == "trl"', 'upshift[trainer]; extra == "trl"', 'accelerate; extra == "trainer"',
                   'ray[tune]; extra == "ray"', 'none; sys_platform == "nowhere" and extra == "trl"'],
    )  # fmt: skip
    assert install_command("trl", clone=tmp_path) == "pip install accelerate 'trl>=1'"
    assert install_command("ray", clone=tmp_path) == "pip install 'ray[tune]'"


def test_no_text_of_the_source_installs_upshift_from_an_index() -> None:
    pattern = re.compile(r"pip install[^\"\n]*['\" ]upshift\b")
    assert [path.name for path in SOURCE.rglob("*.py") if pattern.search(path.read_text(encoding="utf-8"))] == []
