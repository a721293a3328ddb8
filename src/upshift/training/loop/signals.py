"""Turn the first SIGINT or SIGTERM into a request to stop after the current step. A second one ends the process at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

NOTICE = b"\nstopping after this step; press Ctrl-C again to end at once\n"


class StopRequest:
    """Catch the signals while open.

    Outside the main thread it does nothing, because Python lets only the main thread install signal handlers.
    """

    def __init__(self, *, notice: bool = True, on_request: Callable[[], None] | None = None) -> None:
        self.requested = False
        self._notice = notice
        self._on_request = on_request
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()
        if self._notice:
            os.write(2, NOTICE)  # not through a stream: the signal may have come while one was locked
        if self._on_request:
            self._on_request()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: the handler was not set by Python
        self._previous.clear()
