"""Count the rooms that a reader passes who follows the model through a command: python tests/rooms.py [SRC]

A room is a file of src/upshift. The walk is static. It starts at the function that upshift.cli.main registers for the command,
and follows its parameter ``model``. It also follows every local name that is assigned from an expression with a followed name;
``locals()`` stands for all parameters. If a followed name is part of an argument, the walk enters the function that is called,
and follows the parameter there. It enters a method if its class is named, or is the class of the caller. It also enters a method
whose name only one class has, unless a type of Python has it, too. A constructor passes its arguments on to ``__init__`` alone.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef
COMMAND_LINE = "upshift.cli.main"
REGISTRATION = "Entry"  # Entry("plan", plan.command, ...) registers a command
FOLLOWED = "model"
COMMANDS = ("plan", "train", "generate")
PASSES = 4  # over a function's assignments, which may stand in any order
PYTHON_METHODS = frozenset(name for kind in (list, dict, set, str, bytes, tuple, Path) for name in dir(kind))


class MissingStart(Exception):
    """The walk of a command has no beginning."""


class Place(NamedTuple):
    """A function, by its module and its name. A method's name begins with that of its class."""

    module: str
    name: str


class Body:
    """The assignments and calls of one function, which is read when they are needed."""

    def __init__(self, function: Function) -> None:
        self.function = function
        arguments = (*function.args.posonlyargs, *function.args.args)
        self.positional = [argument.arg for argument in arguments]
        self.parameters = {*self.positional, *(argument.arg for argument in function.args.kwonlyargs)}
        self._assignments: list[tuple[set[str], set[str]]] = []  # names in the value, names that are assigned
        self._calls: list[tuple[ast.Call, list[set[str]], list[tuple[str | None, set[str]]]]] = []
        self._is_read = False

    def followed(self, parameter: str) -> set[str]:
        """Return the parameter and the local names that are made from it."""
        self._read()
        followed = {parameter}
        for _ in range(PASSES):
            for value_names, target_names in self._assignments:
                if value_names & followed:
                    followed |= target_names
        return followed

    def calls(self) -> list[tuple[ast.Call, list[set[str]], list[tuple[str | None, set[str]]]]]:
        """Return each call, with the names in each argument and in each keyword argument."""
        self._read()
        return self._calls

    def _read(self) -> None:
        if not self._is_read:
            self._is_read = True
            self._names_in(self.function)

    def _names_in(self, node: ast.AST) -> set[str]:
        """Return the local names in a node, and collect the assignments and calls in it. Each node is visited once."""
        if isinstance(node, ast.Name):
            return set() if node.id in ("self", "cls") else self.parameters if node.id == "locals" else {node.id}
        by_child = {id(child): self._names_in(child) for child in ast.iter_child_nodes(node)}
        if isinstance(node, ast.Assign):
            targets = set[str]().union(*(by_child[id(target)] for target in node.targets))
            self._assignments.append((by_child[id(node.value)], targets))
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._assignments.append((by_child[id(node.value)], by_child[id(node.target)]))
        elif isinstance(node, ast.Call):
            keywords = [(keyword.arg, by_child[id(keyword)]) for keyword in node.keywords]
            self._calls.append((node, [by_child[id(argument)] for argument in node.args], keywords))
        return set[str]().union(*by_child.values())


class Sources:
    """All functions of a source tree, and what each module imports."""

    def __init__(self, trees: Mapping[str, ast.Module]) -> None:
        """``trees``: the parsed files, by the names of their modules."""
        self.trees = trees
        self.functions: dict[Place, Body] = {}
        self.methods: dict[str, list[Place]] = defaultdict(list)
        self.classes: set[Place] = set()
        self.imports: dict[str, dict[str, Place]] = defaultdict(dict)
        for module, tree in trees.items():
            self._read(module, tree)

    @classmethod
    def in_folder(cls, root: Path) -> Sources:
        """Return the sources below a folder."""
        files = {
            ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file
            for file in sorted(root.rglob("*.py"))
        }
        return cls({module: ast.parse(file.read_text(encoding="utf-8")) for module, file in files.items()})

    def _read(self, module: str, tree: ast.Module) -> None:
        for node in tree.body:
            if isinstance(node, Function):
                self.functions[Place(module, node.name)] = Body(node)
            if isinstance(node, ast.ClassDef):
                self.classes.add(Place(module, node.name))
                for member in node.body:
                    if isinstance(member, Function):
                        place = Place(module, f"{node.name}.{member.name}")
                        self.functions[place] = Body(member)
                        self.methods[member.name].append(place)
        for node in statements(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for name in node.names:
                    self.imports[module][name.asname or name.name] = Place(node.module, name.name)
            if isinstance(node, ast.Import):
                for name in node.names:
                    self.imports[module][name.asname or name.name] = Place(name.name, "")

    def find(self, module: str, name: str) -> Place | None:
        """Return the function or class that a name means in a module."""
        place: Place | None = Place(module, name)
        while place is not None and place not in self.functions and place not in self.classes:
            place = self.imports[place.module].get(place.name)
        return place

    def start(self, command: str) -> Place:
        """Return the function that the command line registers for a command. Raise MissingStart if it takes no model."""
        entries = {
            node.args[0].value: node.args[1]
            for node in ast.walk(self.trees.get(COMMAND_LINE, ast.Module([], [])))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == REGISTRATION
            if len(node.args) > 1 and isinstance(node.args[0], ast.Constant)
        }
        if command not in entries:
            names = ", ".join(map(str, entries)) or "none"
            raise MissingStart(f"{COMMAND_LINE} registers no command {command!r}; it has {names}")
        registered = entries[command]
        place = None
        if isinstance(registered, ast.Name):
            place = self.find(COMMAND_LINE, registered.id)
        elif isinstance(registered, ast.Attribute) and isinstance(registered.value, ast.Name):
            place = self._named_member(COMMAND_LINE, registered.value.id, registered.attr)
        if place is None or place not in self.functions or FOLLOWED not in self.functions[place].parameters:
            function = ast.unparse(registered)
            raise MissingStart(f"{function}, the command {command!r}, is no function with a parameter {FOLLOWED!r}")
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
            imported = self.imports[caller.module].get(function.value.id)
            if place is not None or (imported is not None and imported.module not in self.trees):  # another library's
                return place
        places = self.methods[function.attr]
        return places[0] if len(places) == 1 and function.attr not in PYTHON_METHODS else None

    def _named_method(self, caller: Place, name: str, attribute: str) -> Place | None:
        place = self.find(caller.module, name)
        if name in ("self", "cls"):
            place = Place(caller.module, caller.name.rpartition(".")[0])
        if place is not None and Place(place.module, f"{place.name}.{attribute}") in self.functions:
            return Place(place.module, f"{place.name}.{attribute}")
        return self._named_member(caller.module, name, attribute)

    def _named_member(self, module: str, name: str, attribute: str) -> Place | None:
        """Return the function or class ``attribute`` of the module that ``name`` means in ``module``."""
        imported = self.imports[module].get(name)
        if imported is not None and ".".join(imported) in self.trees:
            return self.find(".".join(imported), attribute)
        return None


def statements(tree: ast.Module) -> list[ast.AST]:
    """Return all statements of a module. They stand in no expression, so expressions need not be visited."""
    waiting: list[ast.AST] = [tree]
    visited: list[ast.AST] = []
    while waiting:
        node = waiting.pop(0)
        visited.append(node)
        children = ast.iter_child_nodes(node)
        waiting += [child for child in children if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case)]
    return visited


def entered(sources: Sources, place: Place, parameter: str) -> set[tuple[Place, str]]:
    """Return the functions that the parameter enters from one function, and the name that it has there."""
    followed = sources.functions[place].followed(parameter)
    entries = set()
    for call, argument_names, keyword_names in sources.functions[place].calls():
        callee = sources.callee(place, call)
        if callee not in sources.functions:
            continue
        positional = sources.functions[callee].positional
        if positional[:1] in (["self"], ["cls"]):
            positional = positional[1:]
        pairs = [*zip(positional, argument_names, strict=False), *keyword_names]
        entries |= {(callee, name) for name, names in pairs if name is not None and names & followed}
    return entries


def rooms(sources: Sources, start: Place, parameter: str = FOLLOWED) -> set[Place]:
    """Return the functions that the parameter enters, the first one included."""
    seen: set[tuple[Place, str]] = set()
    waiting = {(start, parameter)}
    while waiting:
        seen |= waiting
        waiting = set[tuple[Place, str]]().union(*(entered(sources, *item) for item in waiting)) - seen
    return {place for place, _ in seen}


def files_of(places: set[Place]) -> int:
    return len({place.module for place in places})


def main() -> None:
    sources = Sources.in_folder(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "src")
    for command in COMMANDS:
        try:
            places = rooms(sources, sources.start(command))
        except MissingStart as error:
            sys.exit(f"rooms: {error}")
        print(f"{command}: {files_of(places)} files, {len(places)} functions")


if __name__ == "__main__":
    main()
