"""Batches that tests of training under XLA share, and the process of one of them that kills itself.

python xla_batches.py MODEL OUTPUT STEP
"""

from __future__ import annotations

import os
import signal
import sys

import numpy as np

from upshift.xla.tensorflow import need_tensorflow

need_tensorflow()

from upshift.xla.data.batches import Batches, Buckets  # noqa: E402
from upshift.xla.training.train import train  # noqa: E402

KILLED = {"max_steps": 6, "learning_rate": 1e-3, "save_steps": 2}


def ragged_batches(count, shortest=29, longest=123, rows=4):
    rng, made = np.random.RandomState(0), []
    for _ in range(count):
        lengths = rng.randint(shortest, longest + 1, rows)
        mask = (np.arange(lengths.max()) < lengths[:, None]).astype("int64")
        ids = rng.randint(5, 90, mask.shape).astype("int64") * mask
        made.append({"input_ids": ids, "attention_mask": mask, "labels": np.where(mask, ids, -100)})
    return made


def as_batches(made, *widths, held_out=None):
    buckets = Buckets(widths=widths, padded_share=0.0)
    evaluation = None if held_out is None else lambda: held_out
    return Batches(
        start=lambda step: iter(made[step:]), global_batch=len(made[0]["labels"]), buckets=buckets, evaluation=evaluation
    )  # fmt: skip


def train_until_killed(model, output, step):
    """No handler runs, nothing is flushed: as the kernel kills for memory."""

    def kill(done):
        if done.step == step:
            os.kill(os.getpid(), signal.SIGKILL)

    train(model, as_batches(ragged_batches(6, 8, 30), 32), output=output, on_step=kill, **KILLED)


if __name__ == "__main__":
    train_until_killed(sys.argv[1], sys.argv[2], int(sys.argv[3]))
