"""Parts of the GPU check that train on several GPUs: each layout must have the losses of one GPU."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from gpu_process import ANSWER, PartRequest
from gpu_rows import Answer, compare_speed
from gpu_sizes import case_for, sizes_for

from upshift.record import Record

UNIT = "tokens/s"
GLOBAL_BATCH = 8
STEPS = 8
LOSS_TOLERANCE = 1e-3  # relative, in fp32: sums over ranks are in another order, and differences grow with the steps
MAX_SECONDS = 600.0  # the part has a limit of its own


def train_one(request: PartRequest) -> Answer:
    return train_layout(request, 1)


def train_data_parallel(request: PartRequest) -> Answer:
    return train_layout(request, all_gpus(request), "--fully-shard", "no")


def train_zero3(request: PartRequest) -> Answer:
    return train_layout(request, all_gpus(request), "--fully-shard", "weights")


def train_tensor_parallel(request: PartRequest) -> Answer:
    return train_layout(request, 2, "--tensor-parallel", "2")


def all_gpus(request: PartRequest) -> int:
    """Return the largest number of GPUs that divides the global batch."""
    return max(count for count in range(1, len(request.names) + 1) if GLOBAL_BATCH % count == 0)


def train_layout(request: PartRequest, processes: int, *options: str) -> Answer:
    """Train by ``upshift train`` in fp32, with nothing compiled or packed and one kernel of attention, so that little is traced.

    Compare the losses with one GPU's."""
    sizes = sizes_for(request)
    output = request.work / request.part
    command = [
        sys.executable, "-m", "upshift", "train", str(request.work / "model"), "--data", str(request.work / "data.jsonl"),
        "-o", str(output), "--overwrite", "--json", "--from-config", "--sequence-length", str(sizes.small.sequence_length),
        "--global-batch", str(GLOBAL_BATCH), "--max-steps", str(STEPS), "--trial-seconds", "0", "--set", "precision=fp32",
        "--set", "packing=False", "--set", "torch_compile=off", "--set", "attention=sdpa", "--nproc", str(processes), *options,
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=MAX_SECONDS, check=False)
    shutil.rmtree(output, ignore_errors=True)
    if done.returncode:
        sys.exit(done.returncode)  # its messages are in the log
    record = Record.from_json(done.stdout.strip().splitlines()[-1])
    losses = [loss for _, loss in record.details["loss_curve"]]
    case = case_for(request, "gpu_layouts", {**vars(sizes.small), "steps": STEPS, "global_batch": GLOBAL_BATCH})
    case.add(request.part, plan=record.plan, predicted=record.predicted, measured=record.measured, details={"losses": losses})
    speed = record.measured.tokens_per_second if record.measured else None
    predicted = record.predicted.tokens_per_second if record.predicted else None
    return judge(request, speed or 0.0, predicted, processes, losses)


def judge(request: PartRequest, speed: float, predicted: float | None, processes: int, losses: list[float]) -> Answer:
    """Return the answer: failed if the losses are not those of one GPU, slower if the layout is slower than predicted."""
    common: dict[str, Any] = {"unit": UNIT, "predicted": predicted, "measured": speed, "details": {"losses": losses}}
    slower, compared = compare_speed(speed, predicted, UNIT)
    words = f"{processes} GPU{'s' if processes > 1 else ''}: {compared}"
    if processes == 1:
        return Answer(reason=words, slower=slower, **common)
    alone = json.loads((request.folder / "parts" / "layout-one" / ANSWER).read_bytes())["details"]["losses"]
    wrong = loss_difference(losses, alone)
    if wrong is not None:
        return Answer(reason=f"{wrong}; {words}", failed=True, **common)
    return Answer(reason=f"the losses of one GPU; {words}", slower=slower, **common)


def loss_difference(losses: Sequence[float | None], alone: Sequence[float | None]) -> str | None:
    """Return how the losses differ from those of one GPU, or None if they are the same within the tolerance.

    A loss that is not a number is None, and is never the same."""
    if len(losses) != len(alone):
        return f"it has {len(losses)} losses, and one GPU has {len(alone)}"
    for step, (ours, theirs) in enumerate(zip(losses, alone, strict=True), start=1):
        if ours is None or theirs is None or not abs(ours - theirs) <= LOSS_TOLERANCE * abs(theirs):
            return f"its loss of step {step} is {ours}, and one GPU's is {theirs}"
    return None
