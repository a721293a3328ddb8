"""Check that TensorFlow is installed, and cache compiled programs for later processes.

Compiled programs are machine code, so each version of TensorFlow and each host has a folder of its own.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from upshift.errors import MissingExtra, RequestError
from upshift.hardware.detect import detect
from upshift.settings import keep_xla_programs, quiet_tensorflow, read_settings
from upshift.versions import installed_version


def need_tensorflow(purpose: str = "the xla backend") -> None:
    """Raise MissingExtra if TensorFlow is not installed, and limit its C++ log to errors. Call it before importing TensorFlow."""
    if find_spec("tensorflow") is None:
        raise MissingExtra(library="tensorflow", extra="xla", purpose=purpose)
    quiet_tensorflow()


def keep_programs() -> Path:
    """Make TensorFlow cache compiled programs, and return their folder. Call it before the first compilation.

    Raise RequestError if the folder cannot be made."""
    versions = (installed_version(name) for name in ("tensorflow", "tensorflow-cpu"))
    version = next((version for version in versions if version is not None), "unknown")
    folder = read_settings().cache_dir / "xla" / f"{version}-{detect().fingerprint}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"the cache folder {folder} cannot be used: {error.strerror}"
        raise RequestError(f"{problem}; name another with UPSHIFT_CACHE") from None
    keep_xla_programs(folder)
    return folder
