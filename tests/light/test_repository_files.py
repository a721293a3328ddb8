"""The files that other programs read: workflows, forms, the citation, the image, the hooks. Every command in them exists."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_docs import check

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PYTHONS = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
FIELDS = {"input", "textarea", "dropdown", "checkboxes", "markdown"}


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile: their name, and the rest with its lines joined."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in lines if line)]


def make_targets(step: str, matrix: dict[str, list[str]]) -> list[str]:
    """Return the targets that a step of a workflow makes, one for each value of the matrix that it names."""
    target = shlex.split(step.replace("${{ ", "${{").replace(" }}", "}}"))[1]
    named = re.fullmatch(r"\$\{\{matrix\.(\w+)\}\}", target)
    return matrix[named[1]] if named else [target]


def test_pythons_are_those_that_the_package_takes() -> None:
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
    assert len(PYTHONS) == 4


def test_the_workflows_of_the_issue_are_there() -> None:
    assert [path.stem for path in WORKFLOWS] == ["docs", "light", "newest", "test", "wheel"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_makes_what_the_makefile_has(path: Path) -> None:
    document = read(path)
    assert document["permissions"] == {"contents": "read"}
    assert document[True]  # "on", which YAML 1.1 reads as a boolean
    targets: list[str] = []
    for job in document["jobs"].values():
        assert 0 < job["timeout-minutes"] <= 180
        matrix = job.get("strategy", {}).get("matrix", {})
        if "python" in matrix:
            assert matrix["python"] == PYTHONS
        uses = [step["uses"] for step in job["steps"] if "uses" in step]
        assert uses[:2] == ["actions/checkout@v6", "actions/setup-python@v6"]
        assert [name for name in uses[2:] if name != "actions/upload-artifact@v7"] == []
        for step in job["steps"]:
            if "run" in step:
                assert shlex.split(step["run"])[0] == "make", step
                targets += make_targets(step["run"], matrix)
    assert targets
    rules = {name for line in re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE) for name in line.split()}
    assert {*targets} <= rules
    assert all(re.search(rf"^{target}:", MAKEFILE, re.MULTILINE) for target in targets)


@pytest.mark.parametrize("path", [path for path in FORMS if path.name != "config.yml"], ids=lambda path: path.stem)
def test_a_form_has_fields(path: Path) -> None:
    form = read(path)
    assert form["name"] and form["description"]
    ids = [field["id"] for field in form["body"]]
    assert len(ids) == len({*ids})
    assert {field["type"] for field in form["body"]} <= FIELDS
    assert all(field["attributes"]["label"] for field in form["body"])
    commands = re.findall(r"^ *\$ (upshift .*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    for command in commands:
        if command != "upshift --version":
            check(command, True)


def test_the_citation_is_of_this_version() -> None:
    citation = read(ROOT / "CITATION.cff")
    same = {"version": PROJECT["version"], "license": PROJECT["license"], "abstract": PROJECT["description"]}
    assert {name: str(citation[name]) for name in same} == same
    assert (citation["cff-version"], citation["title"].lower()) == ("1.2.0", PROJECT["name"])
    assert citation["message"] and citation["authors"]
    # The schema has no other keys, and wants a name of each author.
    assert {*citation} == {"cff-version", "message", "type", "authors", "keywords", "title", *same}
    assert all({*author} == {"name"} for author in citation["authors"])


def test_the_commit_hooks_are_the_makefiles_checks() -> None:
    hooks = read(ROOT / ".pre-commit-config.yaml")["repos"][0]["hooks"]
    recipe = MAKEFILE.partition("\ncheck: ")[2].partition("\n\n")[0]
    commands = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe.splitlines()[1:]]
    assert [hook["entry"] for hook in hooks] == commands[: len(hooks)]
    assert len(hooks) == 3


def test_the_image_copies_what_is_there_and_installs_extras_that_exist() -> None:
    copied = [name for instruction, rest in instructions() if instruction == "COPY" for name in rest.split()[:-1]]
    assert copied
    assert [name for name in copied if not (ROOT / name).exists()] == []
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert [line for line in ignored if line.startswith("!")] == [f"!{name}" for name in copied]
    # The package cannot be built without the files that pyproject.toml names.
    assert {PROJECT["readme"], *PROJECT["license-files"]} <= {*copied}
    runs = [rest for instruction, rest in instructions() if instruction == "RUN"]
    extras = [name for run in runs for names in re.findall(r"/opt/upshift\[([\w,-]+)\]", run) for name in names.split(",")]
    assert len(extras) == 6 and {*extras} <= {*PROJECT["optional-dependencies"]}
    assert all("-c /opt/upshift/constraints.txt" in run for run in runs if "pip install" in run)


def test_the_image_does_not_run_as_root() -> None:
    stages = [rest.split()[2] for instruction, rest in instructions() if instruction == "FROM"]
    assert stages == ["base", "cuda", "cpu"]
    assert [rest for instruction, rest in instructions() if instruction == "USER"] == ["1000", "1000"]
    entries = [json.loads(rest) for instruction, rest in instructions() if instruction == "ENTRYPOINT"]
    assert entries == [[name] for name in PROJECT["scripts"]] * 2


def test_commands_of_containers_exist() -> None:
    """What stands behind the image's name is what upshift gets."""
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    commands = re.findall(r"^docker run .*? (upshift(?::cuda)? (?:plan|train|serve) .*)$", page, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        check("upshift " + command.partition(" ")[2], True)
    targets = re.findall(r"docker build --target (\w+)", page)
    assert targets == ["cpu", "cuda"]


def test_the_wheel_is_checked_by_a_quick_plan() -> None:
    done = subprocess.run(["make", "-n", "wheel", "PYTHON=python"], cwd=ROOT, capture_output=True, text=True, check=True)
    (line,) = [line for line in done.stdout.replace("\\\n", " ").splitlines() if " plan " in line]
    words = line.partition("bin/upshift plan ")[2].split()
    assert Path(words[0]).is_file()
    check("upshift plan " + " ".join(words), True)
