"""Traces of models, which every worker of a session shares, and later sessions too where UPSHIFT_TEST_TRACES names a folder.

A trace is decided by the model's config and the libraries' versions, which are in its name in the cache, and by the code that
makes it: its sources name the folder here. After a change to any of them all is traced again. The machine is probed once in a
session. What else a cache holds (calibration, races) belongs to the tests that made it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
from importlib.metadata import distributions
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "upshift"
KINDS = ("isolation", "positions", "profiles", "segments")  # folders of upshift.models.profile_cache
CACHES = ("cache", "trainer-cache", "signs-cache")  # the caches of a session's tests


def trace_folder(session: Path) -> Path:
    """Return the folder of traces: below UPSHIFT_TEST_TRACES, where traces of other code are removed, or in the session's."""
    kept = os.environ.get("UPSHIFT_TEST_TRACES")
    if not kept:
        return session / "traces"
    folder = Path(kept) / code_key()
    for other in Path(kept).glob("*") if Path(kept).is_dir() else ():
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)
    return folder


def share(caches: Path, session: Path) -> Path:
    """Make the caches of one worker, whose traces and probe are those of the session. Return the first cache."""
    traces = trace_folder(session)
    folders = {kind: traces / kind for kind in KINDS} | {"probe": session / "probe"}
    for name in CACHES:
        _link(caches / name, folders)
    return caches / CACHES[0]


def share_traces(cache: Path, session: Path, device: str) -> Path:
    """Make and return a cache of processes on another device: they share their traces with each other, and nothing else."""
    traces = trace_folder(session) / device
    _link(cache, {kind: traces / kind for kind in KINDS})
    return cache


def _link(cache: Path, folders: dict[str, Path]) -> None:
    cache.mkdir(exist_ok=True)
    for kind, folder in folders.items():
        folder.mkdir(parents=True, exist_ok=True)
        (cache / kind).symlink_to(folder, target_is_directory=True)


def session_folder(base: Path) -> Path:
    """Return the folder that all workers of a session have in common. ``base``: pytest's folder of this worker."""
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def code_key() -> str:
    """Return a hash of the code that traces can depend on: models, and what they may import; and of all libraries' versions."""
    files = [*PACKAGE.glob("*.py"), *(PACKAGE / "models").rglob("*.py"), *(PACKAGE / "internals").rglob("*.py")]
    versions = sorted({f"{one.name} {one.version}" for one in distributions()})
    said = hashlib.sha256(repr((platform.python_version(), versions)).encode())
    for file in sorted(files):
        said.update(f"{file.relative_to(PACKAGE)}\n".encode() + file.read_bytes())
    return said.hexdigest()[:24]
