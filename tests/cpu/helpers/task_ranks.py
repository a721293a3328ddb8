"""Two ranks, forks that torchrun's agent starts: each trains the models that the command names. Rank 0 writes their numbers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import upshift


def train_all(folder: Path, cases: list[list[str]], steps: int, rate: float, rows: int) -> None:
    torch.set_num_threads(1)
    numbers = []
    for number, (model, data, *eval_data) in enumerate(cases):
        arguments = {"max_steps": steps, "learning_rate": rate, "lr_scheduler_type": "constant"}
        output = folder / f"out-{number}"
        held_out = {"eval_data": eval_data[0]} if eval_data else {"eval_size": 0}
        record = upshift.train(model, data, output=output, arguments=arguments, global_batch=rows, **held_out)
        if record is not None:
            measured = record.details["metrics"] | {"held-out loss": record.measured.evaluation_loss} if eval_data else {}
            numbers.append([[loss for _, loss in record.details["loss_curve"]], measured])
    if numbers:
        (folder / "numbers.json").write_text(json.dumps(numbers))


def main(folder: Path, cases: list[list[str]], steps: int, rate: float, rows: int) -> None:
    standalone = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, rdzv_backend="c10d", rdzv_endpoint="localhost:0", run_id="tasks",
        max_restarts=0, start_method="fork",
    )  # fmt: skip
    elastic_launch(standalone, train_all)(folder, cases, steps, rate, rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *json.loads(sys.argv[2]))
