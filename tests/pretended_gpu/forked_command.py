"""Run a command of Python on pretended GPUs in a fork of a process that has imported everything (warm_scripts.py).

The processes that the command starts are new: they import, and find the device, as on a user's machine.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pretended_cuda
import torch

THREADS = torch.get_num_threads()  # the scripts of ranks set another number
IMPORTED_BY_COMMANDS = (
    "upshift.cli.main", "upshift.inference.encoding.raced_setup", "upshift.inference.generation.raced_setup",
    "upshift.training.trials.worker",
)  # fmt: skip

import warm_script  # noqa: E402

for module in IMPORTED_BY_COMMANDS:
    importlib.import_module(module)
pretended_cuda.forget_questions()  # some imports ask for the device's capability, which forbids a real process to fork


def run_folder(folder: Path) -> None:
    """Run the command of command.json on the GPUs of its environment. The folder gets what it prints."""
    command = warm_script.read_command(folder)
    torch.set_num_threads(int(command["environment"].get("OMP_NUM_THREADS", THREADS)))
    pretended_cuda.take_gpus()
    warm_script.run_python(command["arguments"])
