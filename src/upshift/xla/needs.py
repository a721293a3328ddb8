"""Check that TensorFlow is installed before anything imports it, so that its absence is one line with the install
command."""

from __future__ import annotations

from importlib.util import find_spec

from upshift.errors import MissingExtra
from upshift.settings import quiet_tensorflow


def need_tensorflow(purpose: str = "the xla backend") -> None:
    """Raise MissingExtra if TensorFlow is not installed. Call it before importing: its C++ log is kept to errors from
    here on."""
    if find_spec("tensorflow") is None:
        raise MissingExtra(library="tensorflow", extra="xla", purpose=purpose)
    quiet_tensorflow()
