"""Start the ranks of a plan on one host, join them in a process group, and end them together."""

from __future__ import annotations

import json
import math
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from upshift import parent_process
from upshift.errors import Interrupted, JobFailed, MissingInternal, RequestError, UpshiftError
from upshift.hardware.exchange_probe import free_port, meet
from upshift.internals.torch_names import DEFAULT_STORE, is_fork_after_cuda
from upshift.parent_process import end_with
from upshift.planning.plan import Plan
from upshift.settings import AssignedRank, environment_for_rank, take_assigned_rank
from upshift.text import one_line
from upshift.training.out_of_memory import find_out_of_memory

PATIENCE_SECONDS = 20.0
POLL_SECONDS = 0.05
GROUP_TIMEOUT = timedelta(
    minutes=30
)  # torch's default for gloo; nccl's ten minutes would end a run whose rank 0 saves for longer
CAUSE_KEY = "cause of death"  # in the job's store: the message of the first rank that failed
Request = TypeVar("Request")
Result = TypeVar("Result")
_rank_and_size: list[tuple[int, int]] = []  # set once in a rank's process, before anything else runs there


def rank_environment() -> tuple[int, int]:
    """Return this process's rank and the number of ranks."""
    return _rank_and_size[0] if _rank_and_size else (0, 1)


def join_processes(plan: Plan, work: Callable[[Request], Result], request: Request) -> Result:
    """Run ``work(request)`` in ``plan.num_processes`` processes. Return rank 0's result.

    The other ranks are forked, so no thread pool may exist yet: call it before the first tensor operation. If this process has
    used CUDA, a fork could not use it. Then each rank runs this process's command from the beginning until it comes here.
    """
    if plan.num_processes == 1:
        return work(request)
    own_rank = take_assigned_rank()
    if own_rank is not None:
        _run_rank_and_exit(own_rank, plan, work, request)
    port = free_port()
    children = [_fork_rank(rank, port, plan, work, request) for rank in range(1, plan.num_processes)]
    try:
        result = _run_rank(0, port, plan, work, request)
    except RuntimeError as error:
        exit_codes = _wait_for_children(children, seconds=PATIENCE_SECONDS)
        if exit_codes and lost_connection(error):  # a rank that left no message was killed
            raise _ranks_failed(exit_codes, plan) from error
        raise
    except BaseException:  # the others fail because of this rank, whose error is the one to show
        _wait_for_children(children, seconds=PATIENCE_SECONDS)
        raise
    exit_codes = _wait_for_children(children)
    if exit_codes:
        raise _ranks_failed(exit_codes, plan)
    return result


def _wait_for_children(children: list[int], *, seconds: float = math.inf) -> list[int]:
    """Wait until all children have ended. Return the exit codes that are not 0.

    A child that runs for longer than ``seconds`` waits for a rank that is gone, and is killed.
    """
    deadline = time.monotonic() + seconds
    codes = []
    for child in children:
        while True:
            ended_child, status = os.waitpid(child, os.WNOHANG if deadline < math.inf else 0)
            if ended_child != 0:
                break
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(POLL_SECONDS)
        codes.append(os.waitstatus_to_exitcode(status))
    return [code for code in codes if code]


def _ranks_failed(codes: list[int], plan: Plan) -> JobFailed:
    return JobFailed(f"{len(codes)} of {plan.num_processes} processes failed (exit codes {codes})")


def _fork_rank(rank: int, port: int, plan: Plan, work: Callable[[Request], Result], request: Request) -> int:
    """Start a rank in a new process. Return the process's id."""
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        end_with(parent)
        own_rank = AssignedRank(rank=rank, port=port)
        if is_fork_after_cuda():
            command = parent_process.restart_command()
            os.execve(command[0], command, environment_for_rank(own_rank))
        _renew_threads()
        _run_rank_and_exit(own_rank, plan, work, request)
    finally:  # a fork must never return into the parent's code
        traceback.print_exc()
        os._exit(1)


def _renew_threads() -> None:
    """Make PyTorch's pool of threads in this forked process, which has none of its parent's threads.

    Else the first tensor operation makes it. Where the parent has set a number of threads, two operations that come first at the
    same time, as in a load by several threads, abort with "Invalid thread pool!" (torch 2.13, aten/src/ATen/ParallelOpenMP.cpp).
    """
    torch.set_num_threads(torch.get_num_threads())


def _run_rank_and_exit(own_rank: AssignedRank, plan: Plan, work: Callable[[Request], Result], request: Request) -> NoReturn:
    """Run the rank, and end this process."""
    code = 1
    try:
        _run_rank(own_rank.rank, own_rank.port, plan, work, request)
        code = 0
    except UpshiftError:
        pass  # rank 0 raises the same error
    except BaseException:  # of any kind: this process must end here and never run the code of rank 0
        traceback.print_exc()
    finally:
        os._exit(code)


def _run_rank(rank: int, port: int, plan: Plan, work: Callable[[Request], Result], request: Request) -> Result:
    if plan.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    with join_group(plan, rank, init_method=f"tcp://127.0.0.1:{port}"):
        return work(request)


@contextmanager
def join_group(plan: Plan, rank: int, *, init_method: str | None = None, store: dist.Store | None = None) -> Iterator[None]:
    """Join the process group of the plan's ranks while open.

    All ranks leave together, because gloo's threads abort a process that ends while others still exchange with it.
    Ranks find each other by ``init_method`` or ``store``, as in ``init_process_group``.
    """
    _rank_and_size[:] = [(rank, plan.num_processes)]
    backend = "nccl" if plan.device == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=init_method, timeout=GROUP_TIMEOUT, world_size=plan.num_processes, rank=rank, store=store
    )
    try:
        try:
            yield
        except Interrupted:  # all ranks are interrupted at the same step
            meet()
            raise
        except Exception as error:  # of any kind: ranks that wait for this one must learn of it
            _share_cause(error, rank, plan)
            raise
        meet()
    finally:
        dist.destroy_process_group()
        _rank_and_size.clear()


def lost_connection(error: BaseException) -> bool:
    """Return whether a connection to another rank broke. torch's pipelines wrap an error of a stage.

    NCCL has the same type of error for memory that runs out in this rank.
    """
    if find_out_of_memory(error) is not None:
        return False
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, dist.DistBackendError) or (isinstance(cause, RuntimeError) and "gloo" in str(cause)):
            return True
        cause = cause.__cause__
    return False


def _share_cause(error: Exception, rank: int, plan: Plan) -> None:
    """Write into the store why this rank fails, before its connections close.

    If this rank fails only because it lost the connection to another one, raise an error with the other rank's message. Return
    if there is no such message: the other rank was killed, or it was rank 0, which had the store.
    """
    with suppress(dist.DistError, MissingInternal):
        store = DEFAULT_STORE.get()()
        if not lost_connection(error):
            store.compare_set(CAUSE_KEY, "", json.dumps(_describe_cause(error, rank, plan)))
        elif store.check([CAUSE_KEY]):
            cause = json.loads(store.get(CAUSE_KEY))
            error_class = RequestError if cause["is_request"] else JobFailed
            origin = MemoryError(cause["words"]) if cause["out_of_memory"] else error
            raise error_class(cause["words"]) from origin


def _describe_cause(error: Exception, rank: int, plan: Plan) -> dict[str, Any]:
    refusal = find_out_of_memory(error)
    text = one_line(refusal or error, limit=None)
    rank_name = f"rank {rank} of {plan.num_processes}"
    if isinstance(error, UpshiftError):
        message = str(error)
    elif refusal:
        message = f"{rank_name} ran out of memory: {text}"
    else:
        message = f"{rank_name} failed: {type(error).__name__}: {text}"
    return {"words": message, "out_of_memory": refusal is not None, "is_request": isinstance(error, RequestError)}
