"""Provide OpenVINO's core, one for the process, so that Ctrl-C stays a signal.

The CPU plugin of every core replaces the stack for signal handlers, and puts the earlier one back when the core goes
(OpenVINO 2026.4, on Linux). If two cores do not go last in, first out, the stack that is put back was unmapped
before. The next signal then ends the process with SIGSEGV. NNCF makes such cores.

Make a model's pair of OpenVINO files once from transformers' weights.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from upshift.atomic_file import make_once
from upshift.internals.openvino_names import FP16_WEIGHTS
from upshift.settings import without_telemetry
from upshift.units import MIB


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


def make(path: Path, export: Callable[[], Any], rounded: Callable[[Any], Any] | None) -> None:
    """Make the file ``path``: fp32.xml, which ``export`` gives, or another one beside it, which ``rounded`` makes of
    fp32.xml without torch."""
    core()  # before those of nncf
    plain = path.with_name("fp32.xml")

    def write() -> None:
        with without_telemetry(), signal_stack_kept():
            if not plain.is_file():
                _save(export(), plain)
            if rounded is not None and not path.is_file():
                _save(rounded(core().read_model(plain)), path)

    make_once(path, write, beside=plain)


def fp16_weights(model: Any) -> Any:

    FP16_WEIGHTS.get()(model)
    return model


def int8_weights(model: Any) -> Any:
    import nncf

    return nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM)


def _save(model: Any, path: Path) -> None:
    """Put in place whole: ``path`` is the .xml, and is there only when its .bin is."""
    import openvino

    temporary = path.with_name(f"writing-{path.name}")
    try:
        openvino.save_model(model, temporary, compress_to_fp16=False)
        temporary.with_suffix(".bin").replace(path.with_suffix(".bin"))
        temporary.replace(path)
    except BaseException as error:  # a disk that is full is not filled for good
        free = shutil.disk_usage(path.parent).free
        temporary.unlink(missing_ok=True)
        temporary.with_suffix(".bin").unlink(missing_ok=True)
        if "iostream" in str(error):  # C++ has no word for why a write failed
            code = errno.ENOSPC if free < MIB else errno.EIO
            raise OSError(code, os.strerror(code), str(path)) from error
        raise
