"""Import everything for the server that forks commands on pretended GPUs (warm_processes.py).

Each command has a server of its own, which forks the processes that the command starts. It has not used a GPU either.
"""

from __future__ import annotations

import os

import pretended_cuda
import torch
import warm_imports
from warm_processes import WarmProcesses

pretended_cuda.forget_questions()  # some imports ask for the device's capability, which forbids a real process to fork


def begin(is_command: bool) -> None:
    """Take the GPUs of the process's own environment."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", warm_imports.THREADS)))
    pretended_cuda.take_gpus()
    if is_command:
        warm_imports.fork_processes(WarmProcesses.forked(begin))
