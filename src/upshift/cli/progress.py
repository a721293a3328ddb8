"""Say what a command does, in a plain line every ten seconds, where standard error is no terminal but a log, a pipe or a job.

On a terminal there are bars instead. Whoever does something long opens an ``activity`` and updates it; the innermost one that is
open is written. The lines have no control characters, and standard output gets none of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from upshift.units import format_seconds

EVERY_SECONDS = 10.0


class Activity:
    """Something that takes a while. ``text``: how far it is, in words; else that is said by ``done`` of ``total``."""

    def __init__(self, title: str) -> None:
        self.title, self.text = title, ""
        self.done: float | None = None
        self.total: float | None = None
        self.began = time.monotonic()

    def update(self, done: float | None = None, total: float | None = None, *, title: str | None = None, text: str = "") -> None:
        if title is not None and title != self.title:
            self.title, self.began = title, time.monotonic()
        self.done, self.total, self.text = done, total, text

    def line(self) -> str:
        seconds = time.monotonic() - self.began
        words = [self.text] if self.text else self._counted(seconds)
        return _plain(", ".join([f"{self.title}: {format_seconds(seconds)} so far", *words]))

    def _counted(self, seconds: float) -> list[str]:
        if not self.done or not self.total:
            return []
        words = [f"{self.done:,.0f} of {self.total:,.0f} ({self.done / self.total:.0%})"]
        if self.done < self.total:
            words.append(f"about {format_seconds(seconds * (self.total - self.done) / self.done)} left")
        return words


class Lines:
    """The writer: at most one is at work. ``write``: gets each line."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._open: list[Activity] = []
        self._over = threading.Event()

    def begin(self, activity: Activity) -> None:
        self._open.append(activity)

    def end(self, activity: Activity) -> None:
        self._open.remove(activity)

    def start(self) -> None:
        threading.Thread(target=self._run, name="upshift-progress", daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def tell(self) -> None:
        """Write what is done now."""
        if self._open:
            self._write(self._open[-1].line())

    def _run(self) -> None:
        while not self._over.wait(EVERY_SECONDS):
            self.tell()


_lines: list[Lines] = []  # the one that is at work


@contextmanager
def lines(title: str, console: Console, *, speaks: bool = True) -> Iterator[None]:
    """While a command runs. ``title``: what is said where nothing else is open. ``speaks``: False for the ranks of a launcher but
    the first. On a terminal nothing is written."""
    if not speaks or console.is_terminal or _lines:
        yield
        return
    writer = Lines(lambda line: print(line, file=console.file, flush=True))
    _lines.append(writer)
    writer.begin(Activity(title))
    writer.start()
    try:
        yield
    finally:
        stop()


def stop() -> None:
    """No more lines: the command ends, or waits for others now, as a server does."""
    for writer in _lines:
        writer.stop()
    _lines.clear()


@contextmanager
def activity(title: str) -> Iterator[Activity]:
    """Yields what is to be updated; it is what is written until the block ends, or another one is opened in it."""
    current, writers = Activity(_plain(title)), list(_lines)
    for writer in writers:
        writer.begin(current)
    try:
        yield current
    finally:
        for writer in writers:
            writer.end(current)


def _plain(text: str) -> str:
    """Return the text without markup, line breaks and control characters."""
    words = Text.from_markup(text).plain if "[" in text else text
    return " ".join("".join(one if one.isprintable() else " " for one in words).split())
