"""What the pages tell a person to type is understood: commands by the command line's own parsers, Python by the names and
arguments of the source. Nothing is run here; tests/cpu/cli/test_readme.py runs the central ones."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from pages import CODE, HISTORY, PAGES, ROOT, Block, blocks, place

import upshift
from upshift.cli.main import app
from upshift.cli.usage.messages import MissingValue, WrongValue
from upshift.errors import RequestError
from upshift.models.source import AdapterOptions
from upshift.planning.inference import space as inference
from upshift.planning.layout import Layout
from upshift.planning.plan import Plan
from upshift.planning.search import space as training

ABRIDGED = re.compile(r"\[|\||\.\.\.|, ")  # a form, not a command: its options must exist
ASKED_FOR = re.compile(r"[A-Z_]+")  # WATTS, GIB: what a reader puts in
PLANNED = ("plan", "train", "profile")
OF_XLA = {"momentum"}  # --set of train --backend xla


@cache
def root() -> Any:
    return typer.main.get_command(app)


def shown(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Line, command, and whether it stands there to be typed as it is: in a fence, or on a start page."""
    for block in blocks(path):
        for number, line in enumerate(block.lines, start=block.line):
            if block.kind == "fence":
                text = line.removeprefix("$ ")
                if text.startswith("upshift ") and block.language != "text":
                    yield number, without_comment(text), True
            else:
                for code in CODE.findall(line):
                    if code.startswith("upshift ") and " " in code.strip():
                        yield number, code, path.name.startswith("index.")


def without_comment(line: str) -> str:
    return re.split(r"\s+#", line)[0].rstrip(" ;")


def parse(command: Any, name: str, words: list[str]) -> dict[str, Any]:
    with command.make_context(name, [*words]) as context:
        given: dict[str, Any] = context.params
    return given


def check(line: str, whole: bool) -> None:
    """Raise RequestError for what is no command of ours."""
    words = shlex.split(line)[1:]
    command, name = root(), "upshift"
    while hasattr(command, "commands"):
        if not words or words[0] not in command.commands:
            raise RequestError(f"no command {' '.join([name, *words[:1]])}")
        name = words.pop(0)
        command = command.commands[name]
    if ABRIDGED.search(line):
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        own = words[: words.index("--")] if "--" in words else words
        unknown = {word.strip("[]") for word in own if word.strip("[]").startswith("-")} - known
        if unknown:
            raise RequestError(f"no option {', '.join(sorted(unknown))} of {name}")
    else:
        try:
            values(name, parse(command, name, words))
        except RequestError as error:
            missing = isinstance(error, MissingValue)
            example = any(one.startswith("-") and ASKED_FOR.fullmatch(two) for one, two in zip(words, words[1:], strict=False))
            if whole or not (missing or (example and isinstance(error, WrongValue))):
                raise
    if name in ("profile", "launch") and "--" in words and words[-1] != "...":  # behind it is a command of ours
        check(shlex.join(["upshift", *words[words.index("--") + 1 :]]), whole)


def values(name: str, given: dict[str, Any]) -> None:
    """Fields that are set, what is allowed, and hosts that are named, exist."""
    known = {*Plan.model_fields, *Layout.model_fields, *OF_XLA}
    of_inference = given.get("generate") or given.get("encode")
    allowed = tuple(given["allow"].split(",")) if given.get("allow") else ()
    (inference.check_allow if of_inference else training.check_allow)(allowed)
    if name in PLANNED and not of_inference:
        for text in (*(given.get("set_") or ()), *(given.get("why") or ())):
            if text.partition("=")[0] not in known:
                raise RequestError(f"no field of a plan: {text}")
    for host in (given.get("on") or "", *(given.get("compare") or "").split(",")):
        if host and not ASKED_FOR.fullmatch(host):
            upshift.describe(host)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_commands(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    axolotl = "base_model: MODEL\ndatasets: [{path: chats.jsonl, type: chat_template}]\n"
    llama_factory = "model_name_or_path: MODEL\ndataset: chats\ndataset_dir: .\n"
    (tmp_path / "dataset_info.json").write_text('{"chats": {"file_name": "chats.jsonl"}}')
    broken = []
    for number, line, whole in shown(path):
        (tmp_path / "PATH").write_text(llama_factory if "--from-llama-factory" in line else axolotl)
        try:
            check(line, whole)
        except RequestError as error:
            broken.append(f"{place(path, number)} {line}\n      {error}")
    if broken:
        pytest.fail("a page shows what cannot be typed:\n  " + "\n  ".join(broken), pytrace=False)


@pytest.mark.parametrize(
    ("line", "whole"),
    [
        ("upshift pan MODEL", False), ("upshift plan MODEL --onn 8xh100", False), ("upshift plan MODEL --on 8xh1000", True),
        ("upshift plan MODEL --set tensr_parallel=4", True), ("upshift train MODEL", True), ("upshift plan MODEL --rows x", True),
        ("upshift plan MODEL --allow adafctor", True),
        ("upshift doctor [--quikc] [--psu WATTS]", False), ("upshift launch --hosts a,b -- train MODEL --dat PATH", True),
    ],
)  # fmt: skip
def test_a_mistake_is_found(line: str, whole: bool) -> None:
    with pytest.raises(RequestError):
        check(line, whole)


def test_every_command_is_on_a_page() -> None:
    told = {line.split()[1] for path in PAGES if path.name != "commands.md" for _, line, _ in shown(path)}
    hidden = {name for name, command in root().commands.items() if command.hidden}
    assert set(root().commands) - hidden - told == {"demo"}  # it is `make demo`


def python_blocks() -> list[tuple[Path, Block]]:
    return [(path, block) for path in PAGES for block in blocks(path) if block.language == "python"]


@cache
def module_tree(name: str) -> ast.Module | None:
    """Of a module of ours, by its source: tests/light imports no torch."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None
    return None if spec is None or spec.origin is None else ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


def names_of(module: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(module_tree(module) or ast.Module([], [])):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)  # names that a package loads when they are used
    return found


def signature(name: str) -> ast.arguments | None:
    """Of upshift.NAME, a function or a class with its own __init__."""
    tree = module_tree(upshift._MODULE_OF[name])
    node = next(node for node in tree.body if getattr(node, "name", None) == name) if tree else None
    if isinstance(node, ast.ClassDef):
        node = next((inner for inner in node.body if getattr(inner, "name", None) == "__init__"), None)
    return node.args if isinstance(node, ast.FunctionDef) else None


def names_of_unpacked(argument: ast.arg | None, module: str) -> set[str] | None:
    """Return the names that ``**options: Unpack[Options]`` takes, or None if it takes any."""
    if argument is None:
        return set()
    annotation = ast.unparse(argument.annotation) if argument.annotation else ""
    return keys_of(annotation[len("Unpack[") : -1], module) if annotation.startswith("Unpack[") else None


def keys_of(name: str, module: str) -> set[str]:
    """Return the keys of a TypedDict and of those that it extends, from the source."""
    tree = module_tree(module)
    assert tree is not None, module
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and name in {alias.name for alias in node.names}:
            return keys_of(name, node.module or "")
    node = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    own = {inner.target.id for inner in node.body if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name)}
    bases = [keys_of(base.id, module) for base in node.bases if isinstance(base, ast.Name) and base.id != "TypedDict"]
    return own.union(*bases)


def wrong_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "upshift":
            known = set(upshift.__all__) if node.module == "upshift" else names_of(node.module or "")
            for alias in node.names:
                if alias.name not in known and module_tree(f"{node.module}.{alias.name}") is None:
                    yield node.lineno, f"{node.module} has no {alias.name}"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "upshift":
            if node.attr not in upshift.__all__ and module_tree(f"upshift.{node.attr}") is None:
                yield node.lineno, f"upshift has no {node.attr}"
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value).startswith("upshift."):
            inner = ast.unparse(node.value)
            if re.fullmatch(r"upshift(\.\w+)+", inner) and module_tree(inner) and node.attr not in names_of(inner):
                yield node.lineno, f"{inner} has no {node.attr}"
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"upshift.{name}" for name in upshift.__all__}:
            taken = signature(ast.unparse(node.func).removeprefix("upshift."))
            module = upshift._MODULE_OF[ast.unparse(node.func).removeprefix("upshift.")]
            further = None if taken is None else names_of_unpacked(taken.kwarg, module)
            if taken is not None and further is not None:
                names = {argument.arg for argument in (*taken.args, *taken.kwonlyargs)} | further
                for keyword in node.keywords:
                    if keyword.arg not in names:
                        yield node.lineno, f"{ast.unparse(node.func)} takes no {keyword.arg}"


def test_python() -> None:
    broken = []
    for path, block in python_blocks():
        tree = ast.parse("\n".join(block.lines[1:-1]), filename=str(path))
        broken += [f"{place(path, block.line + line)} {words}" for line, words in wrong_in(tree)]
    if broken:
        pytest.fail("a page shows Python that is not there:\n  " + "\n  ".join(broken), pytrace=False)


def test_a_mistake_in_python_is_found() -> None:
    wrong = (
        "from upshift.debugging import detect_overflw",
        "upshift.plann",
        "upshift.plan('M', seq=3)",
        "upshift.train('M', 'D', output='O', lora_rnk=3)",
        "upshift.xla.biuld('M')",
    )
    text = "\n".join(["import upshift", *wrong])
    assert [line for line, _ in wrong_in(ast.parse(text))] == [2, 3, 4, 5, 6]


def test_the_reference_has_every_public_name() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    told = re.findall(r"^## upshift\.(\w+)\n(?:.*\n)*?::: (\S+)$", text, flags=re.MULTILINE)
    assert dict(told) == {name: f"{home}.{name}" for name, home in upshift._MODULE_OF.items()}


OF_THE_GUIDES = """batch size|dimension and tile multiples|gradient accumulation|activation checkpointing|bf16, fp16, tf32
bf16_full_eval|Fused AdamW|Foreach AdamW|AnyPrecision|Adafactor|8-bit AdamW|weight-decay groups|pinned memory
dataloader_num_workers|torch.compile|torch_compile_backend|Accelerate|NGC|mixture of experts|SDPA|FlashAttention 2
BetterTransformer|packing|LoRA|IA3|AdaLoRA|QLoRA|memory anatomy|DataParallel|DDP|ZeRO 1, 2, 3|FSDP|naive (vertical)
1F1B|GPipe|interleaved|tensor, sequence|expert parallelism|FlexFlow|memory-centric tiling|overlap_comm
offload_optimizer|NVMe|zero_to_fp32.py|CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|NCCL_P2P_DISABLE|torchrun|mpirun
Kubernetes|NUMA|oneCCL|IPEX|OMP|TPU VM|TPUStrategy|pad_to_multiple_of|jit_compile|TFRecord|Google Cloud Storage
temperatures|nvidia-smi topo -m|NVLink|power|hyperparameter_search|SigOpt|Ray|wandb|Optuna|several objectives
TorchScript|ONNX Runtime|OpenVINO|device_map|max_memory|bitsandbytes 4 bits|LLM.int8|GPTQ|AWQ|AQLM|HQQ|Quanto
torchao|continuous batching|static cache|speculative decoding|prompt-lookup|chunked prefill|max_shard_size
load_sharded_checkpoint|low_cpu_mem_usage|torch_dtype|underflow_overflow|torch-distributed-gpu-test.py|toolkits
arch list|MPS|Gaudi|ROCm|elastic|XLA text generation"""


def test_the_reference_has_every_option_of_an_adapter() -> None:
    section = (ROOT / "docs/api.md").read_text(encoding="utf-8").partition("## upshift.plan")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE) == [*AdapterOptions.model_fields]


def test_the_reference_lists_the_options_of_a_search() -> None:
    tree = ast.parse((ROOT / "src/upshift/tuning/tune.py").read_text(encoding="utf-8"))
    [options] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "SearchOptions"]
    names = [ast.unparse(node.target) for node in options.body if isinstance(node, ast.AnnAssign)]
    section = (ROOT / "docs/api.md").read_text(encoding="utf-8").partition("## upshift.tune")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == names


def test_each_technique_of_the_guides_is_found_by_its_name() -> None:
    text = (ROOT / "docs" / "techniques.md").read_text(encoding="utf-8").lower()
    assert [name for line in OF_THE_GUIDES.splitlines() for name in line.split("|") if name.lower() not in text] == []


def test_each_technique_says_whether_it_is_used() -> None:
    text = (ROOT / "docs" / "techniques.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    techniques = [row for row in rows if len(row) == 3 and not row[0].startswith(("technique", "---"))]
    assert len(techniques) > 100
    assert [row[0] for row in techniques if row[1].rstrip("†") not in ("always", "automatically", "on request", "never")] == []


def test_files_that_pages_name_are_there() -> None:
    names = {(path, name) for path in PAGES for name in re.findall(r"\bexamples/[\w./]+\w", path.read_text(encoding="utf-8"))}
    assert len({name for _, name in names}) >= 4
    assert [f"{path.name}: {name}" for path, name in sorted(names) if not (ROOT / name).exists()] == []


def test_pages_install_extras_from_the_clone() -> None:
    """The package is not on PyPI, so ``pip install upshift`` would fail."""
    wrong = re.compile(r"pip install [^\n`]*\bupshift\b")
    assert [place(path, 1 + text.count("\n", 0, found.start())) for path in PAGES
            for text in [path.read_text(encoding="utf-8")] for found in wrong.finditer(text)] == []  # fmt: skip


def test_the_log_is_one_page_of_dated_entries() -> None:
    lines = (ROOT / "docs" / "log.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 300 and max(map(len, lines)) <= 160
    broken: list[str] = []
    dates: list[str] = []
    num_lines = 0
    areas = lines[next(number for number, line in enumerate(lines) if line.startswith("## ")) :]
    for line in areas:
        if line.startswith("## "):
            dates = []
        elif entry := re.match(r"- \*\*.+?\*\* \(((?:\d{4}-)?\d\d-\d\d)\) \S", line):
            date = entry[1] if len(entry[1]) > 5 else f"2026-{entry[1]}"
            if dates and date > dates[-1]:
                broken.append(f"newer than the entry before it: {line}")
            dates.append(date)
            num_lines = 1
        elif line:
            num_lines += 1
            if num_lines > 4 or not line.startswith("  "):
                broken.append(f"no entry, or its fifth line: {line}")
    assert broken == []
    assert dates != []


def test_the_architecture_lists_every_package() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([\w/]+)` \| \d \| \w", text, flags=re.MULTILINE)
    source = ROOT / "src" / "upshift"
    assert sorted(listed) == sorted(str(path.parent.relative_to(source)) for path in source.rglob("*/__init__.py"))


def test_every_page_is_in_the_navigation() -> None:
    shown_pages = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), flags=re.MULTILINE))
    docs = ROOT / "docs"
    pages = {str(path.relative_to(docs)) for path in docs.rglob("*.md") if not path.name.startswith("README.")}
    assert shown_pages == pages - {*HISTORY}
