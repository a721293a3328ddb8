"""Start the other ranks on one host, join them in a group, and end them together."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from upshift import parent_process
from upshift.errors import Interrupted, JobFailed, MissingInternal, RequestError, UpshiftError
from upshift.internals.torch_names import DEFAULT_STORE, cuda_was_asked
from upshift.parent_process import end_with
from upshift.planning.plan import Plan
from upshift.settings import OwnRank, environment_of_rank, take_own_rank
from upshift.training.out_of_memory import find_out_of_memory

PATIENCE_SECONDS = 20.0
POLL_SECONDS = 0.05
GROUP_TIMEOUT = timedelta(minutes=30)  # torch's for gloo; nccl's ten end a run whose rank 0 saves for longer
CAUSE_KEY = "cause of death"  # in the job's store: the words of the first rank that failed
Request = TypeVar("Request")
Result = TypeVar("Result")
_rank_and_size: list[tuple[int, int]] = []  # set once in a forked rank, before anything else runs there


def rank_environment() -> tuple[int, int]:
    """Return this process's rank and the number of ranks."""
    return _rank_and_size[0] if _rank_and_size else (0, 1)


def join_processes(plan: Plan, work: Callable[[Request], Result], request: Request) -> Result:
    """Run ``work(request)`` in ``plan.num_processes`` processes. Return rank 0's result.

    The other ranks are forked, so no thread pool may exist yet: call it before the first tensor operation. Where this process
    has asked CUDA something, forks could not use it. Each then runs this process's command from the beginning, and comes here.
    """
    if plan.num_processes == 1:
        return work(request)
    own = take_own_rank()
    if own is not None:
        _run_rank_and_exit(own, plan, work, request)
    port = free_port()
    children = [_fork_rank(rank, port, plan, work, request) for rank in range(1, plan.num_processes)]
    try:
        result = _run_rank(0, port, plan, work, request)
    except RuntimeError as error:
        failed = _wait_for_children(children, seconds=PATIENCE_SECONDS)
        if failed and lost_connection(error):  # a rank that left no words was killed
            raise _ranks_failed(failed, plan) from error
        raise
    except BaseException:  # the others fail with this rank, whose words are the ones to show
        _wait_for_children(children, seconds=PATIENCE_SECONDS)
        raise
    failed = _wait_for_children(children)
    if failed:
        raise _ranks_failed(failed, plan)
    return result


def _wait_for_children(children: list[int], *, seconds: float = math.inf) -> list[int]:
    """Return the exit codes that are not 0, once all children have ended.

    A child that has not ended after ``seconds`` waits for a rank that is gone, and is killed.
    """
    end = time.monotonic() + seconds
    codes = []
    for child in children:
        while (ended := os.waitpid(child, os.WNOHANG if end < math.inf else 0))[0] == 0:
            if time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
            time.sleep(POLL_SECONDS)
        codes.append(os.waitstatus_to_exitcode(ended[1]))
    return [code for code in codes if code]


def _ranks_failed(codes: list[int], plan: Plan) -> JobFailed:
    return JobFailed(f"{len(codes)} of {plan.num_processes} processes failed (exit codes {codes})")


def _fork_rank(rank: int, port: int, plan: Plan, work: Callable[[Request], Result], request: Request) -> int:
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        end_with(parent)
        own = OwnRank(rank=rank, port=port)
        if cuda_was_asked():
            command = parent_process.begin_again()
            os.execve(command[0], command, environment_of_rank(own))
        _run_rank_and_exit(own, plan, work, request)
    finally:  # a fork never returns into the parent's code
        traceback.print_exc()
        os._exit(1)


def _run_rank_and_exit(own: OwnRank, plan: Plan, work: Callable[[Request], Result], request: Request) -> NoReturn:
    """Run the rank, and end this process."""
    code = 1
    try:
        _run_rank(own.rank, own.port, plan, work, request)
        code = 0
    except UpshiftError:
        pass  # rank 0 fails with these words
    except BaseException:  # the rank must end here, whatever happened, and never return into the code of rank 0
        traceback.print_exc()
    finally:
        os._exit(code)


def _run_rank(rank: int, port: int, plan: Plan, work: Callable[[Request], Result], request: Request) -> Result:
    with join_group(plan, rank, init_method=f"tcp://127.0.0.1:{port}"):
        return work(request)


@contextmanager
def join_group(plan: Plan, rank: int, **meeting: Any) -> Iterator[None]:
    """Join the group of the plan's ranks while open. ``meeting`` has the options of ``init_process_group`` by which ranks
    meet.

    All ranks leave together: gloo's threads abort a process that ends while others still speak with it.
    """
    _rank_and_size[:] = [(rank, plan.num_processes)]
    backend = "nccl" if plan.device == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=plan.num_processes, timeout=GROUP_TIMEOUT, **meeting)
    try:
        try:
            yield
        except Interrupted:  # all ranks are, at the same step
            dist.barrier()
            raise
        except Exception as error:  # whatever it is, ranks that wait for this one have to know
            _raise_cause(error, rank, plan)
            raise
        dist.barrier()
    finally:
        dist.destroy_process_group()
        _rank_and_size.clear()


def lost_connection(error: BaseException) -> bool:
    """Return whether a connection to another rank broke. torch's pipelines wrap an error of a stage."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, dist.DistBackendError) or (isinstance(found, RuntimeError) and "gloo" in str(found)):
            return True
        found = found.__cause__
    return False


def _raise_cause(error: Exception, rank: int, plan: Plan) -> None:
    """Write into the store why this rank fails, before its connections close. If it only lost another rank, raise that rank's
    words.

    Return if the words are this rank's own, or there are none: the other rank was killed, or was rank 0, which had the store.
    """
    with suppress(dist.DistError, MissingInternal):
        store = DEFAULT_STORE.get()()
        if not lost_connection(error):
            store.compare_set(CAUSE_KEY, "", json.dumps(_describe_cause(error, rank, plan)))
        elif store.check([CAUSE_KEY]):
            cause = json.loads(store.get(CAUSE_KEY))
            kind = RequestError if cause["is_request"] else JobFailed
            raise kind(cause["words"]) from (MemoryError(cause["words"]) if cause["out_of_memory"] else error)


def _describe_cause(error: Exception, rank: int, plan: Plan) -> dict[str, Any]:
    refusal = find_out_of_memory(error)
    words = " ".join(str(refusal or error).split())
    who = f"rank {rank} of {plan.num_processes}"
    if isinstance(error, UpshiftError):
        words = str(error)
    else:
        words = f"{who} ran out of memory: {words}" if refusal else f"{who} failed: {type(error).__name__}: {words}"
    return {"words": words, "out_of_memory": refusal is not None, "is_request": isinstance(error, RequestError)}


def free_port() -> int:
    """Return a free port of 127.0.0.1. Another process may take it meanwhile."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
