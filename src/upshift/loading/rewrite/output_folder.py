"""Manage the output folder of a rewritten checkpoint: its owner, its complete files, and its state after a failure.

A file gets its final name only when it is complete and on the disk. The manifest lists the complete shards, so that the same
request continues where it was stopped, and another request is rejected.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from upshift.atomic_file import sync_path
from upshift.errors import Interrupted, JobFailed, RequestError
from upshift.loading.files.safetensors_writer import write_all
from upshift.loading.output_lock import LOCK_NAME, locked
from upshift.units import MIB, format_bytes
from upshift.value import Value

MANIFEST = "upshift_manifest.json"
PARTIAL = ".partial"  # suffix of a file's name until the file is complete
SPARE_BYTES = MIB  # disk space for the index, the manifest and the file system
DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)


class Manifest(Value):
    """The file next to the shards that names the request and lists the complete shards."""

    request: str
    made_of: str  # a hash of the request and its input files
    shards: dict[str, dict[str, str]]  # for each complete shard, the SHA-256 of each tensor's bytes
    noted: dict[str, int]  # numbers to report to the user, by tensor


class OutputFolder:
    """The output folder of one request. While it is claimed it belongs to one process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest: Manifest

    @contextmanager
    def claimed(self, *, request: str, made_of: str) -> Iterator[None]:
        """Hold the folder's lock while the context is open, and read the manifest or begin a new one.

        Raise RequestError if the folder belongs to another request."""
        self._create()
        with locked(self.path, self.path.resolve() / LOCK_NAME):
            self._read(request, made_of)
            yield
            sync_path(self.path)

    def _create(self) -> None:
        if not self.path.absolute().parent.is_dir():
            raise RequestError(f"--output {self.path}: the folder {self.path.parent} does not exist; make it first")
        if self.path.exists() and not self.path.is_dir():
            raise RequestError(f"--output {self.path} is a file; give a folder that is empty or does not exist")
        try:
            self.path.mkdir(exist_ok=True)
            if not os.access(self.path, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise RequestError(f"--output {self.path} cannot be used: {error.strerror}; give another folder") from None

    def _read(self, request: str, made_of: str) -> None:
        file = self.path / MANIFEST
        names = sorted(entry.name for entry in self.path.iterdir() if entry.suffix != PARTIAL and entry.name != LOCK_NAME)
        if not file.is_file():
            if names:
                raise RequestError(f"--output {self.path} is not empty ({names[0]}); give an empty folder, or one to be made")
            self.manifest = Manifest(request=request, made_of=made_of, shards={}, noted={})
        else:
            self.manifest = Manifest.from_file(file)
            if self.manifest.made_of != made_of:
                raise RequestError(
                    f"--output {self.path} holds what another request made ({self.manifest.request}), or its input has changed "
                    "since; give another folder, or remove this one"
                )
        for entry in self.path.rglob(f"*{PARTIAL}"):  # left by a run that was killed
            entry.unlink()

    def drop_shard(self, name: str) -> None:
        """Remove a shard whose file differs from the manifest, in memory only."""
        shards = {shard: hashes for shard, hashes in self.manifest.shards.items() if shard != name}
        self.manifest = self.manifest.changed(shards=shards)

    def add_shard(self, name: str, hashes: dict[str, str], noted: dict[str, int]) -> None:
        """Record that a shard is complete, so that a later run keeps it."""
        shards = {**self.manifest.shards, name: hashes}
        self._save(self.manifest.changed(shards=shards, noted={**self.manifest.noted, **noted}))

    def write_manifest(self) -> None:
        self._save(self.manifest)

    def _save(self, manifest: Manifest) -> None:
        self.write(MANIFEST, manifest.to_json(indent=1).encode())
        self.manifest = manifest

    def check_room(self, num_bytes: int) -> None:
        free = shutil.disk_usage(self.path).free
        if num_bytes and free < num_bytes + SPARE_BYTES:
            raise RequestError(
                f"--output {self.path} needs {format_bytes(num_bytes + SPARE_BYTES)} more and its disk has {format_bytes(free)} "
                "free; free some, or give a folder on another disk"
            )

    @contextmanager
    def new_file(self, name: str) -> Iterator[Path]:
        """Yield a path to write a file to. The file must be on the disk when the block ends, and then gets its final name."""
        (self.path / name).parent.mkdir(exist_ok=True)
        partial = self.path / f"{name}{PARTIAL}"
        try:
            yield partial
            partial.replace(self.path / name)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def write(self, name: str, content: bytes) -> None:
        with self.new_file(name) as partial, partial.open("wb", buffering=0) as file:
            write_all(file.fileno(), memoryview(content))
            os.fsync(file.fileno())

    def copy(self, name: str, source: Path) -> None:
        with self.new_file(name) as partial:
            shutil.copyfile(source, partial)
            with partial.open("rb") as file:
                os.fsync(file.fileno())

    @contextmanager
    def report_interruption(self, num_shards: int) -> Iterator[None]:
        """Turn a failed write, or an interrupt by the user, into an error that says which files are complete."""
        try:
            yield
        except OSError as error:
            reason = "the disk is full" if error.errno in DISK_FULL_ERRORS else error.strerror or str(error)
            raise JobFailed(f"{self.path} could not be written: {reason}; {self._progress_note(num_shards)}") from error
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted; {self._progress_note(num_shards)}") from None

    def _progress_note(self, num_shards: int) -> str:
        num_whole = len(self.manifest.shards)
        return f"{num_whole} of {num_shards} files of weights in it are whole, and the same command goes on from there"
