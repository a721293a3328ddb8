"""Do work on a thread that the training step does not wait for: one piece at a time. Its failure is raised when it is noticed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class BackgroundWriter:
    """A thread for at most one piece of work at a time. The interpreter does not exit before the work is done."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Start the work and return at once, after any earlier work has ended. Raise the error of the earlier work."""
        self.wait()
        # Not a daemon: an exiting interpreter joins it, so that a save that was begun is finished.
        self._thread = threading.Thread(target=self._run, args=(work,), name="upshift-save", daemon=False)
        self._thread.start()

    @property
    def is_working(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """Return whether finished work failed, and the error was not raised yet."""
        return self._failure is not None and not self.is_working

    def check(self) -> bool:
        """Return whether no work is under way. Raise the error of finished work, once."""
        if self.is_working:
            return False
        self.wait()
        return True

    def wait(self) -> None:
        """Wait until no work is under way. Raise the error of the work, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as failure:  # whatever it is, wait() raises it in the thread that asked for the work
            # Also here: a process that ends without another call would say nothing.
            logger.error("%s", failure)
            self._failure = failure
