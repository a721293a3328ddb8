"""Count the rooms that a reader passes who follows one parameter of a command: python tests/rooms.py [SRC]

A room is a file of src/upshift. The walk is static. It starts at a command's function and follows one of its parameters, and
every local name that is assigned from an expression with a followed name. If a followed name is part of an argument, the walk
enters the function that is called, and follows the parameter there. It enters a method if its class is named, if it is of the
same class, or if only one class has a method of this name. A constructor passes its arguments on to ``__init__`` alone.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef
STARTS = {  # the question: the function where the walk begins, and the parameter that it follows
    "plan": ("upshift.cli.plan.command", "command", "model"),
    "train": ("upshift.training.run", "run_training", "request"),
    "generate": ("upshift.cli.generate", "command", "model"),
}
PASSES = 4  # over a function's assignments, which may stand in any order


class Place(NamedTuple):
    """A function, by its module and its name. A method's name begins with that of its class."""

    module: str
    name: str


class Sources:
    """All functions of a source tree, and what each module imports."""

    def __init__(self, root: Path) -> None:
        self.functions: dict[Place, Function] = {}
        self.methods: dict[str, list[Place]] = defaultdict(list)
        self.classes: set[Place] = set()
        self.imports: dict[str, dict[str, Place]] = defaultdict(dict)
        self.modules: set[str] = set()
        for file in sorted(root.rglob("*.py")):
            module = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            self.modules.add(module)
            self._read(module, ast.parse(file.read_text(encoding="utf-8")))

    def _read(self, module: str, tree: ast.Module) -> None:
        for node in tree.body:
            if isinstance(node, Function):
                self.functions[Place(module, node.name)] = node
            if isinstance(node, ast.ClassDef):
                self.classes.add(Place(module, node.name))
                for member in node.body:
                    if isinstance(member, Function):
                        place = Place(module, f"{node.name}.{member.name}")
                        self.functions[place] = member
                        self.methods[member.name].append(place)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for name in node.names:
                    self.imports[module][name.asname or name.name] = Place(node.module, name.name)

    def find(self, module: str, name: str) -> Place | None:
        """Return the function or class that a name means in a module."""
        place: Place | None = Place(module, name)
        while place is not None and place not in self.functions and place not in self.classes:
            place = self.imports[place.module].get(place.name)
        return place

    def callee(self, caller: Place, call: ast.Call) -> Place | None:
        """Return the function or method that a call enters, or None if it is not known."""
        function = call.func
        if isinstance(function, ast.Name):
            place = self.find(caller.module, function.id)
            if place in self.classes:
                place = Place(place.module, f"{place.name}.__init__")
            return place if place in self.functions else None
        if not isinstance(function, ast.Attribute):
            return None
        if isinstance(function.value, ast.Name):
            place = self._named_method(caller, function.value.id, function.attr)
            if place is not None:
                return place
        places = self.methods[function.attr]
        return places[0] if len(places) == 1 else None

    def _named_method(self, caller: Place, name: str, attribute: str) -> Place | None:
        if name in ("self", "cls"):
            place: Place | None = Place(caller.module, caller.name.rpartition(".")[0])
        else:
            place = self.find(caller.module, name)
        if place is not None and Place(place.module, f"{place.name}.{attribute}") in self.functions:
            return Place(place.module, f"{place.name}.{attribute}")
        imported = self.imports[caller.module].get(name)
        if imported is not None and ".".join(imported) in self.modules:
            return self.find(".".join(imported), attribute)
        return None


def names_in(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} - {"self", "cls"}


def followed_names(function: Function, parameter: str) -> set[str]:
    """Return the parameter and the local names that are made from it."""
    followed = {parameter}
    for _ in range(PASSES):
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and names_in(node.value) & followed:
                followed |= set[str]().union(*map(names_in, node.targets))
            if isinstance(node, ast.AnnAssign) and node.value is not None and names_in(node.value) & followed:
                followed |= names_in(node.target)
    return followed


def entered(sources: Sources, place: Place, parameter: str) -> set[tuple[Place, str]]:
    """Return the functions that the parameter enters from one function, and the name that it has there."""
    followed = followed_names(sources.functions[place], parameter)
    found = set()
    for call in ast.walk(sources.functions[place]):
        if not isinstance(call, ast.Call):
            continue
        callee = sources.callee(place, call)
        if callee not in sources.functions:
            continue
        arguments = sources.functions[callee].args
        positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
        if positional[:1] in (["self"], ["cls"]):
            positional = positional[1:]
        pairs = [*zip(positional, call.args, strict=False), *((keyword.arg, keyword.value) for keyword in call.keywords)]
        found |= {(callee, name) for name, value in pairs if name is not None and names_in(value) & followed}
    return found


def rooms(sources: Sources, start: Place, parameter: str) -> set[Place]:
    """Return the functions that the parameter enters, the first one included."""
    seen: set[tuple[Place, str]] = set()
    waiting = {(start, parameter)}
    while waiting:
        seen |= waiting
        waiting = set[tuple[Place, str]]().union(*(entered(sources, *item) for item in waiting)) - seen
    return {place for place, _ in seen}


def main() -> None:
    sources = Sources(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "src")
    for question, (module, name, parameter) in STARTS.items():
        places = rooms(sources, Place(module, name), parameter)
        print(f"{question}: {len({place.module for place in places})} files, {len(places)} functions")


if __name__ == "__main__":
    main()
