"""Work that the training step does not wait for: one piece at a time, on a thread, its failure raised where it is noticed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class BackgroundWriter:
    """At most one piece of work is under way. The interpreter does not exit before it is done."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Returns at once, unless earlier work is still under way. Raises what that raised."""
        self.wait()
        # Not a daemon: an exiting interpreter joins it, so that a save that was begun is finished.
        self._thread = threading.Thread(target=self._run, args=(work,), name="upshift-save", daemon=False)
        self._thread.start()

    @property
    def is_working(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """Did work that is over fail, and has nobody been told?"""
        return self._failure is not None and not self.is_working

    def check(self) -> bool:
        """Is nothing under way? Raises what the finished work raised, once."""
        if self.is_working:
            return False
        self.wait()
        return True

    def wait(self) -> None:
        """Until nothing is under way. Raises what the work raised, once."""
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
