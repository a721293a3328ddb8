"""Look up names of libraries that are not promised when they are used. If a library no longer has a name, raise an
error that says so."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

from upshift.errors import MissingInternal
from upshift.versions import installed_version


@dataclass(frozen=True)
class Internal:
    """One name. ``feature`` is what needs it, as the subject of a sentence. ``instead`` is what a user can do without
    it."""

    library: str  # as pip names it
    name: str  # "torch.utils._pytree:tree_leaves", or "Module._parameters" of an object
    feature: str
    instead: str = ""
    attribute: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "attribute", re.split("[.:]", self.name)[-1])

    def get(self) -> Any:
        """Return what the module has under this name. Raises MissingInternal where it has none."""
        try:
            return _find(self.name)
        except (ImportError, AttributeError):
            raise self.missing() from None

    def of(self, owner: Any) -> Any:
        """Return the attribute of an object. Raises MissingInternal where it has none."""
        try:
            return getattr(owner, self.attribute)
        except AttributeError:
            raise self.missing() from None

    def put(self, owner: Any, value: Any) -> None:
        """Set an attribute that the library reads. Raises MissingInternal where the object has none: nobody would read it."""
        self.of(owner)
        setattr(owner, self.attribute, value)

    @contextmanager
    def replaced(self, value: Any) -> Iterator[None]:
        """Put something in its place for a while, for the library's own use. Raises MissingInternal where nobody would use it."""
        self.get()
        with mock.patch(self.name.replace(":", "."), value):
            yield

    def missing(self) -> MissingInternal:
        version = installed_version(self.library) or ""
        return MissingInternal(
            library=self.library, version=version, name=self.name.replace(":", "."), feature=self.feature, instead=self.instead
        )


@dataclass(frozen=True)
class Mark(Internal):
    """An attribute that the library looks for on objects which do not have it before: "transformers.trainer:_is_marked"."""

    def put(self, owner: Any, value: Any) -> None:
        """Set it. Raises MissingInternal where the text of the library's module does not mention it."""
        if not _mentions(*self.name.split(":")):
            raise self.missing()
        setattr(owner, self.attribute, value)

    def read(self, owner: Any, default: Any = None) -> Any:
        """Return the attribute, or the default where this object has none. Raises MissingInternal as ``put`` does."""
        if not _mentions(*self.name.split(":")):
            raise self.missing()
        return getattr(owner, self.attribute, default)


@cache
def _find(name: str) -> Any:
    module, _, path = name.partition(":")
    owner: Any = import_module(module)
    for part in path.split("."):
        owner = getattr(owner, part)
    return owner


@cache
def _mentions(module: str, attribute: str) -> bool:
    try:
        file = import_module(module).__file__
    except ImportError:
        return False
    return file is not None and attribute in Path(file).read_text(encoding="utf-8")
