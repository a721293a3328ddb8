"""The random number generators of a process, out of safetensors and back in: dropout must continue as if never stopped.

Torch's states are tensors; Python's and numpy's are JSON in the file's metadata. One entry per rank.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

RNG_NAME = "rng.safetensors"


@dataclass(frozen=True, kw_only=True, eq=False)
class RngState:
    """Of one process. Picklable, so ranks can gather theirs to the one that saves."""

    cpu: torch.Tensor
    cuda: torch.Tensor | None  # of the process's one device
    python: str  # JSON
    numpy: str  # JSON


def capture_rng(device: torch.device) -> RngState:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return RngState(
        cpu=torch.get_rng_state(),
        cuda=torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        python=json.dumps(random.getstate()),
        numpy=json.dumps([kind, np.asarray(keys).tolist(), *rest]),
    )


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
    for rank, state in enumerate(states):
        tensors[f"{rank}.cpu"] = state.cpu
        if state.cuda is not None:
            tensors[f"{rank}.cuda"] = state.cuda
        texts[f"{rank}.python"], texts[f"{rank}.numpy"] = state.python, state.numpy
    save_file(tensors, directory / RNG_NAME, metadata=texts)


def read_rng(directory: Path, *, rank: int) -> RngState | None:
    """None when the checkpoint was saved by fewer processes."""
    with safe_open(directory / RNG_NAME, framework="pt") as file:
        texts, names = file.metadata() or {}, set(file.keys())
        if f"{rank}.cpu" not in names:
            return None
        return RngState(
            cpu=file.get_tensor(f"{rank}.cpu"),
            cuda=file.get_tensor(f"{rank}.cuda") if f"{rank}.cuda" in names else None,
            python=texts[f"{rank}.python"],
            numpy=texts[f"{rank}.numpy"],
        )
