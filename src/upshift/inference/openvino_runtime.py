"""Provide one OpenVINO core per process, and write models as OpenVINO files.

There is one core so that Ctrl-C keeps working. The CPU plugin of every core replaces the stack for signal handlers, and
restores the earlier one when the core is deleted (OpenVINO 2026.4, on Linux). If two cores are not deleted in reverse order,
the restored stack is already unmapped, and the next signal ends the process with SIGSEGV. NNCF makes such cores."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from upshift.atomic_file import make_once, sync_and_rename
from upshift.internals.openvino_names import FP16_WEIGHTS
from upshift.settings import without_telemetry
from upshift.units import MIB

END_BYTES = 64  # the last element of a model file lies within its last bytes

logger = logging.getLogger(__name__)


@cache
def core() -> Any:
    """Return the process's OpenVINO core."""
    with without_telemetry():  # the import alone sends telemetry, from a forked process
        import openvino

    openvino_core = openvino.Core()
    openvino_core.get_property("CPU", "FULL_DEVICE_NAME")  # loads the plugin before any other core does
    return openvino_core


@contextmanager
def keep_signal_stack() -> Iterator[None]:
    """Restore the stack of signal handlers at the end, whichever cores were made and deleted."""
    if sys.platform != "linux":
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    saved = _SignalStack()
    libc.sigaltstack(None, ctypes.byref(saved))
    try:
        yield
    finally:
        libc.sigaltstack(ctypes.byref(saved), None)


class _SignalStack(ctypes.Structure):
    """The struct stack_t of signal.h on Linux."""

    _fields_ = (("pointer", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


def make_model_file(path: Path, export: Callable[[], Any], quantize: Callable[[Any], Any] | None) -> None:
    """Write the model file ``path`` if it does not exist, or if it is cut short.

    ``export`` returns the model in fp32, which is written to fp32.xml in the same folder. For any other ``path``,
    ``quantize`` returns its model from the one in fp32, without torch."""
    core()  # before the cores of NNCF
    fp32_path = path.with_name("fp32.xml")
    for file in (fp32_path, path):
        _remove_if_cut_short(file)

    def write_files() -> None:
        with without_telemetry(), keep_signal_stack():
            if not fp32_path.is_file():
                _save(export(), fp32_path)
            if quantize is not None and not path.is_file():
                _save(quantize(core().read_model(fp32_path)), path)

    make_once(path, write_files, beside=fp32_path)


def _remove_if_cut_short(path: Path) -> None:
    """Remove a model file that does not end with its last element, or has no weights. A power cut may leave such a file."""
    try:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - END_BYTES, 0))
            is_complete = file.read().rstrip().endswith(b"</net>")
    except FileNotFoundError:  # it is not made yet, or another process removed it
        return
    if not is_complete or not path.with_suffix(".bin").is_file():
        logger.warning("converting the model again: %s is cut short", path)
        path.unlink(missing_ok=True)


def fp16_weights(model: Any) -> Any:
    """Round the weights to fp16 in place."""
    FP16_WEIGHTS.get()(model)
    return model


def int8_weights(model: Any) -> Any:
    """Round the weights to 8 bits, scaled by output channel."""
    import nncf

    return nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM)


def _save(model: Any, path: Path) -> None:
    """Write the .xml file ``path`` and its .bin. The .xml appears only when both are complete."""
    import openvino

    temporary = path.with_name(f"writing-{path.name}")
    try:
        openvino.save_model(model, temporary, compress_to_fp16=False)
        sync_and_rename(temporary.with_suffix(".bin"), path.with_suffix(".bin"))
        sync_and_rename(temporary, path)
    except BaseException as error:  # remove the partial files, which may fill the disk
        free = shutil.disk_usage(path.parent).free
        temporary.unlink(missing_ok=True)
        temporary.with_suffix(".bin").unlink(missing_ok=True)
        if "iostream" in str(error):  # C++ does not say why a write failed
            code = errno.ENOSPC if free < MIB else errno.EIO
            raise OSError(code, os.strerror(code), str(path)) from error
        raise
