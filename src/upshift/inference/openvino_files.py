"""OpenVINO's pairs of files."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def save(model: Any, path: Path) -> None:
    """Put in place whole: ``path`` is the .xml, and is there only when its .bin is."""
    import openvino

    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"writing-{path.name}")
    openvino.save_model(model, temporary, compress_to_fp16=False)
    temporary.with_suffix(".bin").replace(path.with_suffix(".bin"))
    temporary.replace(path)
