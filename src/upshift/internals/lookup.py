"""Look up undocumented names of libraries when they are used, and raise an error if a library no longer has one."""

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
    """An undocumented name of a library, looked up when it is used."""

    library: str  # as pip names it
    name: str  # "torch.utils._pytree:tree_leaves", or "Module._parameters" of an object
    feature: str  # the feature that needs the name, as the subject of a sentence
    instead: str = ""  # the user's alternative to the feature
    attribute: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "attribute", re.split("[.:]", self.name)[-1])

    def get(self) -> Any:
        """Return the module's object of this name. Raise MissingInternal if there is none."""
        try:
            return _import_name(self.name)
        except (ImportError, AttributeError):
            raise self.missing() from None

    def of(self, owner: Any) -> Any:
        """Return the attribute of an object. Raise MissingInternal if it has none."""
        try:
            return getattr(owner, self.attribute)
        except AttributeError:
            raise self.missing() from None

    def put(self, owner: Any, value: Any) -> None:
        """Set an attribute that the library reads. Raise MissingInternal if the object has none, since nothing would read it."""
        self.of(owner)
        setattr(owner, self.attribute, value)

    @contextmanager
    def replaced(self, value: Any) -> Iterator[None]:
        """Replace the object inside its library while the context is open. Raise MissingInternal if there is none."""
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
    """An attribute that a library's module looks for on objects that need not have it: "transformers.trainer:_is_marked"."""

    def put(self, owner: Any, value: Any) -> None:
        """Set the attribute. Raise MissingInternal if the source of the library's module does not mention it."""
        if not _mentions(*self.name.split(":")):
            raise self.missing()
        setattr(owner, self.attribute, value)

    def read(self, owner: Any, default: Any = None) -> Any:
        """Return the attribute, or the default if the object has none. Raise MissingInternal as ``put`` does."""
        if not _mentions(*self.name.split(":")):
            raise self.missing()
        return getattr(owner, self.attribute, default)


@cache
def _import_name(name: str) -> Any:
    module, _, path = name.partition(":")
    owner: Any = import_module(module)
    for attribute in path.split("."):
        owner = getattr(owner, attribute)
    return owner


@cache
def _mentions(module: str, attribute: str) -> bool:
    try:
        file = import_module(module).__file__
    except ImportError:
        return False
    return file is not None and attribute in Path(file).read_text(encoding="utf-8")
