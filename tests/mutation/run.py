"""Change the code in one small place at a time, and see whether a test fails.

    python tests/mutation/run.py draw src/upshift/planning --number 200 --seed 30 > sample.json
    python tests/mutation/run.py run sample.json --tests tests/light --output result.json

``run`` collects the tests once, and notes which test calls which function and how long it takes. Then each mutant gets a process
of its own, forked from that one: the code of the mutated function is put in place in memory (no file is written), and the tests
that call it run until one fails, those that call least beside it first. What stands outside functions is imported anew instead.
A mutant that no test fails on has survived. Survivors with a reason in explained.json (equivalent code, for one) are counted
apart. A run that was stopped goes on where it was.

mutmut 3 changes no decorated function and no constant of a module; cosmic-ray starts an interpreter and all tests for each
mutant.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import random
import re
import resource
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import _lru_cache_wrapper, cache
from importlib import import_module
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_loader
from itertools import accumulate
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from mutants import Mutant, list_mutants, mutate

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
EXPLAINED = Path(__file__).parent / "explained.json"
PYTEST = ("-o", "addopts=--import-mode=importlib", "-p", "no:terminal", "-p", "no:cacheprovider", "-W", "ignore")
READ_SOURCES = ("test_house", "test_docs", "test_translations", "test_claims", "test_contributing", "test_published")
FACTOR, GRACE_SECONDS = 4.0, 30.0  # of the CPU: a mutant that takes longer than so many times the tests' usual time loops
LONGEST_SECONDS = 2.0  # of the CPU: a longer test is run only where no other calls the mutant
FAILED = (1, 2)  # exit codes of a process in which a test failed, or could not be imported
NOT_RUN = 7  # of one that did not find its tests
WRAPPERS = ("__wrapped__", "fget", "func", "__func__", "wrapped")  # where decorators keep the function


class Mutations:
    """A pytest plugin: in place of one run of the collected tests, a run of some of them for each mutant."""

    def __init__(self, sample: list[Mutant], *, most_seconds: float, output: Path, notes: Path) -> None:
        self.sample, self.most_seconds, self.output, self.notes_path = sample, most_seconds, output, notes
        self.explained = {tuple(entry["mutant"]) for entry in json.loads(EXPLAINED.read_text())}
        self.notes: dict[str, Any] = {}

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        results = json.loads(self.output.read_text()) if self.output.exists() else []
        if len(results) >= len(self.sample):  # a run that ended: this is another one
            results = []
            self.notes_path.unlink(missing_ok=True)
        hashes = {str(file.relative_to(ROOT)): _hash_of(file) for file in {item.path for item in session.items}}
        notes = json.loads(self.notes_path.read_text()) if self.notes_path.exists() else {}
        changed = {file for file, value in hashes.items() if notes.get("files", {}).get(file) != value}
        if changed:
            items = [item for item in session.items if _file_of(item.nodeid) in changed]
            in_child(lambda: take_notes(items, self.notes_path))
            new_notes = json.loads(self.notes_path.read_text())
            for name in ("seconds", "calls"):
                kept = {nodeid: value for nodeid, value in notes.get(name, {}).items() if _file_of(nodeid) not in changed}
                new_notes[name] = kept | new_notes[name]
            new_notes["failed"] += [nodeid for nodeid in notes.get("failed", ()) if _file_of(nodeid) not in changed]
            self.notes_path.write_text(json.dumps({**new_notes, "files": hashes}))
        self.notes = json.loads(self.notes_path.read_text())
        for nodeid in self.notes["failed"]:
            print(f"fails without any change, and is left out: {nodeid}", flush=True)
        for number, mutant in enumerate(self.sample[len(results) :], start=len(results) + 1):
            start = time.monotonic()
            nodeids = tests_of(mutant, self.notes, session.items, most_seconds=self.most_seconds)
            outcome = self.try_mutant(mutant, nodeids, session)
            if outcome in ("survived", "no test calls it") and mutant.identity in self.explained:
                outcome = "explained"
            results.append({**mutant.to_json(), "outcome": outcome, "tests": len(nodeids)})
            self.output.write_text(json.dumps(results, indent=0) + "\n")
            took = f"{time.monotonic() - start:.1f} s, {len(nodeids)} tests"
            print(f"{number} {outcome} ({took}): {mutant.file}:{mutant.line} {mutant.change} | {mutant.text}", flush=True)
        print(", ".join(f"{outcome} {count}" for outcome, count in sorted(Counter(one["outcome"] for one in results).items())))
        return True

    def try_mutant(self, mutant: Mutant, nodeids: list[str], session: pytest.Session) -> str:
        """Return killed, timeout, survived, gone, no test calls it, or not run: its tests could not be collected again."""
        file = ROOT / mutant.file
        try:
            tree = mutate(file.read_text(encoding="utf-8"), mutant)
        except LookupError:
            return "gone"
        if not nodeids:
            return "no test calls it"
        limit = round(FACTOR * sum(self.notes["seconds"][nodeid] for nodeid in nodeids) + GRACE_SECONDS)

        def run_tests() -> int:
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
            for function in cached_functions(ROOT):
                function.cache_clear()  # what was computed while tests were collected has no change in it
            if put_in_place(mutant, compile(tree, str(file), "exec")):
                items = {item.nodeid: item for item in session.items}
                return run_items([items[nodeid] for nodeid in nodeids])
            return run_anew(file, tree, nodeids)

        status = in_child(run_tests)
        if status == 0:
            return "survived"
        if os.WIFSIGNALED(status):
            return "timeout"
        return "killed" if os.WEXITSTATUS(status) in FAILED else "not run"


def _hash_of(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def in_child(work: Any) -> int:
    """Run ``work`` in a forked process without output; return the status that the system says of its end."""
    child = os.fork()
    if child == 0:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        try:
            os._exit(int(work() or 0))
        except BaseException:
            os._exit(NOT_RUN)
    return os.waitpid(child, 0)[1]


def run_items(items: list[pytest.Item]) -> int:
    """Run tests until one fails; return 1 where one did."""
    for item, following in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if item.session.testsfailed:
            return 1
    return 0


def put_in_place(mutant: Mutant, module_code: CodeType) -> bool:
    """Give the imported function its mutated code. False where the change is outside of functions, or the module not imported."""
    holder: Any = sys.modules.get(_module_of(ROOT / mutant.file))
    code = module_code
    for name in mutant.function.split(".") if mutant.function else ():
        inner = next((const for const in code.co_consts if isinstance(const, CodeType) and const.co_name == name), None)
        found = vars(holder).get(name) if holder is not None else None
        if inner is None or found is None:
            return False
        function = _unwrap(found)
        if function is not None:
            if function.__code__ == inner or function.__code__.co_freevars != inner.co_freevars:
                return False  # the change is in a default or a decorator
            function.__code__ = inner
            return True
        holder, code = found, inner
    return False


def _unwrap(found: Any) -> FunctionType | None:
    while not isinstance(found, FunctionType):
        if isinstance(found, type):
            return None
        found = next((getattr(found, name) for name in WRAPPERS if hasattr(found, name)), None)
        if found is None:
            return None
    return _unwrap(found.__wrapped__) if hasattr(found, "__wrapped__") else found


def run_anew(file: Path, tree: ast.Module, nodeids: list[str]) -> int:
    """Import everything of the project again, the mutated module from ``tree``, and run the tests."""
    for name, module in list(sys.modules.items()):
        where = getattr(module, "__file__", None) or ""
        if where.startswith((str(SOURCE), str(ROOT / "tests"))) and name not in (__name__, "mutants"):
            del sys.modules[name]
    sys.meta_path.insert(0, MutatedFinder(file, tree))  # type: ignore[arg-type]
    files = list(dict.fromkeys(_file_of(nodeid) for nodeid in nodeids))
    return int(pytest.main([*PYTEST, *files], plugins=[Chosen(nodeids)]))


class Chosen:
    """A pytest plugin: run these tests alone, in this order, until one fails."""

    def __init__(self, nodeids: list[str]) -> None:
        self.nodeids = nodeids

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        if not items.keys() >= {*self.nodeids}:
            os._exit(NOT_RUN)
        os._exit(run_items([items[nodeid] for nodeid in self.nodeids]))


class MutatedFinder:
    """Import one module from a mutated syntax tree."""

    def __init__(self, file: Path, tree: ast.Module) -> None:
        self.file, self.tree = file, tree

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _module_of(self.file):
            return None
        tree = self.tree

        class Loader(SourceFileLoader):
            def get_code(self, fullname: str) -> CodeType:
                code: CodeType = compile(tree, self.path, "exec")
                return code

        loader = Loader(name, str(self.file))
        return spec_from_loader(name, loader, is_package=self.file.name == "__init__.py")


def _module_of(file: Path) -> str:
    return ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


def cached_functions(folder: Path) -> list[_lru_cache_wrapper[Any]]:
    """Return the functions of the modules below ``folder`` that remember results."""
    modules = [module for module in sys.modules.values() if (getattr(module, "__file__", None) or "").startswith(str(folder))]
    return [value for module in modules for value in vars(module).values() if isinstance(value, _lru_cache_wrapper)]


def take_notes(items: list[pytest.Item], path: Path) -> None:
    """Write seconds and calls of every test. What fixtures and helpers with a cache call counts for every test of the file."""
    seconds: dict[str, float] = {}
    calls: dict[str, set[tuple[str, str]]] = defaultdict(set)
    of_fixtures: dict[str, set[tuple[str, str]]] = defaultdict(set)
    running: dict[int, CodeType] = {}  # by id, as hashing a code object reads all of it
    failed: set[str] = set()
    helpers = {id(function.__wrapped__.__code__) for function in cached_functions(ROOT / "tests")}
    remembering = cached_functions(SOURCE)
    of_helpers: dict[int, CodeType] = {}

    def on_call(frame: FrameType, _event: str, _argument: object) -> Any:
        running[id(frame.f_code)] = frame.f_code
        if id(frame.f_code) not in helpers:
            return None
        before = set(running)
        frame.f_trace_lines = False

        def on_return(_frame: FrameType, event: str, _argument: object) -> Any:
            if event == "return":
                of_helpers.update((number, running[number]) for number in running.keys() - before)
            return on_return

        return on_return

    def names_of(codes: dict[int, CodeType]) -> set[tuple[str, str]]:
        sys.settrace(None)
        return {
            (code.co_filename, code.co_qualname.replace(".<locals>", ""))
            for code in codes.values()
            if code.co_filename.startswith(str(SOURCE))
        }

    def watch() -> None:
        running.clear()
        of_helpers.clear()
        sys.settrace(on_call)

    class Noting:
        @pytest.hookimpl(hookwrapper=True)
        def pytest_runtest_setup(self, item: pytest.Item) -> Any:
            for function in remembering:
                function.cache_clear()  # else only the first test is seen to call them
            watch()
            yield
            of_fixtures[_file_of(item.nodeid)] |= names_of(running)

        @pytest.hookimpl(hookwrapper=True)
        def pytest_runtest_call(self, item: pytest.Item) -> Any:
            start = sum(os.times()[:4])  # with the processes that the test waits for
            watch()
            yield
            calls[item.nodeid] |= names_of(running)
            of_fixtures[_file_of(item.nodeid)] |= names_of(of_helpers)
            seconds[item.nodeid] = sum(os.times()[:4]) - start

        @staticmethod
        def pytest_runtest_logreport(report: pytest.TestReport) -> None:
            if report.failed:
                failed.add(report.nodeid)

    items[0].config.pluginmanager.register(Noting())
    for item, following in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    passed = [nodeid for nodeid in seconds if nodeid not in failed]  # a test that fails anyway sees nothing
    by_test = {nodeid: sorted(calls[nodeid] | of_fixtures[_file_of(nodeid)]) for nodeid in passed}
    path.write_text(json.dumps({"seconds": seconds, "calls": by_test, "failed": sorted(failed)}))


def tests_of(mutant: Mutant, notes: dict[str, Any], items: list[pytest.Item], *, most_seconds: float) -> list[str]:
    """Return the tests that call the mutated function, those that call least beside it first, until they take ``most_seconds``.

    Of a constant of a module or a field of a class: those in which its name stands, and those that call a function in which it
    stands. If there are none: those that call any function of the module, and those of files that import it.
    """
    file = str(ROOT / mutant.file)
    seconds = notes["seconds"]
    collected = {item.nodeid for item in items}
    calls = {
        nodeid: {(where, name) for where, name in called}
        for nodeid, called in notes["calls"].items()
        if nodeid in collected
    }
    constants = _assigned_names(mutant)
    users = set(_users_of(constants)) if constants else {(file, mutant.function)}
    naming = {item.nodeid for item in items if constants.intersection(_names_in(item))}
    chosen = [nodeid for nodeid, called in calls.items() if called & users or nodeid in naming & calls.keys()]
    if not chosen:
        importing = _files_that_name(_module_of(ROOT / mutant.file))
        chosen = [
            nodeid
            for nodeid, called in calls.items()
            if _file_of(nodeid) in importing or any(where == file for where, _ in called)
        ]
    chosen = [nodeid for nodeid in chosen if seconds[nodeid] <= LONGEST_SECONDS] or chosen
    chosen.sort(key=lambda nodeid: (len(calls[nodeid]), seconds[nodeid]))
    totals = accumulate(seconds[nodeid] for nodeid in chosen)
    in_time = [nodeid for nodeid, total in zip(chosen, totals, strict=True) if total <= most_seconds]
    return in_time or chosen[:1]


def _assigned_names(mutant: Mutant) -> set[str]:
    """Return the names that the mutated statement of a module assigns, or the class in which it stands; none in a function."""
    tree = ast.parse((ROOT / mutant.file).read_text(encoding="utf-8"))
    statement = next((node for node in tree.body if node.lineno <= mutant.line <= (node.end_lineno or 0)), None)
    if mutant.function:
        return {mutant.function} if isinstance(statement, ast.ClassDef) and statement.name == mutant.function else set()
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _names_in(item: pytest.Item) -> tuple[str, ...]:
    function = getattr(item, "function", None)
    code = getattr(function, "__code__", None)
    return code.co_names if code is not None else ()


def _users_of(names: set[str]) -> Iterator[tuple[str, str]]:
    """Yield (file, function) where one of the names stands."""
    for file in sorted(SOURCE.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if any(name in text for name in names):
            for function in _functions_that_name(ast.parse(text), names, ""):
                yield str(file), function


def _functions_that_name(node: ast.AST, names: set[str], prefix: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _functions_that_name(child, names, prefix)
            continue
        function = f"{prefix}.{child.name}" if prefix else child.name
        has_name = any(isinstance(part, ast.Name) and part.id in names for part in ast.walk(child))
        if has_name and not isinstance(child, ast.ClassDef):
            yield function
        yield from _functions_that_name(child, names, function)


@cache
def _files_that_name(module: str) -> set[str]:
    """Return the files of tests, as in the ids of tests, that import a module."""
    package, _, name = module.rpartition(".")
    line = re.compile(rf"from {re.escape(module)} import|import {re.escape(module)}|from {re.escape(package)} import .*{name}")
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return {str(file.relative_to(ROOT)) for file in files if line.search(file.read_text(encoding="utf-8"))}


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def draw(folders: list[str], *, number: int, seed: int) -> list[Mutant]:
    """Return a random sample of the mutants below ``folders``, the same for the same sources and ``seed``."""
    files = sorted(file for folder in folders for file in _files(ROOT / folder))
    everything = [mutant for file in files for mutant in list_mutants(ROOT, file)]
    return random.Random(seed).sample(everything, min(number, len(everything)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw")
    drawing.add_argument("folders", nargs="+")
    drawing.add_argument("--number", type=int, default=200)
    drawing.add_argument("--seed", type=int, default=30)
    running = commands.add_parser("run")
    running.add_argument("sample", type=Path)
    running.add_argument("--tests", nargs="+", default=["tests/light"])
    running.add_argument("--most-seconds", type=float, default=10.0, help="of tests for one mutant")
    running.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    if given.command == "draw":
        print(json.dumps([mutant.to_json() for mutant in draw(given.folders, number=given.number, seed=given.seed)], indent=0))
        return 0
    fields = Mutant.__dataclass_fields__
    entries = json.loads(given.sample.read_text())
    sample = [Mutant(**{name: value for name, value in entry.items() if name in fields}) for entry in entries]
    for mutant in sample:
        import_module(_module_of(ROOT / mutant.file))
    files = [file for test in given.tests for file in _files(ROOT / test) if file.stem.startswith("test_")]
    mutations = Mutations(
        sample, most_seconds=given.most_seconds, output=given.output.resolve(), notes=given.output.resolve().with_suffix(".notes")
    )
    os.chdir(ROOT)
    return int(pytest.main([*PYTEST, *(str(file) for file in files if file.stem not in READ_SOURCES)], plugins=[mutations]))


if __name__ == "__main__":
    sys.exit(main())
