"""A script for ranks that torchrun starts: each trains the models that the command names, and rank 0 writes their numbers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import upshift


def main(folder: Path, cases: list[list[str]], steps: int, rate: float, rows: int) -> None:
    numbers = []
    for number, (model, data, *eval_data) in enumerate(cases):
        arguments = {"max_steps": steps, "learning_rate": rate, "lr_scheduler_type": "constant"}
        output = folder / f"out-{number}"
        held_out = {"eval_data": eval_data[0]} if eval_data else {"eval_size": 0}
        record = upshift.train(model, data, output=output, arguments=arguments, global_batch=rows, **held_out)
        if record is not None:
            numbers.append([[loss for _, loss in record.details["loss_curve"]], record.details["metrics"]])
    if numbers:
        (folder / "numbers.json").write_text(json.dumps(numbers))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *json.loads(sys.argv[2]))
