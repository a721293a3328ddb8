"""Find the versions of libraries without importing them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "upshift"
CLONE = Path(__file__).parents[2]  # the folder above the sources of a package that runs from them


def installed_version(library: str) -> str | None:
    """Return a library's version, or None if it is not installed."""
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def installed_versions(libraries: Iterable[str]) -> dict[str, str]:
    """Return the versions of the libraries that are installed."""
    versions = {library: installed_version(library) for library in libraries}
    return {library: installed for library, installed in versions.items() if installed is not None}


def requirements_of(library: str) -> list[str]:
    """Return the requirements in a library's metadata, such as "tokenizers<0.24,>=0.22; extra == ..."."""
    return requires(library) or []


def install_command(*extras: str, clone: Path = CLONE) -> str:
    """Return the command that installs the libraries of these extras of Upshift.

    No package index has Upshift. In a clone the command names the clone. For an installed wheel, whose file may be gone, it
    names the libraries."""
    if (clone / "pyproject.toml").is_file():
        folder = "." if clone == Path.cwd() else str(clone)
        names = ",".join(extras)
        return f"pip install {shlex.quote(f'{folder}[{names}]')}"
    return f"pip install {' '.join(map(shlex.quote, libraries_of_extras(extras)))}"


def libraries_of_extras(extras: Iterable[str]) -> list[str]:
    """Return the libraries that the metadata of the installed wheel requires for these extras on this platform, sorted.

    An extra may include other extras."""
    from packaging.requirements import Requirement

    libraries: set[str] = set()
    waiting = list(extras)
    included = set(waiting)
    requirements = [Requirement(line) for line in requirements_of(PACKAGE)]
    while waiting:
        extra = waiting.pop()
        for requirement in requirements:
            marker = requirement.marker
            if marker is None or not marker.evaluate({"extra": extra}) or marker.evaluate({"extra": ""}):
                continue
            if requirement.name == PACKAGE:
                waiting += requirement.extras - included
                included |= requirement.extras
                continue
            names = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
            libraries.add(f"{requirement.name}{names}{requirement.specifier}")
    return sorted(libraries)


def torch_cuda() -> tuple[tuple[int, int] | None, bool]:
    """Return the CUDA release that the installed torch was built for, and whether it could be read.

    The release is None if torch was built without CUDA, or if it could not be read."""
    spec = find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    if file is None or not file.is_file():
        return None, False
    match = re.search(r"^cuda[^=\n]*= '(\d+)\.(\d+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    release = (int(match[1]), int(match[2])) if match else None
    return release, True
