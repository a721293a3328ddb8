"""Stands in for `upshift train` under a launcher: joins a gloo group by its variables, adds up the ranks, says what it saw."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def variable(*names: str) -> str:
    return next(os.environ[name] for name in names if name in os.environ)


def main() -> None:
    folder = Path(os.environ["SEEN"])
    rank = int(variable("RANK", "OMPI_COMM_WORLD_RANK"))
    size = int(variable("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"))
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if "--die" in sys.argv and attempt == 0 and rank == 1:
        os._exit(9)
    if "--fail" in sys.argv and rank == size - 1:
        sys.exit("the last rank fails")
    if "--deaf" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / f"started-{rank}").write_text(str(os.getpid()))
    while {"--wait", "--deaf"} & {*sys.argv}:
        time.sleep(0.1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    seen = {
        "rank": rank, "size": size, "sum": total.item(), "attempt": attempt, "argv": sys.argv[1:], "folder": str(Path.cwd()),
        "local_rank": int(variable("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")), "cpus": sorted(os.sched_getaffinity(0)),
        "threads": os.environ.get("OMP_NUM_THREADS"), "given": os.environ.get("GIVEN"),
    }  # fmt: skip
    (folder / f"rank-{rank}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


main()
