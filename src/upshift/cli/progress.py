"""Print the progress of a command as a plain line every ten seconds if standard error is a log or a pipe. A terminal has bars.

Code that takes a while opens an ``activity`` and updates it. The line is that of the innermost open activity. If none is open,
the line names the last one that ended. Lines have no control characters, and standard output gets none of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from upshift.importing import importing
from upshift.units import format_seconds

EVERY_SECONDS = 10.0


class Activity:
    """Something that takes a while. Its progress is ``text`` if there is one, else ``done`` of ``total``."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.text = ""
        self.done: float | None = None
        self.total: float | None = None
        self.start = time.monotonic()

    def update(self, done: float | None = None, total: float | None = None, *, title: str | None = None, text: str = "") -> None:
        if title is not None and title != self.title:
            self.title = title
            self.start = time.monotonic()
        self.done = done
        self.total = total
        self.text = text

    def line(self) -> str:
        seconds = time.monotonic() - self.start
        texts = [self.text] if self.text else self._count_texts(seconds)
        return _plain_text(", ".join([f"{self.title}: {format_seconds(seconds)} so far", *texts]))

    def _count_texts(self, seconds: float) -> list[str]:
        if not self.done or not self.total:
            return []
        texts = [f"{self.done:,.0f} of {self.total:,.0f} ({self.done / self.total:.0%})"]
        if self.done < self.total:
            texts.append(f"about {format_seconds(seconds * (self.total - self.done) / self.done)} left")
        return texts


class LineWriter:
    """A thread that passes the line of the innermost activity to ``write`` every ten seconds."""

    def __init__(self, title: str, write: Callable[[str], None]) -> None:
        self._title = title
        self._write = write
        self._activities = [Activity(title)]  # the command, and the open activities, the innermost last
        self._stopped = threading.Event()

    def begin(self, activity: Activity) -> None:
        self._activities.append(activity)

    def end(self, activity: Activity) -> None:
        self._activities.remove(activity)
        self._activities[0].title = f"{self._title}, after {activity.title}"

    def start(self) -> None:
        threading.Thread(target=self._run, name="upshift-progress", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def write_line(self) -> None:
        self._write(self._activities[-1].line())

    def _run(self) -> None:
        while not self._stopped.wait(EVERY_SECONDS):
            self.write_line()


_writers: list[LineWriter] = []  # at most one


@contextmanager
def progress_lines(title: str, console: Console, *, is_enabled: bool = True) -> Iterator[None]:
    """Write lines while a command runs, if the console is no terminal. ``title``: how lines begin outside any activity.

    ``is_enabled``: False on all ranks of a launcher but the first, so that only one writes."""
    if not is_enabled or console.is_terminal or _writers:
        yield
        return
    writer = LineWriter(title, lambda line: print(line, file=console.file, flush=True))
    _writers.append(writer)
    writer.start()
    try:
        yield
    finally:
        stop()


def stop() -> None:
    """Write no more lines: the command ends, or waits for requests, as a server does."""
    for writer in _writers:
        writer.stop()
    _writers.clear()


@contextmanager
def activity(title: str) -> Iterator[Activity]:
    """Open an activity until the block ends, and yield it. The caller updates it."""
    current = Activity(_plain_text(title))
    writers = list(_writers)
    for writer in writers:
        writer.begin(current)
    try:
        yield current
    finally:
        for writer in writers:
            writer.end(current)


@contextmanager
def importing_libraries() -> Iterator[None]:
    """Open an activity for the imports inside the context, of torch and transformers among them."""
    with activity("Importing the libraries"), importing():
        yield


def _plain_text(text: str) -> str:
    """Return the text in one line, without control characters."""
    printable = "".join(character if character.isprintable() else " " for character in text)
    return " ".join(printable.split())
