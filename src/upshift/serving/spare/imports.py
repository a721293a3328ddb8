"""Import the modules of an engine before its process is needed, so that an engine that starts again need not import them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from upshift.importing import importing


def imported_modules() -> tuple[str, ...]:
    """Return the names of the modules that this process has imported, in the order of their import.

    A module that cannot be imported under its name is left out."""
    found = ((name, getattr(module, "__spec__", None)) for name, module in list(sys.modules.items()))
    return tuple(name for name, spec in found if spec is not None and spec.name == name and name != "__main__")


def import_modules(names: Sequence[str]) -> None:
    """Import modules. CUDA does not start meanwhile: it would take memory of a GPU for a process that may never need one.

    A module that cannot be imported alone is left to the engine."""
    with importing(), ExitStack() as contexts:
        if "torch" in names:
            from upshift.internals.torch_names import cuda_not_started

            contexts.enter_context(cuda_not_started())
        for name in names:
            with suppress(Exception):  # of any type: it is a library's own code
                importlib.import_module(name)
