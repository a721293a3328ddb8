"""Describe the machine, the software and the time that a row was measured with."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from upshift.hardware.spec import Host
from upshift.record import Environment
from upshift.versions import installed_versions

LIBRARIES = (
    "upshift", "torch", "transformers", "accelerate", "torchao", "numpy", "openvino", "nncf", "onnxruntime", "ctranslate2",
    "llama-cpp-python", "sentence-transformers", "tensorflow-cpu",
)  # fmt: skip


def library_versions() -> dict[str, str]:
    """Return the installed versions, without importing the libraries."""
    return installed_versions(LIBRARIES)


def environment(host: Host) -> Environment:
    return Environment(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        host=host.name,
        host_fingerprint=host.fingerprint,
        processor=host.cpu.model_name if host.cpu else None,
        num_cores=host.cpu.usable_cores if host.cpu else None,
        python=platform.python_version(),
        versions=library_versions(),
        commit=_commit(),
    )


def _commit() -> str | None:
    """Return the commit if Upshift runs from a checkout, else None."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None
    answer = subprocess.run(["git", "-C", str(root), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return answer.stdout.strip() or None
