"""Provide OpenVINO's core, one for the process, so that Ctrl-C stays a signal.

The CPU plugin of every core replaces the stack for signal handlers, and puts the earlier one back when the core goes
(OpenVINO 2026.4, on Linux). If two cores do not go last in, first out, the stack that is put back was unmapped
before. The next signal then ends the process with SIGSEGV. NNCF makes such cores."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from upshift.settings import without_telemetry


@cache
def core() -> Any:
    with without_telemetry():  # importing it tells of it already, by a process that is forked for that
        import openvino

    found = openvino.Core()
    found.get_property("CPU", "FULL_DEVICE_NAME")  # loads the plugin, before that of any other core
    return found


@contextmanager
def signal_stack_kept() -> Iterator[None]:
    """Restore the stack of signal handlers afterwards, whichever cores came and went."""
    if sys.platform != "linux":
        yield
        return
    libc, before = ctypes.CDLL(None, use_errno=True), _Stack()
    libc.sigaltstack(None, ctypes.byref(before))
    try:
        yield
    finally:
        libc.sigaltstack(ctypes.byref(before), None)


class _Stack(ctypes.Structure):
    """The struct stack_t of signal.h, as Linux has it."""

    _fields_ = (("pointer", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))
