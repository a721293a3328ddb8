"""The rules of the house, each checked on the source itself. A failure names the file, the line and the rule."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

import rooms

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
PACKAGE = SOURCE / "upshift"

PUBLIC_NAMES = [
    "CrossEncoder", "Encoder", "Generator", "Host", "MediaEncoder", "ModelProfile", "Plan", "Record", "Seq2SeqTrainer", "Trainer",
    "Workload", "compare", "describe", "detect", "inspect", "load_model", "plan", "train", "tune",
]  # fmt: skip

# Floors, from the bottom. A name is a folder or a file of src/upshift; a file imports from it and from floors below.
FLOORS = (
    ("atomic_file", "disk_full", "errors", "importing", "internals", "parent_process", "text", "units", "value", "versions"),
    ("fork_server", "fork_server_process", "models", "record", "settings"),
    ("hardware", "benchmarking"),
    ("planning", "loading", "debugging"),
    ("training", "inference", "xla", "launching", "reports"),
    ("cli", "serving", "tuning"),
    ("__init__", "__main__", "sentence_transformers", "trl"),  # the package's own doors
)
FLOOR = {name: number for number, names in enumerate(FLOORS, start=1) for name in names}
SIDEWAYS = {  # the only imports within one floor
    ("disk_full", "atomic_file"): "what a cache keeps is written whole",
    ("errors", "versions"): "the message names the command that installs a library",
    ("internals", "errors"): "a name that a library took away is refused",
    ("internals", "versions"): "the refusal says the library's version",
    ("value", "errors"): "a value that cannot be read is a RequestError",
    ("fork_server_process", "settings"): "a program's entry point leaves out what libraries say about their own parts",
    ("planning", "loading"): "a quick plan takes the sizes of a model's tensors from the headers of its files",
    ("models", "settings"): "settings is the only reader of the environment",
    ("cli", "tuning"): "a command parses and prints; the study is tuning's",
    ("cli", "serving"): "likewise; the server is serving's",
    ("xla", "training"): "what a user decides about a run is the same for both backends",
    ("xla", "inference"): "a prompt has the same tokens, and is refused in the same words, for both backends",
    ("benchmarking", "hardware"): "a result row names the host that it was measured on",
}

HEAVY = ("torch", "transformers")
NEEDS_TORCH = "# needs torch"  # the first line of a file of floors 1 to 4 that traces, or measures, with torch
HEAVY_PACKAGES = {"training", "inference", "xla", "launching", "tuning", "serving"}  # may import torch when they are imported
NO_NUMPY_PACKAGES = {"errors", "units", "value", "models", "record", "settings", "planning"}  # beside those that need torch

MAX_FILE_LINES = 600
MAX_FILES_OF_A_FOLDER = 16
MAX_FILES_OF_COMMANDS = 24
MIN_LINES_OF_ONE_USER = 30
MAX_FUNCTION_LINES = 60
LONGER: dict[str, str] = {}  # "file" or "file:function" -> why it may be longer
MAX_UNFORMATTED = 45  # statements that the formatter leaves alone, outside cli: tables of short words
MAX_CONTRIBUTING_LINES = 80
MAX_IMPORTED = 60  # modules, of the standard library most of them
MAX_ROOMS = {"plan": 109, "train": 141, "generate": 63}  # files that the model enters from a command, by tests/rooms.py
MACHINE_TEXT = {
    "an absolute path of a machine": re.compile(r"(?<![\w.])/(?:work|root|home)/"),
    "a registry address": re.compile(r"in[d]ex-url|find-l[i]nks|[p]ypi\.org/simple|download\.[p]ytorch\.org|fi[l]e:///"),
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources(*packages: str) -> list[Path]:
    """All files of src/upshift, or those of some of its folders and files."""
    files = sorted(PACKAGE.rglob("*.py"))
    return [file for file in files if not packages or place(file) in packages]


def place(file: Path) -> str:
    """The folder or file of src/upshift that it belongs to: a name in FLOORS."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def needs_torch(file: Path) -> bool:
    return lines(file)[:1] == [NEEDS_TORCH]


def module_of(file: Path) -> str:
    name = ".".join(file.relative_to(SOURCE).with_suffix("").parts)
    return name.removesuffix(".__init__")


def at(file: Path, line: int) -> str:
    return f"{file.relative_to(ROOT)}:{line}"


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), filename=str(file))


@cache
def nodes(file: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree(file)))


@cache
def lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines()


@cache
def modules() -> dict[str, Path]:
    return {module_of(file): file for file in sources()}


def imported(node: ast.stmt, file: Path) -> list[str]:
    """What a statement imports, by full name: upshift.models.profile for ``from upshift.models import profile``."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = node.module or ""
    if node.level:
        package = module_of(file).split(".") if file.name == "__init__.py" else module_of(file).split(".")[:-1]
        base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
    if base.split(".")[0] != "upshift":
        return [base]
    names = [f"{base}.{alias.name}" for alias in node.names]
    is_module = [name in modules() or (PACKAGE.parent / Path(*name.split("."))).is_dir() for name in names]
    return [name if known else base for name, known in zip(names, is_module, strict=True)]


@cache
def all_imports(file: Path) -> tuple[tuple[int, str], ...]:
    found = [node for node in nodes(file) if isinstance(node, ast.Import | ast.ImportFrom)]
    return tuple((node.lineno, name) for node in found for name in imported(node, file))


@cache
def first_imports(file: Path) -> tuple[tuple[int, str], ...]:
    """What is imported when the file is: not inside functions, not for the type checker only."""
    waiting: list[ast.AST] = [tree(file)]
    found: list[tuple[int, str]] = []
    while waiting:
        node = waiting.pop()
        if isinstance(node, Function | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting.extend(node.orelse)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            found += [(node.lineno, name) for name in imported(node, file)]
        if isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case | ast.Module):  # no import stands in an expression
            waiting.extend(ast.iter_child_nodes(node))
    return tuple(sorted(found))


@cache
def way_to(module: str, libraries: tuple[str, ...]) -> str | None:
    """How importing this module of ours imports one of the libraries; None: it does not."""
    waiting: list[tuple[str, tuple[tuple[Path, int], ...]]] = [(module, ())]
    seen = set()
    while waiting:
        name, way = waiting.pop(0)
        if name in seen:
            continue
        seen.add(name)
        if "." in name:
            waiting.append((name.rpartition(".")[0], way))  # its package is imported before it
        if name not in modules():
            continue
        for line, target in first_imports(modules()[name]):
            here = (*way, (modules()[name], line))
            if target.split(".")[0] in libraries:
                return f"{' -> '.join(at(*there) for there in here)} imports {target}"
            if target.split(".")[0] == "upshift" and target not in seen:
                waiting.append((target, here))
    return None


@cache
def names_of(module: str) -> set[str]:
    """The names that a module defines, imports or assigns."""
    names: set[str] = set()
    for node in nodes(modules()[module]):
        if isinstance(node, Function | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
    return names


def unknown_imports(file: Path) -> list[str]:
    """Return the lines that import from upshift what it does not have. A module with ``__getattr__`` may have any name."""
    unknown = []
    for node in nodes(file):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("upshift"):
            continue
        module = str(node.module)
        for alias in node.names:
            is_module = f"{module}.{alias.name}" in modules()
            if module not in modules() or not (is_module or {alias.name, "__getattr__"} & names_of(module)):
                unknown.append(f"{node.lineno} {module} has no {alias.name}")
    return unknown


def functions(file: Path) -> Iterator[Function]:
    return (node for node in nodes(file) if isinstance(node, Function))


def refuse(broken: list[str], rule: str) -> None:
    if broken:
        pytest.fail(f"{rule}:\n  " + "\n  ".join(broken), pytrace=False)


def test_imported_names_exist() -> None:
    """mypy sees this in src alone."""
    folders = ("tests", "benchmarks", "templates", "examples")
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    refuse([f"{file.relative_to(ROOT)}:{line}" for file in files for line in unknown_imports(file)], "an import that fails")


def test_an_unknown_import_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("from upshift.units import GIB, Nothing\nfrom upshift.nowhere import gib\nfrom upshift import plan\n")
    assert unknown_imports(file) == ["1 upshift.units has no Nothing", "2 upshift.nowhere has no gib"]


def test_every_file_has_a_floor() -> None:
    refuse(
        sorted({f"src/upshift/{place(file)}" for file in sources() if place(file) not in FLOOR}),
        "not on any floor; add the name to FLOORS",
    )


def test_every_folder_is_a_package() -> None:
    folders = {file.parent for file in sources()}
    refuse(
        sorted(str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").is_file()),
        "no __init__.py",
    )


def test_imports_go_down() -> None:
    broken = []
    for file in sources():
        here = place(file)
        for line, name in all_imports(file):
            parts = name.split(".")
            if parts[0] != "upshift":
                continue
            there = parts[1] if len(parts) > 1 else "__init__"
            if here == there or (here, there) in SIDEWAYS or FLOOR.get(there, 99) < FLOOR.get(here, 0):
                continue
            floors = f"{here} (floor {FLOOR.get(here)}) imports {there} (floor {FLOOR.get(there)})"
            broken.append(f"{at(file, line)} {floors}")
    refuse(broken, "a file imports only from its own package and from floors below")


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Return each group of modules that import each other, directly or through others."""
    reached: dict[str, set[str]] = {}
    for module in imports:
        found: set[str] = set()
        waiting = [module]
        while waiting:
            new = imports.get(waiting.pop(), set()) - found
            found |= new
            waiting += new
        reached[module] = found
    around = [module for module in imports if module in reached[module]]
    groups = {frozenset(other for other in around if other in reached[one] and one in reached[other]) for one in around}
    return sorted(sorted(group) for group in groups)


def test_no_imports_make_a_circle() -> None:
    """An import in a function, or for the type checker alone, counts as any other."""
    own = modules()
    imports = {module: {name for _, name in all_imports(file) if name in own} for module, file in own.items()}
    refuse([" <-> ".join(circle) for circle in circles(imports)], "files that import each other are one file, or want a third")


def test_a_circle_is_seen() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"d"}}) == [["b", "c"], ["d"]]


def test_the_exceptions_are_needed() -> None:
    names = [(place(file), name.split(".")) for file in sources() for _, name in all_imports(file)]
    seen = {(here, parts[1]) for here, parts in names if parts[0] == "upshift" and len(parts) > 1}
    refuse([f"{one} -> {other}" for one, other in SIDEWAYS if (one, other) not in seen], "in SIDEWAYS and not used")
    marked = [file for file in sources() if needs_torch(file)]
    unneeded = [file for file in marked if way_to(module_of(file), (*HEAVY, "numpy")) is None or place(file) in HEAVY_PACKAGES]
    refuse([str(file.relative_to(ROOT)) for file in unneeded], f"says {NEEDS_TORCH!r} without need")


@pytest.mark.parametrize("library", HEAVY)
def test_light_files_import_without(library: str) -> None:
    light = [file for file in sources() if place(file) not in HEAVY_PACKAGES and not needs_torch(file)]
    ways = {file: way_to(module_of(file), (library,)) for file in light}
    refuse(
        [f"{file.relative_to(ROOT)}: {way}" for file, way in ways.items() if way],
        f"imports {library} when it is imported; import it in the function that needs it",
    )


def test_planning_imports_without_numpy() -> None:
    light = [file for file in sources(*NO_NUMPY_PACKAGES) if not needs_torch(file)]
    ways = {file: way_to(module_of(file), ("numpy",)) for file in light}
    refuse(
        [f"{file.relative_to(ROOT)}: {way}" for file, way in ways.items() if way],
        "imports numpy when it is imported; import it in the function that needs it",
    )


def test_light_tests_import_without_torch() -> None:
    broken = [
        f"{at(file, line)} imports {name}"
        for file in sorted((ROOT / "tests" / "light").rglob("*.py"))
        for line, name in first_imports(file)
        if name.split(".")[0] in HEAVY or (name.startswith("upshift") and way_to(name, HEAVY))
    ]
    refuse(broken, "a light test needs no torch")


def test_import_is_cheap() -> None:
    """The modules are counted: their time says more of the machine."""
    child = (
        "import sys; sys.path.insert(0, sys.argv[1]); before = set(sys.modules); import upshift; "
        "print(*(set(sys.modules) - before))"
    )
    command = [sys.executable, "-c", child, str(SOURCE)]
    imported = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert not {name.split(".")[0] for name in imported} & set(HEAVY), "`import upshift` imports a heavy library"
    assert len(imported) < MAX_IMPORTED, f"`import upshift` imports {len(imported)} modules: {sorted(imported)}"


def test_public_names() -> None:
    import upshift

    assert sorted(upshift.__all__) == PUBLIC_NAMES
    assert [name for name in PUBLIC_NAMES if name not in dir(upshift)] == []


def test_only_hardware_reads_how_much_memory_is_free() -> None:
    """The machine's figure alone is wrong in a container, whose limit free_memory_bytes knows."""
    broken = []
    for file in sources():
        if module_of(file) != "upshift.hardware.host_memory":
            uses = (node for node in nodes(file) if isinstance(node, ast.Attribute) and node.attr == "virtual_memory")
            broken += [at(file, node.lineno) for node in uses]
    refuse(broken, "call free_memory_bytes of hardware/host_memory.py")


def test_only_settings_reads_the_environment() -> None:
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    broken = []
    for file in sources():
        if module_of(file) == "upshift.settings":
            continue
        for node in nodes(file):
            attribute = isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os"
            direct = isinstance(node, ast.ImportFrom) and node.module == "os" and names & {n.name for n in node.names}
            if attribute or direct:
                broken.append(at(file, node.lineno))
    refuse(broken, "only settings.py reads environment variables; add a field to Settings")


def test_files_are_short() -> None:
    counts = {str(file.relative_to(PACKAGE)): len(lines(file)) for file in sources()}
    long = {name: count for name, count in counts.items() if count > MAX_FILE_LINES and name not in LONGER}
    refuse([f"src/upshift/{name}: {count}" for name, count in long.items()], f"over {MAX_FILE_LINES} lines")


def test_folders_are_small() -> None:
    counts = Counter(file.parent for file in sources() if file.name != "__init__.py")
    limits = {folder: MAX_FILES_OF_COMMANDS if folder == PACKAGE / "cli" else MAX_FILES_OF_A_FOLDER for folder in counts}
    refuse(
        [f"{folder.relative_to(ROOT)}: {count}" for folder, count in counts.items() if count > limits[folder]],
        f"over {MAX_FILES_OF_A_FOLDER} files ({MAX_FILES_OF_COMMANDS} in cli)",
    )


def test_a_small_file_has_several_users() -> None:
    """A file of a few lines that one other file imports is a part of that one. Entry points of processes have no importer."""
    users: dict[str, set[Path]] = {}
    for file in sources():
        for _, name in all_imports(file):
            users.setdefault(name, set()).add(file)
    small = [
        file for file in sources()
        if len(lines(file)) < MIN_LINES_OF_ONE_USER and file.name != "__init__.py" and len(users.get(module_of(file), ())) == 1
        and not any("__name__ ==" in line for line in lines(file))
    ]  # fmt: skip
    refuse([str(file.relative_to(ROOT)) for file in small if place(file) != "internals"], "a small file with one importer")


def test_functions_are_short() -> None:
    broken = []
    for file in sources():
        for node in functions(file):
            count = (node.end_lineno or node.lineno) - node.lineno + 1
            if count > MAX_FUNCTION_LINES and f"{file.relative_to(PACKAGE)}:{node.name}" not in LONGER:
                broken.append(f"{at(file, node.lineno)} {node.name}: {count}")
    refuse(broken, f"over {MAX_FUNCTION_LINES} lines")


MAX_PARAMETERS_OF_A_STEP = 6
STEPS_OF_A_REQUEST = {"prepare_run", "run_training", "profile", "run_job"}  # what one request passes through


def parameters(function: Function) -> list[ast.arg]:
    """Return all parameters of a function, ``*`` and ``**`` included."""
    named = function.args
    return [*named.posonlyargs, *named.args, *named.kwonlyargs, *filter(None, (named.vararg, named.kwarg))]


def test_requests_are_carried_whole() -> None:
    """A request of a user's is one typed value, which no function takes apart into keyword arguments for the next one."""
    broken, seen = [], set()
    for file in sources():
        for node in functions(file):
            more = node.args.kwarg
            if more is not None and more.arg == "request":
                broken.append(f"{at(file, node.lineno)} {node.name}: **{ast.unparse(more)}")
            if node.name in STEPS_OF_A_REQUEST:
                seen.add(node.name)
                if len(parameters(node)) > MAX_PARAMETERS_OF_A_STEP:
                    broken.append(f"{at(file, node.lineno)} {node.name}: {len(parameters(node))} parameters")
    refuse(broken, "a request is one frozen value")
    assert seen == STEPS_OF_A_REQUEST


OPEN_KEYWORDS = {  # packages whose functions pass on names that another library defines
    "reports": "the properties of a plotly figure",
    "models": "the arguments of an attention function of transformers",
    "xla": "the arguments of an operator of torch",
    "debugging": "the arguments of a function that is watched",
}


def test_public_functions_name_their_arguments() -> None:
    """A caller, and mypy, see what a function takes: ``**options: Unpack[...]`` and not ``**options: Any``."""
    broken = []
    for file in sources():
        for node in tree(file).body:
            if not isinstance(node, Function) or node.name.startswith("_") or place(file) in OPEN_KEYWORDS:
                continue
            more = node.args.kwarg
            if more is not None and (more.annotation is None or ast.unparse(more.annotation) in ("Any", "object")):
                broken.append(f"{at(file, node.lineno)} {node.name}: **{more.arg}")
    refuse(broken, "keyword arguments have names and types")


def test_a_model_enters_few_files() -> None:
    """A reader who follows the model through a command opens each of these files."""
    walked = rooms.Sources({module: tree(file) for module, file in modules().items()})
    counts = {command: rooms.files_of(rooms.rooms(walked, walked.start(command))) for command in rooms.COMMANDS}
    refuse([f"{command}: {count}" for command, count in counts.items() if count > MAX_ROOMS[command]], f"over {MAX_ROOMS}")


REGISTRY = """
from upshift.cli import train
from upshift.cli.plan import command as plan
COMMANDS = (Entry("plan", plan.command, TRAIN), Entry("train", train.command, TRAIN), Entry("data", train.show, LOOK))
"""
COMMAND = """
import math
from upshift.loading import load
def command(model, limit=0):
    request = pack(locals())
    load(limit)
    math.log(request)
    Loader(request).read(limit)
"""
LOADING = """
def load(path): ...
def pack(options): ...
class Loader:
    def __init__(self, path): self.path = path
    def read(self, limit): ...
    def log(self, number): unused(number)
"""


def small_sources() -> rooms.Sources:
    texts = {
        rooms.COMMAND_LINE: REGISTRY,
        "upshift.cli.plan.command": COMMAND + "\nfrom upshift.loading import Loader\nfrom upshift.packing import pack\n",
        "upshift.cli.train": "def show(folder): ...",
        "upshift.loading": LOADING,
        "upshift.packing": "def pack(options): ...",
    }
    return rooms.Sources({module: ast.parse(text) for module, text in texts.items()})


def test_rooms_are_those_that_the_model_enters() -> None:
    walked = small_sources()
    entered = {".".join(place) for place in rooms.rooms(walked, walked.start("plan"))}
    assert entered == {"upshift.cli.plan.command.command", "upshift.packing.pack", "upshift.loading.Loader.__init__"}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("tune", "upshift.cli.main registers no command 'tune'; it has plan, train, data"),
        ("train", "train.command, the command 'train', is no function with a parameter 'model'"),
        ("data", "train.show, the command 'data', is no function with a parameter 'model'"),
    ],
)
def test_a_missing_start_is_named(command: str, words: str) -> None:
    with pytest.raises(rooms.MissingStart) as error:
        small_sources().start(command)
    assert str(error.value) == words


def test_few_statements_are_not_formatted() -> None:
    files = [file for file in sources() if place(file) != "cli"]  # signatures of commands
    skipped = [at(file, number) for file in files for number, line in enumerate(lines(file), 1) if "# fmt: skip" in line]
    assert len(skipped) <= MAX_UNFORMATTED, skipped


def test_broad_handlers_say_why() -> None:
    broken = []
    for file in sources():
        for node in nodes(file):
            if not isinstance(node, ast.ExceptHandler):
                continue
            caught = "" if node.type is None else ast.unparse(node.type)
            broad = node.type is None or re.search(r"\b(Base)?Exception\b", caught)
            passes_on = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
            if broad and not passes_on and "#" not in lines(file)[node.lineno - 1]:
                broken.append(f"{at(file, node.lineno)} except {caught}")
    refuse(broken, "a broad handler says its reason in a comment on the same line, or raises on")


def is_unordered(node: ast.expr) -> bool:
    """Return whether an expression makes a set, whose order of strings changes with PYTHONHASHSEED."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in ("set", "frozenset")
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr | ast.BitAnd | ast.Sub | ast.BitXor):
        return is_unordered(node.left) or is_unordered(node.right)
    return isinstance(node, ast.Set | ast.SetComp)


ORDER_MATTERS = {"dict", "enumerate", "filter", "fromkeys", "iter", "join", "list", "map", "tuple", "zip"}
ORDER_IS_LOST = {"all", "any", "frozenset", "max", "min", "set", "sorted"}


def unordered_loops(file: Path) -> Iterator[int]:
    """Yield the lines that take the elements of a set one after another, and do not sort or collect them again."""
    collected = {
        id(argument)
        for call in nodes(file)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in ORDER_IS_LOST
        for argument in call.args
    }
    for node in nodes(file):
        taken: list[ast.expr] = []
        if isinstance(node, ast.For):
            taken = [node.iter]
        elif isinstance(node, ast.ListComp | ast.DictComp | ast.GeneratorExp) and id(node) not in collected:
            taken = [generator.iter for generator in node.generators]
        elif isinstance(node, ast.Tuple | ast.List):
            taken = [element.value for element in node.elts if isinstance(element, ast.Starred)]
        elif isinstance(node, ast.Call) and id(node) not in collected:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            taken = list(node.args) if name in ORDER_MATTERS else []
        yield from (value.lineno for value in taken if is_unordered(value))


def test_no_order_comes_from_a_set() -> None:
    broken = [at(file, line) for file in sources() for line in unordered_loops(file)]
    refuse(broken, "the order of a set changes with PYTHONHASHSEED; use sorted(...) or dict.fromkeys(...)")


@pytest.mark.parametrize(
    "text",
    ["for a in {b, c}: f(a)", "x = [a for a in set(b)]", "x = {a: 1 for a in {*b}}", "x = ' '.join({*b} | c)", "x = (*{b, c},)"],
)
def test_an_order_of_a_set_is_seen(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.py"
    file.write_text(text)
    assert list(unordered_loops(file)) == [1]


@pytest.mark.parametrize("text", ["x = sorted(a for a in {b, c})", "x = {a for a in {*b}}", "for a in sorted({b, c}): f(a)"])
def test_a_set_without_order_is_let_through(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.py"
    file.write_text(text)
    assert not list(unordered_loops(file))


def calls(file: Path, is_it: Callable[[ast.Call], bool]) -> Iterator[ast.Call]:
    return (node for node in nodes(file) if isinstance(node, ast.Call) and is_it(node))


def test_only_the_command_line_prints() -> None:
    def prints(call: ast.Call) -> bool:
        return isinstance(call.func, ast.Name) and call.func.id == "print"

    broken = [at(file, call.lineno) for file in sources() if place(file) != "cli" for call in calls(file, prints)]
    refuse(broken, "only cli prints")


def test_every_module_says_what_it_is() -> None:
    broken = [str(file.relative_to(ROOT)) for file in sources() if not ast.get_docstring(tree(file))]
    refuse(broken, "no docstring at the top")


NO_BEGINNING = ("Of", "What", "Whether", "Likewise", "As", "Where", "Which", "Whose", "How", "Who")  # of a docstring
NO_SENTENCE = re.compile(r"[.:]\s+(Of|Whether|Which|Whose|Who)\s")  # begins in a docstring: two facts in one


def riddles(file: Path) -> list[int]:
    """Return the lines of docstrings that begin with neither a verb nor a noun, or that pack two facts into a sentence, so that
    a reader must guess what is meant."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    documented = [node for node in nodes(file) if isinstance(node, kinds)]
    texts = [(getattr(node, "lineno", 1), ast.get_docstring(node) or "") for node in documented]
    return [
        line for line, text in texts
        if text and (text.split()[0].rstrip(",.:;") in NO_BEGINNING or NO_SENTENCE.search(text))
    ]  # fmt: skip


def test_docstrings_begin_with_what_is_done() -> None:
    broken = [at(file, line) for file in sources() for line in riddles(file)]
    refuse(broken, f"a docstring begins with one of {', '.join(NO_BEGINNING)}, or a sentence in it with Of, Which or Who")


def test_a_riddle_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(
        '"""Whether."""\n\ndef one():\n    """Of two."""\n\ndef two():\n    """Return two."""\n\n'
        'def three():\n    """Return three.\n\n    Of\n    four, one is left out."""\n'
    )
    assert riddles(file) == [1, 3, 9]


def repository_files() -> list[Path]:
    """Everything that is, or is about to be, in the repository."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def test_nothing_names_a_machine() -> None:
    broken = []
    for file in repository_files():
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a picture
        for what, pattern in MACHINE_TEXT.items():
            for match in pattern.finditer(text):
                broken.append(f"{at(file, text.count(chr(10), 0, match.start()) + 1)} {what}")
    refuse(broken, "the repository names no machine and no registry")


def test_links_between_pages_lead_somewhere() -> None:
    broken = []
    for file in repository_files():
        if file.suffix != ".md":
            continue
        for number, line in enumerate(lines(file), start=1):
            for target in re.findall(r"\]\(([^)#\s]+)", line):
                if "://" not in target and not target.startswith("mailto:") and not (file.parent / target).exists():
                    broken.append(f"{at(file, number)} {target}")
    refuse(broken, "a link leads nowhere")


NAMED_FILE = re.compile(r"(?<![\w/.])(?:src|tests|benchmarks|docs|templates|examples)/[a-z0-9_/]+\.(?:py|md|jsonl)\b")
HISTORY = ("CHANGELOG.md", "docs/log.md", "docs/log_archive.md")  # they name files that there were


def missing_files(file: Path) -> list[str]:
    """Return the lines that name a file of the repository which does not exist."""
    named = [(number, name) for number, line in enumerate(lines(file), start=1) for name in NAMED_FILE.findall(line)]
    return [f"{number}: {name}" for number, name in named if not (ROOT / name).exists()]


def test_named_files_exist() -> None:
    pages = [file for file in repository_files() if file.suffix == ".md" and str(file.relative_to(ROOT)) not in HISTORY]
    broken = [f"{file.relative_to(ROOT)}:{line}" for file in [*sources(), *pages] for line in missing_files(file)]
    refuse(broken, "a text names a file that does not exist")


def test_a_missing_file_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("# tests/light/test_house.py\n# see (tests/light/test_nothing.py), github.com/x/y/tests/other.py\n")
    assert missing_files(file) == ["2: tests/light/test_nothing.py"]


@pytest.mark.parametrize("name", ["LICENSE", "CHANGELOG.md", "CONTRIBUTING.md"])
def test_the_house_has(name: str) -> None:
    assert (ROOT / name).is_file()


def test_licence_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text


def test_contributing_fits_a_page() -> None:
    assert len(lines(ROOT / "CONTRIBUTING.md")) < MAX_CONTRIBUTING_LINES


# --- tests that cannot fail ------------------------------------------------------------------------------------------

TESTS = ROOT / "tests"
COUNTED_CALLS = {"range", "zip", "enumerate", "sorted", "reversed", "list", "tuple", "dict", "set"}


def files_of_tests() -> list[Path]:
    return sorted(TESTS.rglob("*.py"))


def always_true(node: ast.expr) -> bool:
    """Whether constants alone decide that an expression is true."""
    if isinstance(node, ast.Constant):
        return bool(node.value)
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(not isinstance(element, ast.Starred) for element in node.elts)
    if isinstance(node, ast.Dict):
        return any(key is not None for key in node.keys)
    if isinstance(node, ast.BoolOp):
        return (any if isinstance(node.op, ast.Or) else all)(map(always_true, node.values))
    return isinstance(node, ast.Lambda | ast.GeneratorExp)


def cannot_fail(test: ast.expr) -> str | None:
    """Why an asserted expression says little or nothing; None where nothing is found."""
    if always_true(test):
        return "is always true"
    for node in ast.walk(test):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq | ast.Is | ast.LtE | ast.GtE):
            sides = [node.left, *node.comparators]
            for left, right in zip(sides, sides[1:], strict=False):
                if ast.dump(left) == ast.dump(right) and not any(isinstance(part, ast.Call) for part in ast.walk(left)):
                    return "compares a value with itself"
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
            for part in node.values:
                is_a_case = isinstance(part, ast.Compare) and isinstance(part.ops[0], ast.Eq) and isinstance(part.left, ast.Name)
                if is_a_case and isinstance(part.comparators[0], ast.Constant):  # type: ignore[attr-defined]
                    return "lets a case of its parameters pass whatever comes out"
    return None


def test_no_assertion_is_always_true() -> None:
    broken = []
    for file in files_of_tests():
        for node in nodes(file):
            if isinstance(node, ast.Assert) and (why := cannot_fail(node.test)):
                broken.append(f"{at(file, node.lineno)} {why}: {ast.unparse(node.test)[:80]}")
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                broken.append(f"{at(file, node.lineno)} cuts a text constant: {ast.unparse(node)}")
            if isinstance(node, ast.Call) and ast.unparse(node) in ("pytest.raises(Exception)", "pytest.raises(BaseException)"):
                broken.append(f"{at(file, node.lineno)} any exception passes")
    refuse(broken, "an assertion can fail")


def is_never_empty(node: ast.expr, counted: set[str]) -> bool:
    """Whether a loop over the expression runs at all: over literals, what is made of them, parameters and constants."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict):
        return True
    if isinstance(node, ast.Name):
        return node.id in counted or node.id.isupper()
    if isinstance(node, ast.Attribute | ast.Subscript):
        return is_never_empty(node.value, counted)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):  # literal.items()
        return is_never_empty(node.func.value, counted)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in COUNTED_CALLS:
        strict = any(keyword.arg == "strict" and ast.unparse(keyword.value) == "True" for keyword in node.keywords)
        return node.func.id == "range" or strict or any(is_never_empty(argument, counted) for argument in node.args)
    return isinstance(node, ast.BinOp | ast.ListComp | ast.Starred)


def asserts_for_certain(body: list[ast.stmt], counted: set[str]) -> bool:
    """Whether some assertion stands outside loops that may not run."""
    for node in body:
        if isinstance(node, ast.Assert) or "raises(" in ast.unparse(node).partition("\n")[0]:
            return True
        if isinstance(node, ast.Assign) and is_never_empty(node.value, counted):
            counted |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.For) and not is_never_empty(node.iter, counted):
            continue
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        handlers = [handler.body for handler in getattr(node, "handlers", [])]
        for inner in (getattr(node, "body", []), getattr(node, "orelse", []), *handlers):
            if asserts_for_certain(inner, counted):
                return True
    return False


def test_no_test_asserts_in_a_loop_alone_that_may_not_run() -> None:
    broken = []
    for file in files_of_tests():
        for function in nodes(file):
            if not isinstance(function, ast.FunctionDef) or not function.name.startswith("test_"):
                continue
            asserts = [node for node in ast.walk(function) if isinstance(node, ast.Assert)]
            nested = {id(node) for inner in ast.walk(function) if isinstance(inner, ast.FunctionDef) and inner is not function
                      for node in ast.walk(inner)}  # fmt: skip
            own = [node for node in asserts if id(node) not in nested]
            arguments = {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
            if own and not asserts_for_certain(function.body, arguments):
                broken.append(f"{at(file, function.lineno)} {function.name}")
    refuse(broken, "what a loop runs over is counted, or something is asserted beside it")


@pytest.mark.parametrize(
    "text", ["'a'", "(x, 'words')", "x or 'a'", "page == page", "out or page == 'a'", "y and (z or later == 0.2)", "1 == 1"]
)
def test_what_cannot_fail_is_seen(text: str) -> None:
    assert cannot_fail(ast.parse(text, mode="eval").body)


@pytest.mark.parametrize("text", ["x", "x == y", "run() == run()", "x is None or x < y", "(a.b or 0) > 3", "'a' in x"])
def test_what_can_fail_is_let_through(text: str) -> None:
    assert cannot_fail(ast.parse(text, mode="eval").body) is None
