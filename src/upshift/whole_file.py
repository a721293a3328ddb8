"""Files that a reader meets whole: the old content or the new one, never a part."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Written beside and renamed; right also beside another process that writes the same. Its folder must exist. A link is
    followed; what is no regular file, such as a pipe or /dev/null, is written to as it is. Raises OSError."""
    encoded = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(encoded)
        return
    file = Path(os.path.realpath(path))
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(encoded)
        temporary.replace(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
