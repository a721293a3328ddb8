"""Write and read the random number generators of processes, so that a resumed run draws the same dropout.

The file is safetensors. The states of torch are tensors. Those of Python and numpy are JSON in the metadata. There is one entry
for each rank.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file

from upshift.loading.files.safetensors_header import read_header
from upshift.loading.files.tensors import read_tensor

RNG_NAME = "rng.safetensors"


class HostRng(NamedTuple):
    """The states of the host's generators, unconverted, because they are read for every batch."""

    cpu: torch.Tensor
    python: tuple[Any, ...]
    numpy: dict[str, Any] | tuple[Any, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class RngState:
    """The states of all generators of one process. It can be pickled, so that one rank can gather and save those of all ranks."""

    cpu: torch.Tensor
    cuda: torch.Tensor | None  # the state of the one device of the process
    python: str  # JSON
    numpy: str  # JSON


def host_rng() -> HostRng:
    return HostRng(torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=True))


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore the host's generators on leaving, so that later code draws the same numbers as without the block."""
    rng = host_rng()
    try:
        yield
    finally:
        restore_host_rng(rng)


def restore_host_rng(rng: HostRng) -> None:
    torch.set_rng_state(rng.cpu)
    random.setstate(rng.python)
    np.random.set_state(rng.numpy)


def capture_rng(device: torch.device) -> RngState:
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return RngState(**_to_json_fields(host_rng()), cuda=cuda)


def _to_json_fields(rng: HostRng) -> dict[str, Any]:
    algorithm, keys, *remaining = rng.numpy
    return {
        "cpu": rng.cpu,
        "python": json.dumps(rng.python),
        "numpy": json.dumps([algorithm, np.asarray(keys).tolist(), *remaining]),
    }


def restore_rng(state: RngState, device: torch.device) -> None:
    torch.set_rng_state(state.cpu)
    if state.cuda is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state.cuda, device)
    version, numbers, gauss = json.loads(state.python)
    random.setstate((version, tuple(numbers), gauss))
    algorithm, keys, *remaining = json.loads(state.numpy)
    np.random.set_state((algorithm, np.array(keys, dtype=np.uint32), *remaining))


def seed_rng(*numbers: int) -> None:
    """Seed all generators by a hash of the numbers."""
    seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def write_rngs(directory: Path, states: Sequence[RngState]) -> None:
    """Write the states of all ranks, in the order of the ranks."""
    tensors = {}
    metadata = {}
    for rank, state in enumerate(states):
        tensors[f"{rank}.cpu"] = state.cpu
        if state.cuda is not None:
            tensors[f"{rank}.cuda"] = state.cuda
        metadata[f"{rank}.python"] = state.python
        metadata[f"{rank}.numpy"] = state.numpy
    save_file(tensors, directory / RNG_NAME, metadata=metadata)


def read_rng(directory: Path, *, rank: int) -> RngState | None:
    """Return the states of a rank's generators, or None if the checkpoint was saved by fewer processes."""
    header = read_header(directory / RNG_NAME)
    tensors = header.by_name()
    if f"{rank}.cpu" not in tensors:
        return None
    return RngState(
        cpu=read_tensor(tensors[f"{rank}.cpu"]),
        cuda=read_tensor(tensors[f"{rank}.cuda"]) if f"{rank}.cuda" in tensors else None,
        python=header.metadata[f"{rank}.python"],
        numpy=header.metadata[f"{rank}.numpy"],
    )
