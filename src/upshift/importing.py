"""Import large libraries without useless garbage collections, and keep libraries from logging what the user need not read.

Only the standard library is used."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager

RARELY = 100_000  # new objects between two collections, in place of 700
FEW_OBJECTS = 10_000  # collected as any others: torch alone makes a quarter of a million. To count frozen ones visits all of them


@contextmanager
def importing() -> Iterator[None]:
    """Collect no garbage inside the context, and move the objects made in it to the oldest generation.

    torch and transformers make a million objects that stay. Each full collection during the imports would visit all of them,
    and the first collections afterwards would visit them once for each of the three generations."""
    was_enabled = gc.isenabled()
    gc.disable()
    before = gc.get_count()[0]
    try:
        yield
    finally:
        is_large = gc.get_count()[0] - before > FEW_OBJECTS
        if is_large and not gc.get_freeze_count():  # else the caller excludes frozen objects from every collection
            gc.freeze()
            gc.unfreeze()  # moves all objects to the oldest generation without visiting them
        if was_enabled:
            gc.enable()


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Collect garbage after ``RARELY`` new objects inside the context. A program that collects less often, or never, keeps that.

    A trace makes millions of objects that are freed without the collector. Its collections took an eighth of a cold command."""
    earlier = gc.get_threshold()
    if 0 < earlier[0] < RARELY:  # 0: the program collects by itself
        gc.set_threshold(RARELY, *earlier[1:])
    try:
        yield
    finally:
        gc.set_threshold(*earlier)


@contextmanager
def quiet_logger(name: str, level: int = logging.ERROR) -> Iterator[None]:
    """Log what has at least this level while open. ``name``: the logger's, which its parts have in common."""
    logger = logging.getLogger(name)
    earlier = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(earlier)
