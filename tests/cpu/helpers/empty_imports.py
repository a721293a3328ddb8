"""A server of warm_processes.py that imports nothing more, for tests of the server itself."""

from __future__ import annotations


def begin(is_command: bool) -> None:
    """Leave the process as it is."""
