"""Let the ranks of a launcher train for a task together: each has the whole model, and a part of the rows of every step.

Rank 0 checks the request and holds the output folder. The others read the data afterwards, and end with rank 0 if it fails.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from upshift import errors
from upshift.errors import Interrupted, JobFailed, RequestError, UpshiftError
from upshift.hardware.exchange_probe import meet
from upshift.settings import Ranks
from upshift.training.rank_processes import GROUP_TIMEOUT

READY_KEY = "task"  # in the store of the ranks: empty once rank 0 is ready, else the class of its error


@contextmanager
def telling_others(store: Store) -> Iterator[None]:
    """Tell the other ranks on leaving that rank 0 is ready, or that it failed."""
    try:
        yield
    except UpshiftError as error:
        kind = type(error) if type(error) in (RequestError, Interrupted) else JobFailed
        store.set(READY_KEY, kind.__name__)
        raise
    store.set(READY_KEY, "")


def wait_for_rank_0(store: Store) -> None:
    """Wait until rank 0 is ready. If it failed, raise its error without a message, because rank 0 prints the message."""
    failed = store.get(READY_KEY).decode()
    if failed:
        raise getattr(errors, failed)("")


@contextmanager
def joined(ranks: Ranks, store: Store) -> Iterator[None]:
    """Join the process group of the ranks while open. accelerate finds it there."""
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(ranks.local_rank % torch.cuda.device_count())
    dist.init_process_group(
        "nccl" if has_gpu else "gloo",
        store=PrefixStore("group", store),
        rank=ranks.rank,
        world_size=ranks.size,
        timeout=GROUP_TIMEOUT,
    )
    try:
        with objects_of_all_ranks():
            yield
        meet()  # all leave together, because a rank that ends early breaks the others' last exchange
    finally:
        dist.destroy_process_group()


@contextmanager
def objects_of_all_ranks() -> Iterator[None]:
    """Let the losses of detectors and segmenters divide by the objects of all ranks while open.

    These losses take the mean of the ranks' numbers (accelerate's ``reduce``), and divide it by the number of ranks once more, so
    that they are as many times too large as there are ranks (transformers 5.23)."""
    from accelerate.utils import reduce

    with _replaced(reduce, _sum_of_ranks):
        yield


@contextmanager
def objects_of_own_rows() -> Iterator[None]:
    """Let these losses divide by the objects of a rank's own rows while open, so that no rank waits for another one.

    In the last batch of an evaluation, a rank may have fewer rows of its own than the others, or none."""
    with _replaced(_sum_of_ranks, _times_ranks):
        yield


def _sum_of_ranks(number: torch.Tensor) -> Any:
    from accelerate.utils import reduce

    return reduce(number, reduction="sum")


def _times_ranks(number: torch.Tensor) -> torch.Tensor:
    """Return a number of objects, by which a loss divides once it has divided it by the number of ranks."""
    return number * dist.get_world_size()


@contextmanager
def _replaced(function: Any, other: Any) -> Iterator[None]:
    """Let the modules of transformers that have a function under the name ``reduce`` have another one while open."""
    modules = [module for name, module in sys.modules.items() if name.startswith("transformers.") and _uses(module, function)]
    for module in modules:
        vars(module)["reduce"] = other
    try:
        yield
    finally:
        for module in modules:
            vars(module)["reduce"] = function


def _uses(module: ModuleType | None, function: Any) -> bool:
    """Return whether a module has the function. Some modules would import others when a name is looked up."""
    return module is not None and vars(module).get("reduce") is function


def any_rank(flag: bool, device: torch.device) -> bool:
    """Return whether the flag is set on any rank. All ranks call it. Without a process group it is the flag itself."""
    if not dist.is_available() or not dist.is_initialized():
        return flag
    flags = torch.tensor(int(flag), device=device)
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return bool(flags.item())
