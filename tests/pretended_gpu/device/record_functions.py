"""Record which functions of src/upshift that name CUDA, NCCL or NVML ran, in every process of a test.

FUNCTIONS_THAT_RAN is the file to append to. A function's first statement writes its name once a process. A condition that names
one of them writes the sides that were taken: a function may run on the GPU's side only, or on the CPU's.
"""

from __future__ import annotations

import ast
import builtins
import os
import re
import sys
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

NAMES = re.compile("cuda|(?<!asy)nccl|nvml", re.IGNORECASE)  # AsyncClient is none
SOURCE = Path(__file__).parents[3] / "src" / "upshift"
RECORDER = "__record_functions__"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
TEXT_FIELDS = ("id", "attr", "arg", "name", "value")
written: set[str] = set()


def names_a_gpu(node: ast.AST) -> bool:
    """Return whether an identifier or a text of the node does. Docstrings and inner functions do not count."""
    nodes = [node]
    while nodes:
        current = nodes.pop()
        if current is not node and isinstance(current, (*FUNCTIONS, ast.ClassDef)):
            continue
        texts = (getattr(current, field, None) for field in TEXT_FIELDS)
        if any(isinstance(text, str) and NAMES.search(text) for text in texts):
            return True
        nodes += [child for child in ast.iter_child_nodes(current) if not _is_docstring(child)]
    return False


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def functions(tree: ast.AST, outer: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield the functions that name a GPU, each with its name inside the module, such as ``Trial.measure``."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            yield from functions(node, outer)
            continue
        if isinstance(node, FUNCTIONS) and names_a_gpu(node):
            yield outer + node.name, node
        yield from functions(node, f"{outer}{node.name}.")


def all_functions() -> list[str]:
    """Return every function of the package that names a GPU, such as ``training/step.py:TrainStep.step``."""
    return [
        f"{path.relative_to(SOURCE)}:{name}" for path in sorted(SOURCE.rglob("*.py"))
        for name, _ in functions(ast.parse(path.read_text(encoding="utf-8")))
    ]  # fmt: skip


def record(name: str, *conditions: Any) -> Any:
    """Append a name, or a condition's line with the side that it takes, once a process. Return the condition."""
    if conditions:
        name = f"{name} {bool(conditions[0])}"
    if name not in written:
        written.add(name)
        with open(os.environ["FUNCTIONS_THAT_RAN"], "a", encoding="utf-8") as file:
            file.write(name + "\n")
    return conditions[0] if conditions else None


class _Conditions(ast.NodeTransformer):
    """Let each condition that names a GPU pass through record()."""

    def __init__(self, name: str) -> None:
        self.name = name

    def _wrap(self, node: Any) -> Any:
        self.generic_visit(node)
        if names_a_gpu(node.test):
            node.test = _call(f"{self.name}:{node.lineno}", node.test)
        return node

    visit_If = visit_IfExp = _wrap


def _call(name: str, *conditions: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(RECORDER, ast.Load()), [ast.Constant(name), *conditions], [])


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path))
        for inner, node in list(functions(tree)):
            name = f"{Path(path).relative_to(SOURCE)}:{inner}"
            _Conditions(name).generic_visit(node)
            node.body.insert(1 if _is_docstring(node.body[0]) else 0, ast.Expr(_call(name)))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if not fullname.startswith("upshift."):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin and Path(spec.origin).is_relative_to(SOURCE):
            spec.loader = _Loader(fullname, spec.origin)
        return spec


def install() -> None:
    """Record every module of upshift that this process imports from now on, or runs with -m."""
    setattr(builtins, RECORDER, record)
    sys.meta_path.insert(0, _Finder())
