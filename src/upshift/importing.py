"""Import large libraries without the collections of garbage that find nothing in them. Uses the standard library alone."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Collect no garbage while the context is open, and take what it made for old.

    torch and transformers make a million objects that stay. Each full collection on the way visits all of them so far, and the
    first ones afterwards would visit them once for each of the three generations."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # else the caller keeps them out of every collection
            gc.freeze()
            gc.unfreeze()  # into the oldest generation, and no object is visited
        if was_enabled:
            gc.enable()
