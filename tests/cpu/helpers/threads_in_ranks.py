"""A forked rank's four threads, whose first tensor operations begin at the same time, ten times. Prints all errors."""

from __future__ import annotations

import json
import threading
import time

import torch
from parallel_runs import Case, a_plan

from upshift.training.rank_processes import join_processes, rank_environment

PLAN = a_plan(Case(world=2))


def first_operations(tensors: list[torch.Tensor]) -> list[str]:
    from upshift.training.distributed.mesh import all_gather_objects, init_mesh

    errors: list[str] = []
    begin = time.monotonic() + 0.02

    def add() -> None:
        while time.monotonic() < begin:
            time.sleep(0)
        try:
            torch.add(*tensors)
        except RuntimeError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=add) for _ in range(4 * rank_environment()[0])]  # rank 0 was not forked
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    init_mesh(PLAN)
    return [error for of_rank in all_gather_objects(errors, PLAN) for error in of_rank]


if __name__ == "__main__":
    torch.set_num_threads(64)  # a pool that takes long to make
    tensors = [torch.ones(1_000_000), torch.ones(1_000_000)]
    print(json.dumps([error for _ in range(10) for error in join_processes(PLAN, first_operations, tensors)]))
