"""Check that TensorFlow is installed before anything imports it, so that its absence is one line with the install
command.

Keep compiled programs for later processes, in a folder for each TensorFlow and each host, as they are machine
code.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from upshift.errors import MissingExtra, RequestError
from upshift.hardware.detect import detect
from upshift.settings import keep_xla_programs, quiet_tensorflow, read_settings
from upshift.versions import installed_version


def need_tensorflow(purpose: str = "the xla backend") -> None:
    """Raise MissingExtra if TensorFlow is not installed. Call it before importing: its C++ log is kept to errors from
    here on."""
    if find_spec("tensorflow") is None:
        raise MissingExtra(library="tensorflow", extra="xla", purpose=purpose)
    quiet_tensorflow()


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
