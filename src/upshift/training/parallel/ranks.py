"""What all ranks agree on; with one process, nothing is asked."""

from __future__ import annotations

import torch
import torch.distributed as dist

from upshift.planning.plan import Plan


def highest(number: int, plan: Plan) -> int:
    if plan.num_processes == 1:
        return number
    decision = torch.tensor(number, device=plan.device)
    dist.all_reduce(decision, op=dist.ReduceOp.MAX)
    return int(decision)


def slowest(seconds: float, plan: Plan) -> float:
    """The largest of all ranks'."""
    found = torch.tensor(seconds, device=plan.device, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)
