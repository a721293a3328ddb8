"""Collect token ids: in memory while they are few, then in a file of the cache that is mapped into memory.

The file has no name, so that nothing is left of it when the process ends, however it ends.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from upshift.errors import RequestError
from upshift.settings import read_settings
from upshift.units import MIB

IN_MEMORY_BYTES = 8 * MIB
CHUNK = 2**18  # numbers that are written at once


class TokenFile:
    """A growing flat array of integers. uint16 becomes int32 at the first id that needs it."""

    def __init__(self, dtype: Any) -> None:
        self.length = 0
        self._dtype = np.dtype(dtype)
        self._pending: list[NDArray[Any]] = []
        self._num_pending = 0
        self._file = self._new_file()

    def add(self, numbers: Sequence[int] | NDArray[Any]) -> None:
        if len(numbers):
            self._pending.append(np.asarray(numbers, np.int32))
            self._num_pending += len(numbers)
            self.length += len(numbers)
            if self._num_pending >= CHUNK:
                self._flush()

    def finish(self) -> NDArray[Any]:
        """Return all numbers, read-only. Nothing can be added any more."""
        self._flush()
        if self.length * self._dtype.itemsize <= IN_MEMORY_BYTES:
            self._file.seek(0)
            return np.frombuffer(self._file.read(), self._dtype)
        self._guarded(self._file.flush)
        return np.memmap(self._file, self._dtype, mode="r", shape=(self.length,))

    def _flush(self) -> None:
        if not self._pending:
            return
        numbers = np.concatenate(self._pending)
        self._pending, self._num_pending = [], 0
        if self._dtype == np.uint16 and int(numbers.max()) >= 2**16:
            self._widen()
        self._guarded(self._file.write, numbers.astype(self._dtype).tobytes())

    def _widen(self) -> None:
        narrow, self._file = self._file, self._new_file()
        self._dtype = np.dtype(np.int32)
        narrow.seek(0)
        while chunk := narrow.read(CHUNK * 2):
            self._guarded(self._file.write, np.frombuffer(chunk, np.uint16).astype(np.int32).tobytes())
        narrow.close()

    def _new_file(self) -> Any:
        folder = read_settings().cache_dir
        with suppress(OSError):  # a folder that cannot be made is missed where it is needed, which is for much data only
            folder.mkdir(parents=True, exist_ok=True)
        return tempfile.SpooledTemporaryFile(max_size=IN_MEMORY_BYTES, dir=str(folder))  # noqa: SIM115

    def _guarded(self, write: Any, *arguments: Any) -> Any:
        try:
            return write(*arguments)
        except OSError as error:
            raise RequestError(
                f"the tokens of the data cannot be written to {read_settings().cache_dir} ({error.strerror}); free space there, "
                "or name a folder with room in UPSHIFT_CACHE"
            ) from None
