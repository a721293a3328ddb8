"""Time how fast ranks on this machine exchange tensors, for the processes of the probe."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable
from datetime import timedelta

LATENCY_BYTES = 2**10
REPEATS = 5
PATIENCE = timedelta(seconds=120)  # how long one rank waits for the others


def free_port() -> int:
    """Return a free port of 127.0.0.1. Another process may take it before it is used."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measure_exchanges(
    backend: str, device: str, *, rank: int, ranks: int, port: int, large_bytes: int
) -> dict[str, tuple[float, float]]:
    """Return (seconds of a small tensor, bytes per second of a large one) of each operation between ranks on this machine.

    Raise RuntimeError, as torch does, if the process group fails.
    """
    import torch.distributed as dist

    # With an address instead of a store, torchrun's environment would make torch connect to the agent's store.
    store = dist.TCPStore("127.0.0.1", port, ranks, is_master=rank == 0, timeout=PATIENCE)
    dist.init_process_group(backend, store=store, timeout=PATIENCE, rank=rank, world_size=ranks)
    small = exchange_seconds(LATENCY_BYTES, device=device)
    large = exchange_seconds(large_bytes, device=device)
    meet()
    dist.destroy_process_group()
    return {name: (small[name], large_bytes / large[name]) for name in small}


def exchange_seconds(num_bytes: int, *, device: str) -> dict[str, float]:
    """Return the median seconds of each operation on a tensor of ``num_bytes``, between all ranks of the default group.

    ``send`` is from the first rank to the second one.
    """
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    ranks = dist.get_world_size()
    elements = num_bytes // 4 // ranks * ranks
    full = torch.zeros(elements, device=device)
    received = torch.zeros(elements, device=device)
    part = torch.zeros(elements // ranks, device=device)

    def send() -> None:
        if rank == 0:
            dist.send(full, 1)
        elif rank == 1:
            dist.recv(full, 0)

    operations: dict[str, Callable[[], object]] = {
        "all_gather": lambda: dist.all_gather_into_tensor(full, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, full),
        "all_reduce": lambda: dist.all_reduce(full),
        "all_to_all": lambda: dist.all_to_all_single(received, full),
        "send": send,
    }
    seconds = {}
    for name, operation in operations.items():
        samples = []
        for _ in range(REPEATS + 1):
            meet()
            start = time.perf_counter()
            operation()
            if device == "cuda":
                torch.cuda.synchronize()
            samples.append(time.perf_counter() - start)
        seconds[name] = statistics.median(samples[1:])
    return seconds


def meet() -> None:
    """Wait until all ranks of the default group are here. With NCCL they meet on their current devices."""
    import torch
    import torch.distributed as dist

    dist.barrier(device_ids=[torch.cuda.current_device()] if dist.get_backend() == "nccl" else None)
