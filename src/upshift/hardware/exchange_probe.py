"""Time how fast the ranks of the default process group exchange tensors, for the processes of the probe."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

LATENCY_BYTES = 2**10
REPEATS = 5


def exchange_seconds(num_bytes: int, *, device: str) -> dict[str, float]:
    """Return the median seconds of each operation on a tensor of ``num_bytes``, between all ranks.

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
            dist.barrier()
            start = time.perf_counter()
            operation()
            if device == "cuda":
                torch.cuda.synchronize()
            samples.append(time.perf_counter() - start)
        seconds[name] = statistics.median(samples[1:])
    return seconds


def links_of(small: dict[str, float], large: dict[str, float], large_bytes: int) -> dict[str, tuple[float, float]]:
    """Return (seconds of the small tensor, bytes per second of the large one) of each operation."""
    return {name: (small[name], large_bytes / large[name]) for name in small}
