"""Find versions of libraries, without importing them."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires, version


def installed_version(library: str) -> str | None:
    """Return a library's version, or None if it is not installed."""
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def installed_versions(libraries: Iterable[str]) -> dict[str, str]:
    """Return the versions of the libraries that are installed."""
    found = {library: installed_version(library) for library in libraries}
    return {library: known for library, known in found.items() if known is not None}


def requirements_of(library: str) -> list[str]:
    """Return a library's requirements as its own metadata states them: "tokenizers<0.24,>=0.22; extra == ..."."""
    return requires(library) or []
