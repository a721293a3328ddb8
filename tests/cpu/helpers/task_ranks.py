"""A script for ranks that torchrun starts: each trains the models that the command names, and rank 0 writes the losses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import upshift


def main(folder: Path, cases: list[list[str]], steps: int, rate: float, rows: int) -> None:
    losses = []
    for number, (model, data) in enumerate(cases):
        arguments = {"max_steps": steps, "learning_rate": rate, "lr_scheduler_type": "constant"}
        output = folder / f"out-{number}"
        record = upshift.train(model, data, output=output, arguments=arguments, global_batch=rows, eval_size=0)
        if record is not None:
            losses.append([loss for _, loss in record.details["loss_curve"]])
    if losses:
        (folder / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *json.loads(sys.argv[2]))
