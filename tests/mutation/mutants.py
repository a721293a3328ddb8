"""List the small changes (mutants) that can be made to a source file, and make one of them.

A mutant is a comparison, an operator, a number, a boolean or a call of max, min, any or all, changed into another one. Texts,
annotations and docstrings are left alone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn,
    ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
}  # fmt: skip
CALLS = {"max": "min", "min": "max", "any": "all", "all": "any"}


@dataclass(frozen=True, order=True)
class Mutant:
    """One change. ``number`` counts the changes of the same kind on the same text of a line, in the order of the source."""

    file: str
    function: str
    line: int
    text: str
    change: str
    number: int

    @property
    def identity(self) -> tuple[str, str, str, str, int]:
        """What stays the same when lines elsewhere in the file come and go."""
        return self.file, self.function, self.text, self.change, self.number

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def list_mutants(root: Path, file: Path) -> list[Mutant]:
    """Return every mutant of ``file``, a path below ``root``."""
    source = file.read_text(encoding="utf-8")
    lines = source.splitlines()
    counts: dict[tuple[str, str, str], int] = {}
    found = []
    for node, function, change in _changes(ast.parse(source)):
        text = lines[node.lineno - 1].strip()
        key = (function, text, change)
        number = counts.get(key, 0)
        counts[key] = number + 1
        found.append(Mutant(str(file.relative_to(root)), function, node.lineno, text, change, number))
    return found


def mutate(source: str, mutant: Mutant) -> ast.Module:
    """Return the syntax tree of ``source`` with the mutant's change. Raise LookupError where the code is not there any more."""
    tree = ast.parse(source)
    lines = source.splitlines()
    number = 0
    for node, function, change in _changes(tree):
        if (function, lines[node.lineno - 1].strip(), change) != (mutant.function, mutant.text, mutant.change):
            continue
        if number == mutant.number:
            _apply(node)
            return ast.fix_missing_locations(tree)
        number += 1
    raise LookupError(f"{mutant.file}: {mutant.text!r} is not there any more")


def _changes(tree: ast.Module) -> Iterator[tuple[Any, str, str]]:
    """Yield (node, function, change in words) in the order of the source."""
    yield from _changes_below(tree, "")


def _changes_below(node: ast.AST, function: str) -> Iterator[tuple[Any, str, str]]:
    for child in _mutable_children(node):
        name = function
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{function}.{child.name}" if function else child.name
        change = _describe(child)
        if change is not None:
            yield child, name, change
        yield from _changes_below(child, name)


def _mutable_children(node: ast.AST) -> Iterator[ast.AST]:
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "type_comment"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or _is_type_checking(child) or _is_type_alias(child):
                continue
            yield child


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _is_type_alias(node: ast.AST) -> bool:
    """Whether the statement only names a type: ``Outcome = Literal["chosen", "slower"]``."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Subscript):
        return False
    return isinstance(node.value.value, ast.Name) and node.value.value.id in ("Literal", "Callable", "Annotated")


def _describe(node: ast.AST) -> str | None:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        return f"{type(node.ops[0]).__name__} -> {COMPARISONS[type(node.ops[0])].__name__}"
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in ARITHMETIC:
        return f"{type(node.op).__name__} -> {ARITHMETIC[type(node.op)].__name__}"
    if isinstance(node, ast.BoolOp):
        return "and -> or" if isinstance(node.op, ast.And) else "or -> and"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return "not x -> x"
    if isinstance(node, ast.Constant):
        return _describe_constant(node.value)
    if isinstance(node, ast.Name) and node.id in CALLS and isinstance(node.ctx, ast.Load):
        return f"{node.id} -> {CALLS[node.id]}"
    return None


def _describe_constant(value: object) -> str | None:
    if isinstance(value, bool):
        return f"{value} -> {not value}"
    if isinstance(value, int | float):
        return f"{value} -> {value + 1}"
    return None


def _apply(node: Any) -> None:
    if isinstance(node, ast.Compare):
        node.ops[0] = COMPARISONS[type(node.ops[0])]()
    elif isinstance(node, ast.BinOp | ast.AugAssign):
        node.op = ARITHMETIC[type(node.op)]()
    elif isinstance(node, ast.BoolOp):
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    elif isinstance(node, ast.UnaryOp):  # twice not: the truth of the operand
        node.operand = ast.UnaryOp(ast.Not(), node.operand)
    elif isinstance(node, ast.Constant):
        node.value = (not node.value) if isinstance(node.value, bool) else node.value + 1
    elif isinstance(node, ast.Name):
        node.id = CALLS[node.id]
