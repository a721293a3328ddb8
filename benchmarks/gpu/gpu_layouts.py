"""Parts of the GPU check that train on several GPUs: each layout must have the losses of one GPU."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import Any

from gpu_process import ANSWER, PartRequest
from gpu_rows import Answer
from gpu_sizes import sizes_for
from gpu_training import case_for

from upshift.record import Record

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
    """Train by ``upshift train`` in fp32, without packing and compilation, and compare the losses with one GPU's."""
    sizes = sizes_for(request)
    output = request.work / request.part
    command = [
        sys.executable, "-m", "upshift", "train", str(request.work / "model"), "--data", str(request.work / "data.jsonl"),
        "-o", str(output), "--overwrite", "--json", "--from-config", "--sequence-length", str(sizes.small.sequence_length),
        "--global-batch", str(GLOBAL_BATCH), "--max-steps", str(STEPS), "--trial-seconds", "0", "--set", "precision=fp32",
        "--set", "packing=False", "--set", "torch_compile=off", "--nproc", str(processes), *options,
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=MAX_SECONDS, check=False)
    shutil.rmtree(output, ignore_errors=True)
    if done.returncode:
        sys.exit(done.returncode)  # its messages are in the log
    record = Record.from_json(done.stdout.strip().splitlines()[-1])
    losses = [loss for _, loss in record.details["loss_curve"]]
    case = case_for(request, "gpu_layouts", {**vars(sizes.small), "steps": STEPS, "global_batch": GLOBAL_BATCH})
    case.add(request.part, plan=record.plan, predicted=record.predicted, measured=record.measured, details={"losses": losses})
    return judge(request, record, processes, losses)


def judge(request: PartRequest, record: Record, processes: int, losses: list[float]) -> Answer:
    speed = record.measured.tokens_per_second if record.measured else None
    predicted = record.predicted.tokens_per_second if record.predicted else None
    common: dict[str, Any] = {"unit": "tokens/s", "predicted": predicted, "measured": speed, "details": {"losses": losses}}
    words = f"{processes} GPUs: {speed or 0:,.0f} tokens/s, predicted {predicted or 0:,.0f}"
    if processes == 1:
        return Answer(reason=words, **common)
    alone = json.loads((request.folder / "parts" / "layout-one" / ANSWER).read_bytes())["details"]["losses"]
    if len(alone) != len(losses):
        return Answer(reason=f"{len(losses)} losses, and one GPU has {len(alone)}", failed=True, **common)
    largest = max(abs(ours / theirs - 1) for ours, theirs in zip(losses, alone, strict=True))
    if not largest <= LOSS_TOLERANCE:  # a loss that is not a number fails, too
        return Answer(reason=f"its losses differ by {largest:.2g} from one GPU's; {words}", failed=True, **common)
    return Answer(reason=f"the losses of one GPU, within {largest:.1g}; {words}", **common)
