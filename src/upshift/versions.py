"""Find the versions of libraries without importing them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path


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
