"""Choose the devices of a run: a TPU if one answers, else the hosts of TF_CONFIG, else all devices of this host, else one.

Each choice has a reason, which is shown to the user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

import upshift.xla.model  # noqa: F401  # workers of TensorFlow 2.21 hang if modules are loaded after the workers have met
from upshift.errors import RequestError
from upshift.settings import read_tensorflow_cluster, read_tpu_name
from upshift.text import one_line


@dataclass(frozen=True)
class Devices:
    """Hold the devices of a run, and the reason for choosing them."""

    strategy: Any | None  # a strategy of tf.distribute; None: one device
    reason: str
    on_tpu: bool = False

    @property
    def num_replicas(self) -> int:
        return 1 if self.strategy is None else int(self.strategy.num_replicas_in_sync)

    @property
    def is_chief(self) -> bool:
        """Return whether this process writes the files of the run."""
        return self.strategy is None or bool(self.strategy.extended.should_save_summary)


def divide_rows(batch: Mapping[str, np.ndarray], devices: Devices) -> dict[str, Any]:
    """Divide the rows of the global batch, in order, among the replicas. Each host has the whole batch and takes its own rows."""
    strategy = devices.strategy
    num_replicas = devices.num_replicas
    if strategy is None:
        return {name: tf.constant(value) for name, value in batch.items()}

    def split(value: np.ndarray) -> Any:
        rows = len(value) // num_replicas

        def of_replica(context: Any) -> tf.Tensor:
            first = int(context.replica_id_in_sync_group) * rows
            return tf.constant(value[first : first + rows])

        return strategy.experimental_distribute_values_from_function(of_replica)

    return {name: split(value) for name, value in batch.items()}


def choose_devices() -> Devices:
    """Return the devices of a run. Raise RequestError if the environment names a TPU that does not answer."""
    tpu = _find_tpu()
    if tpu is not None:
        return tpu
    workers = read_tensorflow_cluster().get("cluster", {}).get("worker", [])
    if len(workers) > 1:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        return Devices(strategy, f"MultiWorkerMirroredStrategy: TF_CONFIG names {len(workers)} workers")
    for kind in ("GPU", "CPU"):
        devices = tf.config.list_logical_devices(kind)
        if len(devices) > 1:
            strategy = tf.distribute.MirroredStrategy([device.name for device in devices])
            return Devices(strategy, f"MirroredStrategy: {len(devices)} {kind} devices in this process")
        if devices:
            return Devices(None, f"one {kind}: no TPU answers, TF_CONFIG names no other worker")
    raise RequestError("TensorFlow sees no device at all; install tensorflow-cpu again")


def _find_tpu() -> Devices | None:
    """Return the TPU that is in this machine or that TPU_NAME names, or None.

    TensorFlow's resolver is called only if there is a name: it starts the runtime, and then workers can no longer meet."""
    is_here = any(tf.config.list_physical_devices(kind) for kind in ("TPU_SYSTEM", "TPU"))
    name = "local" if is_here else read_tpu_name()
    if name is None:
        return None
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=name)
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (tf.errors.OpError, RuntimeError, ValueError) as error:
        reason = one_line(error, limit=200)
        raise RequestError(f"TPU {name!r} does not answer ({reason}); unset TPU_NAME to train without it") from None
    strategy = tf.distribute.TPUStrategy(resolver)
    return Devices(strategy, f"TPUStrategy: a TPU of {strategy.num_replicas_in_sync} cores answers", on_tpu=True)
