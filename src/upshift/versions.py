"""Find the versions of libraries without importing them."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "upshift"
CLONE = Path(__file__).parents[2]  # the folder above the sources of a package that runs from them
EXTRA = re.compile(r"extra == [\"']([^\"']+)")  # in a requirement's marker
DISTRIBUTIONS = {  # modules whose name is not that of the library to install, and modules that another library installs
    "huggingface_hub": "transformers",
    "llama_cpp": "llama-cpp-python",
    "opentelemetry": "opentelemetry-sdk",
    "PIL": "pillow",
    "pydantic_core": "pydantic",
    "pynvml": "nvidia-ml-py",
    "sqlalchemy": "optuna",
    "starlette": "fastapi",
    "tensorflow": "tensorflow-cpu",
    "yaml": "pyyaml",
}


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
    """Return the command that installs the libraries of these extras of Upshift, or without extras those that it always needs.

    No package index has Upshift. In a clone the command names the clone. For an installed wheel, whose file may be gone, it
    names the libraries."""
    if (clone / "pyproject.toml").is_file():
        folder = "." if clone == Path.cwd() else str(clone)
        names = f"[{','.join(extras)}]" if extras else ""
        return f"pip install {shlex.quote(f'{folder}{names}')}"
    return f"pip install {' '.join(map(shlex.quote, libraries_of_extras(extras or ('',))))}"


def libraries_of_extras(extras: Iterable[str]) -> list[str]:
    """Return the libraries that the metadata of the installed wheel requires for these extras on this platform, sorted.

    An extra may include other extras. The extra "" has the libraries that Upshift always needs."""
    from packaging.requirements import Requirement

    libraries: set[str] = set()
    waiting = list(extras)
    included = set(waiting)
    requirements = [Requirement(line) for line in requirements_of(PACKAGE)]
    while waiting:
        extra = waiting.pop()
        for requirement in requirements:
            marker = requirement.marker
            is_always = marker is None or marker.evaluate({"extra": ""})
            is_of_extra = marker is None or marker.evaluate({"extra": extra})
            if not is_of_extra or is_always != (extra == ""):
                continue
            if requirement.name == PACKAGE:
                waiting += requirement.extras - included
                included |= requirement.extras
                continue
            names = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
            libraries.add(f"{requirement.name}{names}{requirement.specifier}")
    return sorted(libraries)


def extra_with(module: str) -> tuple[str, str] | None:
    """Return the library that installs a module, and the extra of Upshift that brings this library.

    The extra is "" for a library that Upshift always needs. If several extras bring it, the one with the fewest requirements.
    The result is None for a module that no extra brings, and for one inside a package: that package is there, in another
    version."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    library = canonicalize_name(DISTRIBUTIONS.get(module, module))
    requirements = [Requirement(line) for line in requirements_of(PACKAGE)]
    extras = [EXTRA.search(str(requirement.marker or "")) for requirement in requirements]
    names = [found[1] if found else "" for found in extras]
    sizes = Counter(names)
    own = {name for requirement, name in zip(requirements, names, strict=True) if canonicalize_name(requirement.name) == library}
    if not own:
        return None
    return library, min(own, key=lambda name: (name != "", sizes[name], name))


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
