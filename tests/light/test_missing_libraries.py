"""A library that is not installed: one line that names it and the command that installs it, for every command."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from test_wrong_options import COMMANDS

from upshift import versions
from upshift.versions import extra_with, libraries_of_extras

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "upshift"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
INSTALLED = {"numpy", "packaging", "platformdirs", "psutil", "pydantic", "pyyaml", "rich", "typer"}  # by docs/planning.md
OF_ANOTHER_ENVIRONMENT = {"vllm"}  # upshift engines install vllm
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 688,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1000, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "max_position_embeddings": 512, "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip
NEEDS_NONE = {"plan", "launch", "shard", "doctor", "bench list", "bench run", "bench compare", "bench report", "engines install"}
WORDS = {
    "plan": "model --quick --on rtx-4090 --sequence-length 64 --global-batch 2", "train": "model --data d.jsonl",
    "tune": "model --data d.jsonl --space space.yaml", "launch": "--hosts a,b --dry-run -- train model --data d.jsonl",
    "generate": "model --prompt a", "encode": "model --input d.txt --output v.npy", "serve": "model",
    "load-test": "http://127.0.0.1:1", "inspect": "model", "profile": "-- train model --data d.jsonl", "compare-runs": "a b",
    "convert": "model --dtype bfloat16 --output o", "merge": "model --output o",
    "quantize": "model --bits 4 --texts d.txt --output o", "shard": "model --max-shard-size 1MB --output s", "doctor": "--quick",
    "demo": "--output o", "bench list": "", "bench run": "a", "bench compare": "true true --rounds 2", "bench report": "",
    "data show": "model --data d.jsonl", "data to-tfrecord": "model --data d.jsonl --output o",
    "engines install": "vllm --dry-run", "xla compile": "model --topology v5e:2x2",
}  # fmt: skip
# A process of its own: the libraries may be imported here already, and modules that imported them would go on having them.
RUN_ALL = """
import contextlib, io, json, shlex, sys
hidden, words, required = map(json.loads, sys.argv[1:])

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])

sys.meta_path.insert(0, Hidden())
from upshift import versions
versions.requirements_of = lambda _: required
import typer
from upshift.cli import main
main.app = typer.main.get_command(main.app)  # else each call builds all commands again
results = {}
for command, options in words.items():
    sys.argv = ["upshift", *command.split(), *shlex.split(options)]
    error = io.StringIO()
    with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
        try:
            main.main()
        except SystemExit as ended:
            results[command] = (ended.code, error.getvalue())
print(json.dumps(results))
"""


def requirements() -> list[str]:
    """Return the requirements as the metadata of a wheel of this source would have them."""
    lines = list(PROJECT["dependencies"])
    for extra, libraries in EXTRAS.items():
        for library in libraries:
            base, _, marker = library.partition(";")
            lines.append(f"{base}; {f'({marker.strip()}) and ' if marker else ''}extra == '{extra}'")
    return lines


def imported() -> Iterator[str]:
    """Yield every module of another library that the source imports, anywhere."""
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                yield str(node.module).partition(".")[0]


LIBRARIES = sorted({*imported()} - sys.stdlib_module_names - {"upshift"} - OF_ANOTHER_ENVIRONMENT)


@pytest.fixture
def _metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "requirements_of", lambda _: requirements())


@pytest.mark.usefixtures("_metadata")
def test_an_extra_brings_every_library_that_is_imported() -> None:
    assert len(LIBRARIES) > 30
    found = {module: extra_with(module) for module in LIBRARIES}
    assert [module for module, place in found.items() if place is None] == []
    assert found["torch"] == ("torch", "")
    assert found["PIL"] == ("pillow", "images")
    assert found["datasets"] == ("datasets", "data")  # also in three larger extras
    assert extra_with("torch.no_such_module") is None and extra_with("json") is None


@pytest.mark.usefixtures("_metadata")
def test_the_extra_of_all_tasks_has_every_other() -> None:
    """Beside what needs a compiler, another machine or an account."""
    left_out = {"llamacpp", "heal", "ray", "wandb", "xla", "xla-compile", "docs", "dev", "all"}
    assert left_out < {*EXTRAS}
    together = {Requirement(line).name for line in libraries_of_extras(["all"])}
    for extra in {*EXTRAS} - left_out:
        assert {Requirement(line).name for line in libraries_of_extras([extra])} <= together, extra


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """The exit code and the errors of each command where only the libraries of a quick plan are installed."""
    folder = tmp_path_factory.mktemp("small")
    for model in ("model", "weights"):
        (folder / model).mkdir()
        (folder / model / "config.json").write_text(json.dumps(CONFIG))
    header = b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
    (folder / "weights" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    (folder / "d.jsonl").write_text('{"text": "a b c"}\n')
    (folder / "d.txt").write_text("a b c\n")
    (folder / "space.yaml").write_text((ROOT / "examples" / "space.yaml").read_text())
    needed = {"generate", "encode", "serve", "quantize", "shard"}  # of a model with weights
    words = {name: text.replace("model", "weights") if name in needed else text for name, text in WORDS.items()}
    hidden = [module for module in (*LIBRARIES, "pynvml") if versions.DISTRIBUTIONS.get(module, module) not in INSTALLED]
    command = [sys.executable, "-c", RUN_ALL, json.dumps(hidden), json.dumps(words), json.dumps(requirements())]
    environment = os.environ | {"PYTHONPATH": str(SOURCE.parent)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {name: tuple(answer) for name, answer in json.loads(done.stdout.splitlines()[-1]).items()}


def test_each_command_has_words() -> None:
    assert {*WORDS} == {" ".join(path) for path in COMMANDS}


@pytest.mark.parametrize("command", sorted({*WORDS} - NEEDS_NONE))
def test_a_missing_library_is_one_line(command: str, answers: dict[str, tuple[int, str]]) -> None:
    code, error = answers[command]
    line = error.splitlines()[-1]
    assert code == 2, error
    found = re.fullmatch(r"upshift: upshift [a-z -]+ needs ([\w-]+): run  pip install (.*)", line)
    assert found, error
    assert "Traceback" not in error
    assert found[1] not in INSTALLED


def test_a_quick_plan_needs_few_libraries(answers: dict[str, tuple[int, str]]) -> None:
    assert answers["plan"][0] == 0, answers["plan"]
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    assert re.findall(r"^pip install --no-deps \.\npip install (.*)$", page, re.MULTILINE) == [" ".join(sorted(INSTALLED))]
    assert {name for name in NEEDS_NONE if " needs " in answers[name][1]} == set()
