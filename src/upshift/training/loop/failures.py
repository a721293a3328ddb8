"""Turn failures of a run into words that a user can act on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torch import nn

from upshift.benchmarking.environment import library_versions
from upshift.debugging.half_precision import examine_fp16
from upshift.debugging.run_report import forget, report_of
from upshift.errors import Interrupted, JobFailed, RequestError
from upshift.planning.plan import Plan
from upshift.training.checkpoint.files import still_loadable
from upshift.training.out_of_memory import find_out_of_memory


def doubts(model: nn.Module, plan: Plan) -> Iterator[str]:
    """Yield warnings before the first step: what will probably go wrong, and what to do instead."""
    found = examine_fp16(model) if plan.precision == "fp16" else None
    if found is not None:
        yield f"{found.what} ({found.cause}); upshift train ... --set precision=bf16, or --set precision=fp32"


@contextmanager
def death_reported(output: Path, step: Callable[[], int], *, rank: int, ranks: int) -> Iterator[None]:
    """Leave a report for `upshift doctor` if the run dies. Remove the report of an earlier run first."""
    forget(output, rank)
    try:
        yield
    except (Interrupted, RequestError):
        raise
    except BaseException as error:
        words = " ".join(f"{type(error).__name__}: {error}".split())
        report = report_of(error, rank=rank, ranks=ranks, kind="died", step=step(), words=words, versions=library_versions())
        with suppress(OSError):  # the disk may be what failed
            report.write(output)
        raise


@contextmanager
def out_of_memory_in_words(output: Path, *, rank: int, ranks: int) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        refusal = find_out_of_memory(error)
        if refusal is None:
            raise
        who = f"rank {rank} of {ranks} ran out of memory" if ranks > 1 else "out of memory"
        raise JobFailed(
            f"{who} ({' '.join(str(refusal).split())[:160]}); {still_loadable(output)}; "
            "let `upshift plan` choose again for the memory that is free"
        ) from error
