"""Run one rank of a group: ``python -m upshift.inference.workers.rank_process DESCRIPTOR RANK SIZE PORT DEVICE``.

The descriptor is a connection to the process that started this one. From there come the job and its tasks. The ranks meet at the
port."""

from __future__ import annotations

import signal
import sys
from multiprocessing.connection import Connection

from upshift.hardware.cpu_affinity import bind_process
from upshift.inference.workers.worker import Worker
from upshift.settings import quiet_libraries, wait_briefly


def main() -> None:
    descriptor, rank, size, port = map(int, sys.argv[1:5])
    device = sys.argv[5]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    quiet_libraries()
    wait_briefly()
    if device == "cpu":
        bind_process(rank, size)
    connection = Connection(descriptor)
    worker = Worker(connection.recv())
    join_group(rank, size, port, device)
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        answer = worker.compute(task)
        connection.send(answer if rank == 0 else answer._replace(value=None))


def join_group(rank: int, size: int, port: int, device: str) -> None:
    """Join the process group of the ranks."""
    import torch
    import torch.distributed as dist

    if device == "cuda":
        torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=rank, world_size=size)


if __name__ == "__main__":
    main()
