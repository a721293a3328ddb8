"""A signal to any rank stops all of them after the same step, and a copy that comes back needs no checkpoint of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from upshift.errors import Interrupted
from upshift.training.loop import loop as loop_module
from upshift.training.loop.loop import REASONS, TrainingLoop


def a_loop(rank: int, *, requested: bool) -> Any:
    return SimpleNamespace(
        rank=rank, plan=SimpleNamespace(num_processes=3), copies=None, stop=SimpleNamespace(requested=requested),
        job=SimpleNamespace(stop_after_tokens=None, stop_after_seconds=None), saver=SimpleNamespace(has_failed=False),
        progress=SimpleNamespace(tokens=[0], patience_is_over=False),
    )  # fmt: skip


@pytest.mark.parametrize("signalled", [(), (0,), (1,), (2,), (1, 2)])
def test_a_signal_to_any_rank_stops_all(signalled: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    loops = [a_loop(rank, requested=rank in signalled) for rank in range(3)]
    numbers: list[int] = []

    def contribute(number: int, plan: Any) -> int:
        numbers.append(number)
        return 0

    monkeypatch.setattr(loop_module, "all_reduce_max", contribute)
    for loop in loops:
        TrainingLoop._reason_to_stop(loop)
        TrainingLoop._stop_reference(loop)
    monkeypatch.setattr(loop_module, "all_reduce_max", lambda number, plan: max(numbers[::2]))
    assert {TrainingLoop._reason_to_stop(loop) for loop in loops} == {"interrupted" if signalled else REASONS[0]}
    monkeypatch.setattr(loop_module, "all_reduce_max", lambda number, plan: max(numbers[1::2]))
    for loop in loops:
        if signalled:
            with pytest.raises(Interrupted, match="before the first step"):
                TrainingLoop._stop_reference(loop)
        else:
            TrainingLoop._stop_reference(loop)
