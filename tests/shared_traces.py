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
    for kind, folder in folders.items():
        folder.mkdir(parents=True, exist_ok=True)
        for name in CACHES:
            (caches / name).mkdir(exist_ok=True)
            (caches / name / kind).symlink_to(folder, target_is_directory=True)
    return caches / CACHES[0]


def code_key() -> str:
    """Return a hash of the code that traces can depend on: models, and what they may import; and of all libraries' versions."""
    files = [*PACKAGE.glob("*.py"), *(PACKAGE / "models").rglob("*.py"), *(PACKAGE / "internals").rglob("*.py")]
    versions = sorted({f"{one.name} {one.version}" for one in distributions()})
    said = hashlib.sha256(repr((platform.python_version(), versions)).encode())
    for file in sorted(files):
        said.update(f"{file.relative_to(PACKAGE)}\n".encode() + file.read_bytes())
    return said.hexdigest()[:24]
