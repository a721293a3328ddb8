"""Write the random number generators of a process to safetensors and read them: dropout must continue as if never stopped.

Torch's states are tensors. Python's and numpy's are JSON in the file's metadata. There is one entry per rank.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file

from upshift.loading.files.safetensors_header import StoredTensor, read_header
from upshift.loading.files.tensors import read_tensor

RNG_NAME = "rng.safetensors"


class HostRng(NamedTuple):
    """The generators of the host, as they are: cheap to take at every batch."""

    cpu: torch.Tensor
    python: tuple[Any, ...]
    numpy: dict[str, Any] | tuple[Any, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class RngState:
    """The generators of one process. It is picklable, so ranks can gather theirs to the one that saves."""

    cpu: torch.Tensor
    cuda: torch.Tensor | None  # of the process's one device
    python: str  # JSON
    numpy: str  # JSON


def host_rng() -> HostRng:
    return HostRng(torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=True))


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore the host's generators on leaving: random numbers drawn inside are drawn again by later code."""
    before = host_rng()
    try:
        yield
    finally:
        restore_host_rng(before)


def restore_host_rng(rng: HostRng) -> None:
    torch.set_rng_state(rng.cpu)
    random.setstate(rng.python)
    np.random.set_state(rng.numpy)


def capture_rng(device: torch.device) -> RngState:
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return RngState(**_to_json_fields(host_rng()), cuda=cuda)


def _to_json_fields(rng: HostRng) -> dict[str, Any]:
    kind, keys, *rest = rng.numpy
    return {"cpu": rng.cpu, "python": json.dumps(rng.python), "numpy": json.dumps([kind, np.asarray(keys).tolist(), *rest])}


def restore_rng(state: RngState, device: torch.device) -> None:
    torch.set_rng_state(state.cpu)
    if state.cuda is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state.cuda, device)
    version, internal, gauss = json.loads(state.python)
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = json.loads(state.numpy)
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))


def seed_rng(*parts: int) -> None:
    seed = int(np.random.SeedSequence(parts).generate_state(1)[0])
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def write_rngs(directory: Path, states: Sequence[RngState]) -> None:
    tensors, texts = {}, {}
    named = {str(rank): state for rank, state in enumerate(states)}
    for name, state in named.items():
        tensors[f"{name}.cpu"] = state.cpu
        if state.cuda is not None:
            tensors[f"{name}.cuda"] = state.cuda
        texts[f"{name}.python"], texts[f"{name}.numpy"] = state.python, state.numpy
    save_file(tensors, directory / RNG_NAME, metadata=texts)


def read_rng(directory: Path, *, rank: int) -> RngState | None:
    """Return the random numbers of a rank, or None when the checkpoint was saved by fewer processes."""
    header = read_header(directory / RNG_NAME)
    return _read_state(header.by_name(), header.metadata, str(rank))


def _read_state(tensors: Mapping[str, StoredTensor], texts: Mapping[str, str], name: str) -> RngState | None:
    if f"{name}.cpu" not in tensors:
        return None
    return RngState(
        cpu=read_tensor(tensors[f"{name}.cpu"]),
        cuda=read_tensor(tensors[f"{name}.cuda"]) if f"{name}.cuda" in tensors else None,
        python=texts[f"{name}.python"],
        numpy=texts[f"{name}.numpy"],
    )
