"""Tasks in copies of the process: nothing is lost when one fails or is killed."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import pytest
import torch

from upshift.models.tracing.fork_map import run_forked


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_results_come_in_the_order_of_the_tasks_from_other_processes() -> None:
    seen: list[int] = []
    results = run_forked([lambda number=number: (number, os.getpid()) for number in range(7)], progress=seen.append)
    assert [number for number, _ in results] == list(range(7)) and seen == list(range(1, 8))
    assert os.getpid() not in {process for _, process in results}


def test_an_error_is_raised_here_with_its_own_traceback() -> None:
    def fails() -> int:
        raise ValueError(f"in {os.getpid()}")

    with pytest.raises(ValueError, match=f"in {os.getpid()}"):
        run_forked([lambda: 1, fails, lambda: 3])


def test_tasks_of_killed_copies_are_done_here() -> None:
    here = os.getpid()

    def killed(number: int) -> int:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    assert run_forked([lambda number=number: killed(number) for number in range(5)]) == list(range(5))


@pytest.mark.parametrize("frozen", [True, False])
def test_objects_that_the_caller_excluded_from_collections_stay_excluded(frozen: bool) -> None:
    """After a fork each full collection would visit the two million objects of the libraries again, for the rest of a process."""
    if not frozen:
        gc.unfreeze()
    before = gc.get_freeze_count()
    try:
        assert (before > 0) == frozen
        assert run_forked([os.getpid, os.getpid])[0] != os.getpid()
        after = gc.get_freeze_count()
        assert before * 0.99 <= after <= before  # fewer: frozen objects that nobody uses any more are freed at any moment
    finally:
        if not frozen:
            gc.freeze()
