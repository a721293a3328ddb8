"""Change the code in one small place at a time, and see whether a test fails.

    python tests/mutation/run.py draw src/upshift/planning --number 200 --seed 30 > sample.json
    python tests/mutation/run.py run sample.json --tests tests/light --output result.json

``run`` first notes which test calls which function. Then each mutant gets a process of its own, forked from one that has
imported the libraries: the mutated file is compiled in memory (no file is written), and the tests that call the mutated
function run until one fails, those of other files first, the quick ones first. A mutant that no test fails on has survived.
Survivors with a reason in explained.json (equivalent code, for one) are counted apart.

mutmut 3 changes no decorated function and no constant of a module; cosmic-ray runs every test in a new interpreter for each
mutant. Both cost several times as much here.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import resource
import sys
import time
from collections import defaultdict
from importlib import import_module
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_loader
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import hypothesis  # noqa: F401  imported once, before the processes of mutants are forked
import pydantic  # noqa: F401
import pytest
import rich.console  # noqa: F401
import typer  # noqa: F401
from mutants import Mutant, list_mutants, mutate

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
EXPLAINED = Path(__file__).parent / "explained.json"
PYTEST = ("-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=no", "-W", "ignore")
QUIET = ("test_house", "test_docs", "test_translations", "test_claims", "test_contributing", "test_tables")  # they read sources
TIMED = ("test_ten_thousand_plans_a_second", "test_import_is_light")  # they fail on a busy machine
# Imported before the processes of mutants are forked; anew where the mutant is in one of them.
IMPORTED = ("upshift.hardware", "upshift.models.profile", "upshift.models.source", "upshift.models.store", "upshift.record")
FACTOR, GRACE_SECONDS = 4.0, 30.0  # of the CPU: a mutant that takes longer than so many times the tests' usual time loops


class Notes:
    """A pytest plugin: note how long each test takes and which functions it calls. What fixtures call counts for every test of
    their file."""

    def __init__(self, watched: Path) -> None:
        self.watched = str(watched) + "/"
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, set[tuple[str, str]]] = defaultdict(set)
        self.of_fixtures: dict[str, set[tuple[str, str]]] = defaultdict(set)

    def _note_into(self, noted: set[tuple[str, str]]) -> None:
        def on_event(frame: FrameType, event: str, _argument: object) -> None:
            code = frame.f_code
            if event == "call" and code.co_filename.startswith(self.watched):
                noted.add((code.co_filename, code.co_qualname))

        sys.setprofile(on_event)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Any:
        self._note_into(self.of_fixtures[_file_of(item)])
        yield
        sys.setprofile(None)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Any:
        start = time.perf_counter()
        self._note_into(self.calls[item.nodeid])
        yield
        sys.setprofile(None)
        self.seconds[item.nodeid] = time.perf_counter() - start


class Chosen:
    """A pytest plugin: run these tests alone, in this order."""

    def __init__(self, nodeids: list[str]) -> None:
        self.order = {nodeid: number for number, nodeid in enumerate(nodeids)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if item.nodeid in self.order]
        items[:] = sorted(chosen, key=lambda item: self.order[item.nodeid])


class MutatedFinder:
    """Import one module from a mutated syntax tree."""

    def __init__(self, file: Path, tree: ast.Module) -> None:
        self.name = ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        self.file, self.tree = file, tree

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        tree = self.tree

        class Loader(SourceFileLoader):
            def get_code(self, fullname: str) -> Any:
                return compile(tree, self.path, "exec")

        loader = Loader(name, str(self.file))
        return spec_from_loader(name, loader, is_package=self.file.name == "__init__.py")


def _file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def draw(folders: list[str], *, number: int, seed: int) -> list[Mutant]:
    """Return a random sample of the mutants below ``folders``, the same for the same sources and ``seed``."""
    files = sorted(file for folder in folders for file in _files(ROOT / folder))
    everything = [mutant for file in files for mutant in list_mutants(ROOT, file)]
    return random.Random(seed).sample(everything, min(number, len(everything)))


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def take_notes(tests: list[str]) -> dict[str, Any]:
    """Return seconds and calls of every test, made in a process of its own."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.close(reader)
        notes = Notes(SOURCE)
        code = pytest.main([*PYTEST[1:], *tests], plugins=[notes])
        seconds, calls = notes.seconds, notes.calls
        by_test = {nodeid: sorted(calls[nodeid] | notes.of_fixtures[nodeid.partition("::")[0]]) for nodeid in seconds}
        with os.fdopen(writer, "w") as stream:
            json.dump({"code": int(code), "seconds": seconds, "calls": by_test}, stream)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        found: dict[str, Any] = json.load(stream)
    os.wait()
    return found


def tests_of(mutant: Mutant, notes: dict[str, Any], *, most_seconds: float) -> list[str]:
    """Return the tests that call the mutated function, or any of its module where it stands outside functions; the quick ones
    first, files in turn, no more than take ``most_seconds``."""
    file = str(ROOT / mutant.file)
    called = [
        nodeid
        for nodeid, calls in notes["calls"].items()
        if any(where == file and _is_inside(mutant.function, name) for where, name in calls)
    ]
    if not called:
        called = [nodeid for nodeid, calls in notes["calls"].items() if any(where == file for where, _ in calls)]
    by_file: dict[str, list[str]] = defaultdict(list)
    for nodeid in sorted(called, key=lambda nodeid: notes["seconds"][nodeid]):
        if nodeid.endswith(TIMED):
            continue
        by_file[nodeid.partition("::")[0]].append(nodeid)
    in_turn = [nodeids[place] for place in range(len(called)) for nodeids in by_file.values() if place < len(nodeids)]
    chosen, total = [], 0.0
    for nodeid in in_turn:
        total += notes["seconds"][nodeid]
        if total > most_seconds:
            break
        chosen.append(nodeid)
    return chosen


def _is_inside(function: str, called: str) -> bool:
    """Whether the mutant's ``function`` is the called one, in the words of code.co_qualname."""
    return called.replace(".<locals>", "") == function


def try_mutant(mutant: Mutant, nodeids: list[str], *, seconds: float) -> str:
    """Return killed, timeout or survived."""
    limit = round(FACTOR * seconds + GRACE_SECONDS)
    file = ROOT / mutant.file
    tree = mutate(file.read_text(encoding="utf-8"), mutant)
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        finder = MutatedFinder(file, tree)
        if finder.name in sys.modules:
            for name in [name for name in sys.modules if name.partition(".")[0] == "upshift"]:
                del sys.modules[name]
        sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
        files = list(dict.fromkeys(nodeid.partition("::")[0] for nodeid in nodeids))
        code = pytest.main([*PYTEST, *files], plugins=[Chosen(nodeids)])
        os._exit(int(code))
    _, status = os.waitpid(child, 0)
    if status == 0:
        return "survived"
    return "timeout" if os.WIFSIGNALED(status) else "killed"


def run(sample: list[Mutant], tests: list[str], *, most_seconds: float, output: Path) -> None:
    explained = {tuple(entry["mutant"]) for entry in json.loads(EXPLAINED.read_text())}
    files = [file for test in tests for file in _files(ROOT / test) if file.stem.startswith("test_")]
    notes = take_notes([str(file) for file in files if file.stem not in QUIET])
    print(f"{len(notes['seconds'])} tests, {sum(notes['seconds'].values()):.0f} s, exit code {notes['code']}", flush=True)
    for name in IMPORTED:
        import_module(name)
    results = json.loads(output.read_text()) if output.exists() else []  # of a run that was stopped
    for number, mutant in enumerate(sample[len(results) :], start=len(results) + 1):
        nodeids = tests_of(mutant, notes, most_seconds=most_seconds)
        usual = sum(notes["seconds"][nodeid] for nodeid in nodeids)
        start = time.monotonic()
        try:
            outcome = try_mutant(mutant, nodeids, seconds=usual) if nodeids else "no test calls it"
        except LookupError:
            outcome = "gone"
        if outcome in ("survived", "no test calls it") and mutant.identity in explained:
            outcome = "explained"
        results.append({**mutant.to_json(), "outcome": outcome, "tests": len(nodeids)})
        took = time.monotonic() - start
        where = f"{mutant.file}:{mutant.line} {mutant.change} | {mutant.text}"
        print(f"{number} {outcome} {took:.1f} s, {len(nodeids)} tests: {where}", flush=True)
        output.write_text(json.dumps(results, indent=0) + "\n")
    counts: dict[str, int] = defaultdict(int)
    for result in results:
        counts[result["outcome"]] += 1
    print(", ".join(f"{outcome} {count}" for outcome, count in sorted(counts.items())))


def main() -> None:
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
        return
    sample = [
        Mutant(**{name: value for name, value in entry.items() if name in Mutant.__dataclass_fields__})
        for entry in json.loads(given.sample.read_text())
    ]
    run(sample, given.tests, most_seconds=given.most_seconds, output=given.output)


if __name__ == "__main__":
    main()
