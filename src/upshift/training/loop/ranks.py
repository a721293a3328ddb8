"""What the ranks of a run do together; with one process, nothing. And failures in words that a user can act on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from upshift.errors import JobFailed, UpshiftError
from upshift.planning.plan import Plan
from upshift.training.checkpoint.files import still_loadable
from upshift.training.out_of_memory import is_out_of_memory

T = TypeVar("T")


def gather(value: T, plan: Plan) -> list[T]:
    """Of all ranks, in order."""
    if plan.num_processes == 1:
        return [value]
    gathered: list[Any] = [None] * plan.num_processes
    dist.all_gather_object(gathered, value)
    return gathered


@contextmanager
def on_rank_0(plan: Plan) -> Iterator[None]:
    """Around work of rank 0 that the others wait for: when it fails, all of them fail, with its words."""
    failure: UpshiftError | None = None
    try:
        yield
    except UpshiftError as error:
        failure = error
    if plan.num_processes > 1:
        words: list[str | None] = [str(failure) if failure else None]
        dist.broadcast_object_list(words, src=0)
        if failure is None and words[0] is not None:
            failure = JobFailed(words[0])
    if failure is not None:
        raise failure


@contextmanager
def out_of_memory_in_words(output: Path) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise JobFailed(
            f"out of memory ({' '.join(str(error).split())[:160]}); {still_loadable(output)}; "
            "let `upshift plan` choose again for the memory that is free"
        ) from error
