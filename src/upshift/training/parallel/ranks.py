"""Let all ranks agree on a value or a failure. With one process, nothing is exchanged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from upshift.errors import JobFailed, UpshiftError
from upshift.planning.plan import Plan

T = TypeVar("T")


def highest(number: int, plan: Plan) -> int:
    if plan.num_processes == 1:
        return number
    decision = torch.tensor(number, device=plan.device)
    dist.all_reduce(decision, op=dist.ReduceOp.MAX)
    return int(decision)


def slowest(seconds: float, plan: Plan) -> float:
    """Return the largest seconds of all ranks."""
    found = torch.tensor(seconds, device=plan.device, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def gather(value: T, plan: Plan) -> list[T]:
    """Return the values of all ranks, in order."""
    if plan.num_processes == 1:
        return [value]
    gathered: list[Any] = [None] * plan.num_processes
    dist.all_gather_object(gathered, value)
    return gathered


@contextmanager
def on_rank_0(plan: Plan) -> Iterator[None]:
    """Surround work of rank 0 that the others wait for. If it fails, all ranks raise the error with its words."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # whatever it is, the others must not wait for what does not come
        failure = error
    if plan.num_processes > 1:
        words: list[str | None] = [_words(failure)]
        dist.broadcast_object_list(words, src=0)
        if failure is None and words[0] is not None:
            failure = JobFailed(words[0])
    if failure is not None:
        raise failure


@contextmanager
def together(plan: Plan) -> Iterator[None]:
    """Surround work of all ranks. If one rank fails, all ranks raise the error with its words."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # whatever it is, the others must hear of it
        failure = error
    said = gather(_words(failure), plan)
    if failure is None and any(said):
        failure = JobFailed(next(words for words in said if words))
    if failure is not None:
        raise failure


def _words(failure: Exception | None) -> str | None:
    if failure is None:
        return None
    if isinstance(failure, UpshiftError):
        return str(failure)
    return f"{type(failure).__name__}: {failure}"
