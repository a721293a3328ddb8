"""Keep compiled programs for later processes, in a folder for each TensorFlow and each host, as they are machine
code."""

from __future__ import annotations

from pathlib import Path

from upshift.errors import RequestError
from upshift.hardware.detect import detect
from upshift.installed import installed_version
from upshift.settings import keep_xla_programs, read_settings


def keep_programs() -> Path:
    """Return the folder of compiled programs. TensorFlow reads it at its first compilation, so call this before.
    Raise RequestError if the cache takes no files."""
    versions = (installed_version(name) for name in ("tensorflow", "tensorflow-cpu"))
    version = next((version for version in versions if version is not None), "unknown")
    folder = read_settings().cache_dir / "xla" / f"{version}-{detect().fingerprint}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"the cache folder {folder} cannot be used: {error.strerror}"
        raise RequestError(f"{why}; name another with UPSHIFT_CACHE") from None
    keep_xla_programs(folder)
    return folder
