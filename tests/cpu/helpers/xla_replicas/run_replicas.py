"""One process of a run under XLA: with two logical CPUs, or one of the workers of TF_CONFIG. Prints its losses as JSON."""

import json
import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")
from upshift.xla.tensorflow import need_tensorflow  # noqa: E402

need_tensorflow()
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from upshift.xla.data.batches import Batches, Buckets  # noqa: E402


def batches_from(step):
    rng = np.random.RandomState(0)
    for number in range(4):
        ids = rng.randint(5, 90, (8, 32)).astype("int64")
        mask = np.ones_like(ids)
        mask[::3, 20:] = 0
        if number >= step:
            yield {"input_ids": ids, "attention_mask": mask, "labels": np.where(mask, ids, -100)}


def main(kind, model, output):
    if kind == "mirrored":
        whole = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(whole, [tf.config.LogicalDeviceConfiguration()] * 2)
    print(json.dumps(train_both(model, Path(output))))


def train_both(model, output):
    """With both optimizers, over the devices that there are."""
    from upshift.xla.training.strategy import choose_devices
    from upshift.xla.training.train import train

    devices, found = choose_devices(), {}
    data = Batches(
        start=batches_from, global_batch=8, buckets=Buckets(widths=(32,), padded_share=0.0), evaluation=lambda: batches_from(2)
    )
    for optim, rate in (("sgd", 0.1), ("adamw", 1e-3)):
        trained = train(
            model, data, output=output / optim, max_steps=3, learning_rate=rate, optim=optim, weight_decay=0.01,
            devices=devices,
        )  # fmt: skip
        found[optim] = (*trained.losses, trained.evaluations[-1][1])
    return {"losses": found, "reason": devices.reason, "replicas": devices.num_replicas}


if __name__ == "__main__":
    main(*sys.argv[1:])
