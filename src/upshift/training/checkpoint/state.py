"""Define the JSON of a checkpoint: the progress of the training, and everything that is not a tensor. Needs no torch.

The manifest lists the size and SHA-256 of every file, so that a change of bytes at the same length is found. It ends with the
checksum of its own text.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError

from upshift.errors import RequestError
from upshift.training.batches.sampler import Position
from upshift.value import Value, first_problem

STATE_NAME = "upshift_state.json"
SETTLED_SECONDS = 2.0  # a file that was written more recently may change again at the same time stamp
SEAL_PATTERN = re.compile(rb',\n "checksum": "([0-9a-f]{64})"\n\}\Z')  # the end of a sealed JSON document
DOCUMENT_END = b"\n}"


class TrainState(Value):
    """The progress of a training run, apart from tensors. Two runs with the same state continue the same way."""

    step: Annotated[int, Field(ge=0)]  # optimizer steps done
    position: Position  # the position of the next global batch
    seed: int
    tokens_seen: Annotated[int, Field(ge=0)]
    plan: dict[str, Any]
    loss_curve: tuple[float, ...] = ()  # the loss of each step so far
    best_evaluation_loss: float | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    run: str = Field("", description="the id of the run that the checkpoint belongs to")


class SavedGroup(Value):
    """One parameter group: the names of its parameters and its options."""

    parameters: tuple[str, ...]
    options: dict[str, Any]


class SavedSubclass(Value):
    """The description from which to rebuild a state tensor that consists of several plain tensors."""

    tensor_class: str
    parts: tuple[str, ...]
    context: list[Any]


class SavedOptimizer(Value):
    optimizer_class: str
    groups: tuple[SavedGroup, ...]
    numbers: dict[str, dict[str, Any]]  # parameter name -> state key -> a state value that is not a tensor
    subclasses: dict[str, SavedSubclass]  # by `<parameter name>.<state key>`


class Manifest(Value):
    """The file upshift_state.json. It is written last, so a directory with a complete one is complete itself."""

    format: int = 1
    files: dict[str, int]  # size in bytes of every other file
    checksums: dict[str, str] = Field(default_factory=dict)  # SHA-256 of every other file; filled in by write

    def write(self, directory: Path, *, earlier_checksums: Mapping[str, str] | None = None) -> None:
        """Write the file. ``earlier_checksums`` has checksums, by file name, that do not have to be computed again."""
        earlier_checksums = earlier_checksums or {}
        names = (name for name in self.files if name not in earlier_checksums)
        checksums = {**earlier_checksums, **checksums_of(directory, names)}
        # Not to_json: pydantic turns an infinity inside Any (ReduceLROnPlateau starts with one) into null.
        document = json.dumps({**self.model_dump(), "checksums": checksums}, indent=1)
        (directory / STATE_NAME).write_text(seal(document), encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> Self:
        path = directory / STATE_NAME
        try:
            document = unseal(path.read_bytes())
            if document is None:
                raise RequestError(f"{path} is damaged: it is not as it was written; resume from another checkpoint")
            return cls.model_validate(json.loads(document))
        except OSError as error:
            raise RequestError(f"{path} cannot be read ({error.strerror}); resume from another checkpoint") from None
        except (UnicodeDecodeError, json.JSONDecodeError):
            raise RequestError(f"{path} is not whole; resume from another checkpoint") from None
        except ValidationError as error:
            raise RequestError(
                f"{path} is no state of this version ({first_problem(cls, error)}); resume from another checkpoint"
            ) from None


class SavedState(Manifest):
    """The manifest of a checkpoint of the training loop, with everything that is not a tensor."""

    train: TrainState
    optimizer: SavedOptimizer
    scheduler: dict[str, Any]
    scaler: dict[str, Any] | None


class TrainerManifest(Manifest):
    """The manifest of a Trainer's checkpoint, which keeps its state in other files."""

    trainer: str  # the version of transformers


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest of either kind. Raise RequestError if it cannot be read."""
    try:
        is_from_trainer = "trainer" in json.loads((directory / STATE_NAME).read_bytes())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, TypeError, RecursionError):
        is_from_trainer = False  # Manifest.read reports what is wrong
    return (TrainerManifest if is_from_trainer else SavedState).read(directory)


def checksums_of(directory: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of each file by name. Raise OSError if a file cannot be read."""
    return {name: checksum_of(directory / name) for name in names}


def checksum_of(path: Path) -> str:
    """Return the SHA-256 of a file's bytes. Raise OSError if it cannot be read.

    A process reads a file only once unless the file changes.
    """
    stat = path.stat()
    if time.time() - max(stat.st_mtime, stat.st_ctime) < SETTLED_SECONDS:
        return _hash_file(path)
    return _cached_checksum(path, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


@lru_cache(maxsize=4096)
def _cached_checksum(path: Path, *identity: int) -> str:
    return _hash_file(path)


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def seal(document: str) -> str:
    """Return a JSON object, printed with an indent of 1, with the checksum of its text added as the last key."""
    text = document.encode()
    if not text.endswith(DOCUMENT_END):
        raise ValueError("only a JSON object that is printed with an indent can be sealed")
    digest = hashlib.sha256(text).hexdigest()
    return document[: -len(DOCUMENT_END)] + f',\n "checksum": "{digest}"\n}}'


def unseal(content: bytes) -> bytes | None:
    """Return the document that was sealed, or None if one of its bytes has changed."""
    match = SEAL_PATTERN.search(content)
    if match is None:
        return None
    document = content[: match.start()] + DOCUMENT_END
    return document if hashlib.sha256(document).hexdigest().encode() == match[1] else None
