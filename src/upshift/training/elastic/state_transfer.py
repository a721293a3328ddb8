"""Hand the others' state to a copy that comes back: one of them writes a checkpoint for it, which it loads.

torchft's own transports unpickle what a peer sends. A checkpoint of Upshift's is safetensors and JSON.
"""

from __future__ import annotations

import json
import shutil
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from upshift.errors import JobFailed

POLL_SECONDS, PATIENCE_SECONDS = 0.02, 600.0
AGREED, WRITING = "agreed.json", ".writing"


class HasStep(Protocol):
    step: int


class TransferableRun(Protocol):
    """A training loop."""

    @property
    def progress(self) -> HasStep: ...

    def write_to(self, folder: Path) -> None:
        """Write a checkpoint of now, and the history of the run until now."""

    def read_from(self, folder: Path) -> None: ...


class FolderTransport:
    """A CheckpointTransport of torchft (its checkpointing/transport.py). ``metadata`` of the giver says where the taker looks."""

    trained: TransferableRun

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def metadata(self) -> str:
        return str(self._folder)

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: dict[str, Any], timeout: timedelta) -> None:
        unfinished = self._folder.with_name(self._folder.name + WRITING)
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        self.trained.write_to(unfinished)
        (unfinished / AGREED).write_text(json.dumps(state_dict["torchft"]), encoding="utf-8")
        unfinished.rename(self._folder)

    def disallow_checkpoint(self) -> None:
        """Remove the checkpoint at the end of the step, for which the taker has loaded it."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> dict[str, Any]:
        """Load the checkpoint. Raise JobFailed if it does not come in time: the step does not count then, and is taken again."""
        folder, end = Path(metadata), time.monotonic() + min(timeout.total_seconds(), PATIENCE_SECONDS)
        while not (folder / AGREED).exists():
            if time.monotonic() > end:
                raise JobFailed(f"no checkpoint of step {step} came from copy {src_rank}")
            time.sleep(POLL_SECONDS)
        self.trained.read_from(folder)
        return {"user": {"default": {}}, "torchft": json.loads((folder / AGREED).read_bytes())}

    def take(self, state: dict[str, Any]) -> None:
        """Do nothing: the state was read where it was received."""

    def shutdown(self, wait: bool = True) -> None:
        self.disallow_checkpoint()
