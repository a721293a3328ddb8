"""Import large libraries without the collections of garbage that find nothing in them. Uses the standard library alone."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Collect no garbage while the context is open.

    torch and transformers make a million objects that stay. Each full collection on the way visits all of them so far: that is
    a quarter of the processor time of their import."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
