"""Write a Ray Train job: Ray places and restarts the ranks. Each rank runs `upshift train` with the variables of torchrun."""

from __future__ import annotations

from upshift.launching.request import Launch


def ray_file(launch: Launch) -> str:
    ranks = launch.ranks_per_node
    resources = {"CPU": max((launch.cpus or ranks) // ranks, 1), **({"GPU": launch.gpus / ranks} if launch.gpus else {})}
    return f'''\
# Written by `upshift launch --ray`; submit it with: ray job submit -- python THIS_FILE, or run it where ray is started.
import os
import socket
import subprocess
import sys

import ray.train
import torch.distributed as dist
from ray.train.torch import TorchConfig, TorchTrainer

COMMAND = {list(launch.command)!r}
ENVIRONMENT = {dict(launch.environment)!r}


def rank() -> None:
    """Ray has made a group of the workers, which only agrees where the ranks themselves meet."""
    found = [None]
    if dist.get_rank() == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            found = [(ray.util.get_node_ip_address(), probe.getsockname()[1])]
    dist.broadcast_object_list(found, src=0)
    context, (address, port) = ray.train.get_context(), found[0]
    variables = {{
        "RANK": context.get_world_rank(), "WORLD_SIZE": context.get_world_size(), "MASTER_ADDR": address, "MASTER_PORT": port,
        "LOCAL_RANK": context.get_local_rank(), "LOCAL_WORLD_SIZE": context.get_local_world_size(), **ENVIRONMENT,
    }}
    environment = {{**os.environ, **{{name: str(value) for name, value in variables.items()}}}}
    subprocess.run([sys.executable, *COMMAND], env=environment, check=True)


TorchTrainer(
    rank,
    torch_config=TorchConfig(backend="gloo"),
    scaling_config=ray.train.ScalingConfig(
        num_workers={ranks * launch.max_nodes},  # ranks: {ranks} of each of {launch.max_nodes} hosts
        use_gpu={launch.gpus > 0},
        resources_per_worker={resources!r},
        placement_strategy={"SPREAD" if ranks == 1 else "PACK"!r},
    ),
    # A failed rank ends the group, which starts again and goes on from the newest checkpoint.
    run_config=ray.train.RunConfig(
        name={launch.name!r}, failure_config=ray.train.FailureConfig(max_failures={launch.max_restarts})
    ),
).fit()
'''
