"""Give a plan to the trainers of another library: each of its Trainer classes gets ``upshift.Trainer`` behind it.

The modules ``upshift.trl`` and ``upshift.sentence_transformers`` find their classes here by name, when a script imports one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import Any

from upshift.errors import MissingExtra


@dataclass(frozen=True)
class LibraryTrainers:
    """The trainers of a library."""

    library: str  # the name by which it is imported
    extra: str
    module: str  # Upshift's module that has the planned classes
    experimental: str | None = None  # a package of the library with a package for each of its other trainers

    def names(self) -> list[str]:
        """Return the names of the library's trainers. Raise MissingExtra if it is not installed."""
        if find_spec(self.library) is None:
            raise MissingExtra(library=self.extra, extra=self.extra, purpose=self.module)
        return sorted(name for name in dir(import_module(self.library)) if name.endswith("Trainer"))

    def planned(self, name: str) -> Any:
        """Return the library's trainer ``name`` with plans. Raise AttributeError if the library has no such trainer."""
        if name.startswith("__"):
            raise AttributeError(f"module {self.module!r} has no attribute {name!r}")
        if name not in self._planned:
            self._planned[name] = self._with_plans(name)
        return self._planned[name]

    @cached_property
    def _planned(self) -> dict[str, Any]:
        return {}

    def _with_plans(self, name: str) -> Any:
        names = self.names()
        library_class = getattr(import_module(self.library), name) if name in names else self._find_experimental(name)
        if library_class is None:
            others = "" if self.experimental is None else f" and those of {self.experimental}"
            raise AttributeError(
                f"module {self.module!r} has no {name!r}; it has {', '.join(names)}{others}, and {self.library} has the rest"
            )
        from upshift.training.hf_trainer.trainer import with_plans
        from upshift.tuning.trainer import Trainer

        return with_plans(library_class, Trainer, module=self.module)

    def _find_experimental(self, name: str) -> Any:
        """Return the experimental trainer ``name``, or None. Only the package that is named like it is imported."""
        if self.experimental is None or not name.endswith("Trainer"):
            return None
        wanted = name.removesuffix("Trainer").lower()
        for package in iter_modules(import_module(self.experimental).__path__):
            if package.ispkg and package.name.replace("_", "") == wanted:
                return getattr(import_module(f"{self.experimental}.{package.name}"), name, None)
        return None
