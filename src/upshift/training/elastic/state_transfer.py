"""Pass the state of a running replica to one that comes back: a running one writes a checkpoint, and the other one loads it.

torchft's own transports unpickle what a peer sends. A checkpoint of Upshift is safetensors and JSON.
"""

from __future__ import annotations

import json
import shutil
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from upshift.errors import JobFailed

POLL_SECONDS = 0.02
MAX_WAIT_SECONDS = 600.0
TORCHFT_STATE_NAME = "agreed.json"  # written last, so the checkpoint beside it is complete
UNFINISHED_SUFFIX = ".writing"


class HasStep(Protocol):
    """The progress of a training loop."""

    step: int


class TransferableRun(Protocol):
    """A training loop that can pass on its state."""

    @property
    def progress(self) -> HasStep: ...

    def write_to(self, folder: Path) -> None:
        """Write a checkpoint of the present state, and the history of the run so far."""

    def read_from(self, folder: Path) -> None: ...


class FolderTransport:
    """A CheckpointTransport of torchft (its checkpointing/transport.py). ``metadata`` is the sender's folder for the receiver."""

    training_run: TransferableRun

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def metadata(self) -> str:
        return str(self._folder)

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: dict[str, Any], timeout: timedelta) -> None:
        unfinished = self._folder.with_name(self._folder.name + UNFINISHED_SUFFIX)
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        self.training_run.write_to(unfinished)
        (unfinished / TORCHFT_STATE_NAME).write_text(json.dumps(state_dict["torchft"]), encoding="utf-8")
        unfinished.rename(self._folder)

    def disallow_checkpoint(self) -> None:
        """Remove the checkpoint at the end of the step. The receiver has loaded it by then."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> dict[str, Any]:
        """Load the checkpoint. Raise JobFailed if it does not come in time. The step then does not count, and is repeated."""
        folder = Path(metadata)
        deadline = time.monotonic() + min(timeout.total_seconds(), MAX_WAIT_SECONDS)
        while not (folder / TORCHFT_STATE_NAME).exists():
            if time.monotonic() > deadline:
                raise JobFailed(f"no checkpoint of step {step} came from copy {src_rank}")
            time.sleep(POLL_SECONDS)
        self.training_run.read_from(folder)
        return {"user": {"default": {}}, "torchft": json.loads((folder / TORCHFT_STATE_NAME).read_bytes())}

    def load_state(self, state: dict[str, Any]) -> None:
        """Do nothing: recv_checkpoint has read the state already."""

    def shutdown(self, wait: bool = True) -> None:
        self.disallow_checkpoint()
